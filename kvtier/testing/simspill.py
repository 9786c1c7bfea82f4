"""What must hold of spilling at every moment, watched from outside: budgets, deadlines, heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvtier.cache import Cache
from kvtier.catalog.index import NO_ROW
from kvtier.catalog.spill import LATE_SECONDS
from kvtier.testing.faults import FaultyStore
from kvtier.testing.inside import inside
from kvtier.testing.simtask import SimError
from kvtier.tiers.store import Status, Write

_DAY: Final = 86_400.0
_SLACK_SECONDS: Final = 1.0  # more than the time between two looks at what is late


class Meter:
    """What is sent to one Store in one life. a_day: its write budget in bytes, inf for no limit."""

    def __init__(self, store: FaultyStore, a_day: float, clock: Callable[[], float]) -> None:
        self.sent = 0
        self._a_day = a_day
        self._clock = clock
        self._start = clock()
        write = store.write_many

        def metered(records: Sequence[Write]) -> list[Status]:
            self.sent += sum(store.footprint(one.header.stored_bytes) for one in records)
            return write(records)

        store.write_many = metered  # type: ignore[method-assign]

    def check(self) -> None:
        """Raise SimError when more was sent than a full budget and its refill allow."""
        days = 1 + (self._clock() - self._start) / _DAY
        if self.sent > self._a_day * days + 1:
            raise SimError(f"{self.sent} bytes were sent, of a write budget of {self._a_day}")


class SpillWatch:
    """The queues of one cache, and what its catalog takes for written."""

    def __init__(self, cache: Cache, clock: Callable[[], float]) -> None:
        self._spillers = inside(cache).moves._spillers
        self._clock = clock
        self._headless = ""
        self._watch_writes(cache)

    def _watch_writes(self, cache: Cache) -> None:
        catalog, index = inside(cache).catalog, inside(cache).catalog._index
        written, enter = catalog.written, catalog._room.enter
        writing: list[tuple[int, int]] = []

        def watched_written(row: int, tier: int, charged: int) -> str:
            writing.append((row, tier))
            try:
                return written(row, tier, charged)
            finally:
                writing.pop()

        def watched_enter(row: int, tier: int, charged: int = 0) -> None:
            above = index.parent[row]
            if (row, tier) in writing and above != NO_ROW and not index.present[above] >> tier & 1:
                self._headless = f"row {row} was stored in tier {tier}, and not its parent"
            enter(row, tier, charged)

        catalog.written = watched_written  # type: ignore[method-assign]
        catalog._room.enter = watched_enter  # type: ignore[method-assign]

    def check(self) -> None:
        """Raise SimError with the first thing that does not hold."""
        if self._headless:
            raise SimError(self._headless)
        late = self._clock() - LATE_SECONDS - _SLACK_SECONDS
        for spiller in self._spillers.values():
            if any(job.since < late for job in spiller._queue):
                raise SimError("a part is in a spill queue past its deadline")
            if any(since < late for since in spiller._waiting.values()):
                raise SimError("a part waits for a spill queue past its deadline")
