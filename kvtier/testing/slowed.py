"""A Store that reads at a given speed: for what must be decided by what a tier costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Final, Self

from kvtier.deadline import current
from kvtier.errors import MisuseError
from kvtier.identity.record import Header, RecordId
from kvtier.tiers.store import Capabilities, Option, Read, Status, Store, Write

_NEVER: Final = float("inf")


class SlowedStore:
    """Wraps an open Store, and gives its reads `bytes_per_s` in sum, and each call `latency`.

    Where that Store heeds a Deadline, a read that would take longer fails then.

    Both may be changed at any time. sleep, clock: what waits, and by what; of this machine.
    Safe from any thread: reads at once queue, as on one wire.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {}
    THREADS: ClassVar[int] = 2
    ALIGNMENT: ClassVar[int] = 4096

    @classmethod
    def open(cls, location: str, capacity: int | None, options: Mapping[str, object]) -> Self:
        """Not a Store of its own: raises MisuseError."""
        del location, capacity, options
        raise MisuseError("wrap a Store that is open")

    def __init__(
        self,
        inner: Store,
        bytes_per_s: float = _NEVER,
        latency: float = 0.0,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner = inner
        self.bytes_per_s = bytes_per_s
        self.latency = latency
        self.read_bytes = 0
        self._sleep = sleep
        self._clock = clock
        self._lock = threading.Lock()
        self._free = 0.0  # when the wire is

    @property
    def capabilities(self) -> Capabilities:
        """Those of the Store within."""
        return self.inner.capabilities

    def footprint(self, stored_bytes: int) -> int:
        """Return that of the Store within."""
        return self.inner.footprint(stored_bytes)

    def contains_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store."""
        return self.inner.contains_many(ids)

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """See Store. As slow as was asked for."""
        now = self._clock()
        reads = self.inner.read_many(ids, into)
        nbytes = sum(read.header.stored_bytes for read in reads if read.header is not None)
        with self._lock:
            self.read_bytes += nbytes
            self._free = max(self._free, now) + nbytes / self.bytes_per_s
            until = self._free + self.latency
        left = current().left(self._clock()) if self.capabilities.deadlines else _NEVER
        pause = max(until - self._clock(), 0.0)
        self._sleep(max(min(pause, left), 0.0))
        return reads if pause <= left else [Read(Status.FAILED)] * len(reads)

    def write_many(self, records: Sequence[Write]) -> list[Status]:
        """See Store."""
        return self.inner.write_many(records)

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store."""
        return self.inner.delete_many(ids)

    def scan(self) -> Iterator[Header]:
        """See Store."""
        return self.inner.scan()

    def close(self) -> None:
        """See Store."""
        self.inner.close()
