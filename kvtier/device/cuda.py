"""The CUDA device: copies between a GPU's blocks and pinned slots, on streams of their own.

It has not run on a GPU yet. All but the driver's calls (``torch_driver``) is tested on CPU
streams that stand in for the driver's, as adverse ones, too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.clock import monotonic
from kvtier.device.base import Copy, Fence, Role, Stream
from kvtier.device.descriptors import Numbers, Runs, allocated, joined
from kvtier.device.driver import Buffer, Driver, Event, Work
from kvtier.device.layout import byte_pages
from kvtier.device.paths import LINK_BYTES, Choice, Table
from kvtier.device.pinning import Pinned
from kvtier.device.spread import Spread, spreads
from kvtier.device.staging import Lot, Stage, Staged
from kvtier.errors import ConfigError, MisuseError

__all__ = ["CudaDevice", "CudaFence", "CudaStream"]

IN_FLIGHT: Final = 64
"""Operations of one stream that are enqueued at a time. With some 1,000 an A100's queue is full,
and to enqueue takes 180 us and not 2: vllm-project/vllm#29013."""
STAGING_BYTES: Final = 32 << 20
_FEW_COPIES: Final = 8
"""Over the link, of one staged copy, whose length is not looked at."""
_TABLE_RUNS: Final = 5461
"""Of one operation; a copy of more is several. A larger table would have to be allocated when it
comes, or be there, pinned, 64 times for each stream."""
_TABLE_PLANES: Final = 1024
_LEAST_IN_FLIGHT: Final = 2
_ROWS: Final = 3  # of what a batched copy takes
_TABLE_BYTES: Final = _TABLE_RUNS * 24 + _TABLE_PLANES * 16
_SCRATCH_BYTES: Final = 1 << 20
_CLOSE_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 50e-6
_PAUSE: Final = threading.Event()  # never set
_log = logging.getLogger("kvtier")


class CudaFence:
    """See Fence."""

    __slots__ = ("event",)

    def __init__(self, event: Event) -> None:
        self.event = event

    def done(self) -> bool:
        """See Fence."""
        return self.event.done()

    def wait(self, timeout: float) -> bool:
        """See Fence."""
        until = monotonic() + timeout
        while not self.event.done():
            if monotonic() >= until:
                return False
            _PAUSE.wait(_LOOK_SECONDS)
        return True


class CudaStream:
    """See Stream. Of one CudaDevice: `handle` is the driver's."""

    def __init__(self, driver: Driver, handle: Any, in_flight: int) -> None:
        self.handle = handle
        self.closed = False
        self._driver = driver
        # All at once, and here: to allocate between copies may wait for all that a GPU does.
        host = driver.host(in_flight * _TABLE_BYTES).reshape(in_flight, _TABLE_BYTES)
        there = driver.memory(host.nbytes, handle)
        self._turns = [_Turn(one, there, at * _TABLE_BYTES) for at, one in enumerate(host)]
        self._count = 0
        # Memory that the system has just given costs more to touch than all that is planned in it.
        self._scratch = np.zeros(_SCRATCH_BYTES // 8, np.uint64)

    def room(self, count: int) -> Numbers:
        """Return memory for so many numbers, good until the next call."""
        fits = count <= len(self._scratch)
        return self._scratch[:count] if fits else allocated(count)

    def record(self) -> CudaFence:
        """See Stream."""
        return CudaFence(self._driver.record(self.handle))

    def wait(self, fence: Fence) -> None:
        """See Stream. A fence of no GPU has to be done. Raises MisuseError, or what it raises."""
        if isinstance(fence, CudaFence):
            self._driver.wait(self.handle, fence.event)
        elif not fence.done():
            raise MisuseError(
                f"a GPU cannot wait for {fence!r}, which is not done: wait for it on the host first"
            )

    @contextlib.contextmanager
    def turn(self) -> Iterator[_Turn]:
        """Lend what one operation needs until it has ended; wait for the oldest where all are lent.

        What is lent is the operation's alone until its event: nothing that it reads later on is
        changed, or given back, before.
        """
        while (turn := self._turns[self._count % len(self._turns)]).lent:
            self._count += 1
        self._count += 1
        while turn.event is not None and not _ended(turn.event):
            _PAUSE.wait(_LOOK_SECONDS)
        turn.lent = True
        try:
            yield turn
        finally:
            turn.lent = False
            turn.event = self._driver.record(self.handle)


class _Turn:
    """What one operation in flight owns: a table, on both sides. there: from `at` on."""

    def __init__(self, host: NDArray[np.uint8], there: Buffer, at: int) -> None:
        self.event: Event | None = None
        self.lent = False
        self._host = host.view(np.uint64)
        self._there = there
        self._at = at

    def table(self, rows: Sequence[Numbers]) -> Numbers:
        """Return a table of rows, one after another, on the host."""
        return np.concatenate(rows, out=self._host[: sum(map(len, rows))])

    def upload(self, driver: Driver, stream: Any, table: Numbers) -> int:
        """Enqueue a copy of that table to the GPU; return its address there."""
        address = self._there.address + self._at
        driver.copy(stream, address, table.ctypes.data, table.nbytes)
        return address


class CudaDevice:
    """Copies on two streams of one GPU, which `driver` drives. See Device.

    table: chooses the way that a copy goes. way: all go this one, where it is set. in_flight: how
    many operations of a stream at a time, two or more; beyond it a call waits for the oldest. Calls
    come from one thread a stream. Slots have to lie in pinned memory: others are refused, never
    copied slowly.
    """

    def __init__(
        self,
        driver: Driver,
        table: Table,
        way: Choice | None = None,
        *,
        in_flight: int = IN_FLIGHT,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        if way is not None and way.way == "batch" and not driver.batches:
            raise ConfigError(
                "this driver has no batched copies: they need CUDA 12.8, a driver of 570 or later"
            )
        if in_flight < _LEAST_IN_FLIGHT:
            raise ConfigError(f"{in_flight} operations in flight: a staged copy needs at least 2")
        self.name = f"cuda: {driver.name}"
        self.driver = driver
        self._table = table
        self.way = way
        self._staging_bytes = staging_bytes
        self._pinned = Pinned(driver)
        self._streams: dict[Role, CudaStream] = {
            "load": CudaStream(driver, driver.stream(), in_flight),
            "store": CudaStream(driver, driver.stream(), in_flight),
        }
        self._staging = {
            stream: driver.memory(staging_bytes, stream.handle) for stream in self._streams.values()
        }

    def stream(self, role: Role) -> CudaStream:
        """See Device."""
        return self._streams[role]

    def pages(self, tensor: Any, planes: int, block_bytes: int) -> NDArray[np.uint8]:
        """See Device. The array says where the bytes are; the host must not look inside."""
        return byte_pages(self.driver.own(tensor), planes, block_bytes)

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """See Device."""
        if self._pinned.holds(memory):
            return
        stale = self._pinned.stale(memory)
        if stale:  # what was mapped there is gone, or this is it by another size
            self._drain(_CLOSE_SECONDS)
            self._pinned.drop(stale)
        self._pinned.add(memory)

    def host_fence(self) -> CudaFence:
        """See Device. A fence of the stream that the calling thread computes on."""
        return CudaFence(self.driver.caller())

    def hold(self, fence: Fence, timeout: float) -> bool:
        """See Device. The stream that the calling thread computes on waits."""
        if not isinstance(fence, CudaFence):
            return fence.wait(timeout)
        self.driver.hold(fence.event)
        return True

    def gather(self, stream: Stream, copies: Sequence[Copy], after: Sequence[Fence]) -> Fence:
        """See Device. Raises MisuseError for what does not match, and enqueues nothing then."""
        mine = self._mine(stream)
        (planned,) = self._planned([copies])
        for fence in after:
            mine.wait(fence)
        self._move(mine, "store", planned, into_slot=True)
        return mine.record()

    def scatter(
        self, stream: Stream, groups: Sequence[Sequence[Copy]], after: Sequence[Fence]
    ) -> list[Fence]:
        """See Device. Raises MisuseError for what does not match, and enqueues nothing then."""
        mine = self._mine(stream)
        each = self._planned(groups)
        for fence in after:
            mine.wait(fence)
        fences: list[Fence] = []
        for planned in each:
            self._move(mine, "load", planned, into_slot=False)
            fences.append(mine.record())
        return fences

    def close(self) -> None:
        """See Device. Memory that work still uses after ten seconds stays pinned."""
        if all(stream.closed for stream in self._streams.values()):
            return
        for stream in self._streams.values():
            stream.closed = True
        if not self._drain(_CLOSE_SECONDS):
            _log.warning("%s still copies at close; its memory stays pinned", self.name)
            return
        self._pinned.drop()
        self.driver.close()

    def _drain(self, timeout: float) -> bool:
        until = monotonic() + timeout
        fences = [stream.record() for stream in self._streams.values()]
        for fence in fences:
            with contextlib.suppress(Exception):  # who holds the copy's own fence hears of it
                if not fence.wait(max(until - monotonic(), 0)):
                    return False
        return True

    def _mine(self, stream: Stream) -> CudaStream:
        if not any(stream is one for one in self._streams.values()):
            raise MisuseError("a CUDA device takes its own streams only")
        mine: CudaStream = stream  # type: ignore[assignment]  # it is one of them
        if mine.closed:
            raise MisuseError(f"{self.name} is closed")
        return mine

    def _planned(self, groups: Sequence[Sequence[Copy]]) -> list[list[Spread]]:
        """Return the runs of groups, all of whose slots are pinned."""
        each = spreads(groups)
        for spread in chain.from_iterable(each):
            low, high = spread.reach()
            if not self._pinned.covers(low, high):
                raise MisuseError(
                    f"slots at {low:#x} to {high:#x} are not in one memory that this device has "
                    "pinned: call its pin() with the arena's memory first"
                )
        return each

    def _move(
        self, stream: CudaStream, role: Role, planned: Sequence[Spread], *, into_slot: bool
    ) -> None:
        """Enqueue runs, on the way that is best for them."""
        choice = self.way
        if choice is None:
            total, count = (sum(one.total for one in planned), sum(one.count for one in planned))
            choice = self._table.choose(role, total, count, batches=self.driver.batches)
        for spread in planned:
            if choice.way == "batch":
                self._batch(stream, joined(spread.expanded(stream.room)), into_slot=into_slot)
            elif choice.way == "direct":
                self._launch(stream, spread.cut(), choice.grid, into_slot=into_slot)
            else:
                self._stages(stream, spread, choice.grid, into_slot=into_slot)

    def _batch(self, stream: CudaStream, runs: Runs, *, into_slot: bool) -> None:
        for some in _parts(len(runs), _TABLE_RUNS):
            with stream.turn() as turn:  # whose table is kept: it may be read after the call
                table = turn.table(runs.some(some).ends(into_slot=into_slot))
                self.driver.batch(stream.handle, table.reshape(_ROWS, -1))

    def _launch(self, stream: CudaStream, spread: Spread, grid: int, *, into_slot: bool) -> None:
        for planes, runs in product(
            _parts(len(spread.planes[0]), _TABLE_PLANES), _parts(len(spread.runs), _TABLE_RUNS)
        ):
            part = Spread(spread.planes[:, planes], spread.runs.some(runs))
            with self._uploaded(stream, part, into_slot=into_slot) as launch:
                launch(0, len(part.runs), grid)

    @contextlib.contextmanager
    def _uploaded(
        self, stream: CudaStream, spread: Spread, *, into_slot: bool
    ) -> Iterator[Callable[[int, int, int], None]]:
        """Enqueue tables; give what launches the kernel on some of the runs, on a grid.

        A turn has room for so many runs and planes.
        """
        planes, row = len(spread.planes[0]), len(spread.runs)
        with stream.turn() as turn:
            table = turn.table(spread.rows(into_slot=into_slot))
            there = turn.upload(self.driver, stream.handle, table)
            begin = there + 2 * planes * table.itemsize

            def launch(first: int, stop: int, grid: int) -> None:
                runs = stop - first
                work = Work(there, begin + first * table.itemsize, planes, runs, row)
                self.driver.launch(stream.handle, work, min(grid, planes * runs))

            yield launch

    def _stages(self, stream: CudaStream, spread: Spread, grid: int, *, into_slot: bool) -> None:
        """Copy through the GPU's own memory: the kernel there, the copy engine over the link.

        All is on one stream, so that one staging buffer is enough: in it nothing meets.
        """
        staged = Staged(spread)
        if staged.runs > _FEW_COPIES and spread.total < staged.runs * LINK_BYTES:
            self._launch(stream, spread.cut(), grid, into_slot=into_slot)
            return
        place = (self._staging[stream].address, self._staging_bytes)
        for stage in staged.stages(*place, _TABLE_PLANES, _TABLE_RUNS):
            first = 0
            for lots in _few(stage.lots, _TABLE_RUNS):
                self._lots(stream, stage, lots, first, into_slot=into_slot)
                first = lots[-1].stop

    def _lots(
        self, stream: CudaStream, stage: Stage, lots: Sequence[Lot], first: int, *, into_slot: bool
    ) -> None:
        """Copy lots, of which the first begins with the run `first`, by one table."""
        inner = Spread(stage.inner.planes, stage.inner.runs.some(slice(first, lots[-1].stop)))
        with self._uploaded(stream, inner, into_slot=into_slot) as launch:
            at = 0
            for lot in lots:
                work, at = (at, lot.stop - first, self.driver.processors), lot.stop - first
                if into_slot:
                    launch(*work)
                for there, slot, nbytes, planes in lot.link:
                    to, of = (slot, there) if into_slot else (there, slot)
                    self.driver.copy(stream.handle, to, of, nbytes, planes, stage.step)
                if not into_slot:
                    launch(*work)


def _ended(event: Event) -> bool:
    """Say whether all before an event has ended, however that went."""
    try:
        return event.done()
    except Exception:  # noqa: BLE001  (the operation's own fence raises it)
        return True


def _parts(count: int, most: int) -> list[slice]:
    """Return so many in parts of at most so many."""
    return [slice(at, at + most) for at in range(0, count, most)]


def _few(lots: Sequence[Lot], most: int) -> Iterator[Sequence[Lot]]:
    """Yield consecutive lots that have at most so many runs in all."""
    at = first = 0
    while at < len(lots):
        stop = at + 1
        while stop < len(lots) and lots[stop].stop - first <= most:
            stop += 1
        yield lots[at:stop]
        at, first = stop, lots[stop - 1].stop
