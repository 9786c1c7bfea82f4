"""A CUDA device's streams, and what is lent to each of their operations until it has ended."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.clock import monotonic
from kvtier.device.base import Fence
from kvtier.device.descriptors import Numbers, allocated
from kvtier.device.driver import Buffer, Driver, Event
from kvtier.errors import MisuseError

TABLE_RUNS: Final = 5461
"""Of one operation; a copy of more is several. A larger table would have to be allocated when it
comes, or be there, pinned, 64 times for each stream."""
TABLE_PLANES: Final = 1024
_TABLE_BYTES: Final = TABLE_RUNS * 24 + TABLE_PLANES * 16
_SCRATCH_BYTES: Final = 1 << 20
_LOOK_SECONDS: Final = 50e-6
_PAUSE: Final = threading.Event()  # never set


class CudaFence:
    """See Fence. error: why not all was enqueued that it is the fence of; None: all was."""

    __slots__ = ("error", "event")

    def __init__(self, event: Event, error: Exception | None = None) -> None:
        self.event = event
        self.error = error

    def done(self) -> bool:
        """See Fence."""
        done = self.event.done()
        if done and self.error is not None:  # not before: what was enqueued is under way
            raise self.error
        return done

    def wait(self, timeout: float) -> bool:
        """See Fence."""
        until = monotonic() + timeout
        while not self.done():
            if monotonic() >= until:
                return False
            _PAUSE.wait(_LOOK_SECONDS)
        return True


class CudaStream:
    """See Stream. Of one CudaDevice: `handle` is the driver's."""

    def __init__(self, driver: Driver, handle: Any, in_flight: int) -> None:
        self.handle = handle
        self.closed = False
        self.in_flight = in_flight
        self._driver = driver
        # All at once, and here: to allocate between copies may wait for all that a GPU does.
        host = driver.host(in_flight * _TABLE_BYTES).reshape(in_flight, _TABLE_BYTES)
        there = driver.memory(host.nbytes, handle)
        self._used: list[Turn] = []  # since the last event
        self._turns = [
            Turn(one, there, at * _TABLE_BYTES, self._used) for at, one in enumerate(host)
        ]
        self._count = 0
        # Memory that the system has just given costs more to touch than all that is planned in it.
        self._scratch = np.zeros(_SCRATCH_BYTES // 8, np.uint64)

    def room(self, count: int) -> Numbers:
        """Return memory for so many numbers, good until the next call."""
        fits = count <= len(self._scratch)
        return self._scratch[:count] if fits else allocated(count)

    def record(self, error: Exception | None = None) -> CudaFence:
        """See Stream. error: of what the driver has refused, see CudaFence."""
        event = self._driver.record(self.handle)
        while self._used:
            self._used.pop().event = event
        return CudaFence(event, error)

    def wait(self, fence: Fence) -> None:
        """See Stream. A fence of no GPU has to be done. Raises MisuseError, or what it raises."""
        if isinstance(fence, CudaFence):
            if fence.error is not None:
                raise fence.error
            self._driver.wait(self.handle, fence.event)
        elif not fence.done():
            raise MisuseError(
                f"a GPU cannot wait for {fence!r}, which is not done: wait for it on the host first"
            )

    def turn(self) -> Turn:
        """Lend what one operation needs until it has ended; wait for the oldest where all are lent.

        What is lent is the operation's alone until its event: nothing that it reads later on is
        changed, or given back, before. That event is the next that is recorded, whatever for, once
        the caller is through with it: the turn is a context manager, to be entered at once.
        Raises MisuseError where its caller has all of them, and would wait for itself.
        """
        for _ in self._turns:
            turn = self._turns[self._count % len(self._turns)]
            self._count += 1
            if not turn.lent:
                break
        else:
            raise MisuseError(f"all {len(self._turns)} operations in flight are of one call")
        if turn in self._used:
            self.record()
        while turn.event is not None and not _ended(turn.event):
            _PAUSE.wait(_LOOK_SECONDS)
        turn.lent = True
        return turn


class Turn:
    """What one operation in flight owns: a table, on both sides.

    there: from `at` on. used: of its stream, those that no event has been recorded for since.
    """

    def __init__(self, host: NDArray[np.uint8], there: Buffer, at: int, used: list[Turn]) -> None:
        self.event: Event | None = None
        self.lent = False
        self._used = used
        self._host = host.view(np.uint64)
        self._there = there
        self._at = at

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.lent = False
        self._used.append(self)

    def table(self, rows: Sequence[Numbers]) -> Numbers:
        """Return a table of rows, one after another, on the host."""
        return np.concatenate(rows, out=self._host[: sum(map(len, rows))])

    def upload(self, driver: Driver, stream: Any, table: Numbers) -> int:
        """Enqueue a copy of that table to the GPU; return its address there."""
        address = self._there.address + self._at
        driver.copy(stream, address, table.ctypes.data, table.nbytes)
        return address


def _ended(event: Event) -> bool:
    """Say whether all before an event has ended, however that went."""
    try:
        return event.done()
    except Exception:  # noqa: BLE001  (the operation's own fence raises it)
        return True
