"""Fetch: bring chunks from slower tiers up into DRAM. Runs on the flow loop.

Two fetches of one part share one read. A read owns its slot until the Store's call returns,
however long its waiters wait: they time out, and the slot follows when the call is done.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from kvtier.catalog.catalog import Catalog
from kvtier.catalog.index import DRAM, NO_ROW
from kvtier.catalog.lease import Lease, by_chunk
from kvtier.catalog.strays import Strays
from kvtier.clock import Clock
from kvtier.deadline import Deadline
from kvtier.identity.record import RecordId
from kvtier.identity.shape import Shape
from kvtier.memory.arena import Arena
from kvtier.tiers.store import Status
from kvtier.tiers.tier import Fetched, Tier, Wanted

_log = logging.getLogger("kvtier")
_WHY: Final = {Status.CORRUPT: "corrupt", Status.NEWER: "newer"}
_CALL_BYTES: Final = 4 << 20  # small parts go together, large ones each to a thread of its own
_MOST_CALL_BYTES: Final = 16 << 20  # of a fetch that keeps all threads busy for long
_CALLS_A_THREAD: Final = 2


class Prompt(Protocol):
    """What of a prompt's Prefix a fetch looks at."""

    @property
    def names(self) -> Sequence[Sequence[RecordId]]:
        """For each complete chunk, the names of its parts."""
        ...

    @property
    def shape(self) -> Shape:
        """The shape of a chunk."""
        ...

    @property
    def owner(self) -> int:
        """The namespace, as the catalog numbers it."""
        ...


class _Reading(NamedTuple):
    """A row that is read: its future, and the Deadline of that read."""

    done: asyncio.Future[int]
    deadline: Deadline


class Fetcher:
    """Fetches for all namespaces. tiers: by tier number, from 1."""

    def __init__(
        self,
        catalog: Catalog,
        arena: Arena,
        tiers: Mapping[int, Tier],
        strays: Mapping[int, Strays],
        clock: Clock,
    ) -> None:
        self._catalog = catalog
        self._arena = arena
        self._tiers = tiers
        self._strays = strays
        self._clock = clock
        self._reading: dict[int, _Reading] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._serial = 0

    async def fetch(
        self,
        prompt: Prompt,
        first: int,
        tokens: int,
        *,
        within: float,
        hold: float,
        pin: int = 0,
        ahead: bool = False,
    ) -> Lease | None:
        """Return a lease of what a prompt needs from chunk `first` on, as far as DRAM has it then.

        tokens: the length that is wanted; within: seconds to wait at most; hold: seconds until
        the lease's deadline. pin: see Lease; ahead: it is a prefetch. None when not one chunk is
        there, or pins have no room.
        """
        names, shape = prompt.names, prompt.shape
        if pin and not self._catalog.may_pin(names, shape, first, tokens):
            return None
        chunks, fresh = self._catalog.hold_for_fetch(
            names, shape, first, tokens, prompt.owner, ahead=ahead
        )
        try:
            until = self._clock() + within
            self._start(fresh, Deadline(until))
            reading: dict[int, asyncio.Future[int]] = {}
            for row in itertools.chain.from_iterable(chunks):
                if row in self._reading:
                    reading[row], deadline = self._reading[row]
                    deadline.extend(until)  # of who began to read it, and waits no longer
            if reading:
                await asyncio.wait(reading.values(), timeout=within)
            lease = self._catalog.lease(names, shape, first, tokens, hold, whole=False, pin=pin)
            if lease is not None:
                by = by_chunk(lease.rows, lease.names)
                lease.sources = tuple(self._source(rows, reading) for rows in by)
            return lease
        finally:
            self._catalog.release_rows([row for rows in chunks for row in rows])

    def _source(self, rows: tuple[int, ...], reading: Mapping[int, asyncio.Future[int]]) -> str:
        read = (reading[row] for row in rows if row in reading)  # ended: a lease is of DRAM
        tier = max((one.result() for one in read), default=DRAM)
        return self._tiers[tier].name if tier in self._tiers else "dram"

    def _start(self, fresh: Sequence[int], deadline: Deadline) -> None:
        """Start one read for each group of rows that lie in the same tier."""
        loop = asyncio.get_running_loop()
        placed: list[tuple[int, int, int]] = []
        totals: Counter[int] = Counter()
        for row in fresh:
            self._reading[row] = _Reading(loop.create_future(), deadline)
            where = next((t for t in self._catalog.tiers_of(row)), NO_ROW)
            nbytes = self._catalog.describe(row).part.nbytes
            placed.append((row, where, nbytes))
            totals[where] += nbytes
        most = {where: self._call_bytes(where, total) for where, total in totals.items()}
        group: list[int] = []
        size, tier = 0, NO_ROW
        for row, where, nbytes in placed:
            if group and (where != tier or size + nbytes > most[where]):
                self._spawn(group, deadline)
                group, size = [], 0
            group.append(row)
            size, tier = size + nbytes, where
        if group:
            self._spawn(group, deadline)

    def _call_bytes(self, tier: int, total: int) -> int:
        if tier not in self._tiers:
            return _CALL_BYTES
        return call_bytes(total, self._tiers[tier].store.THREADS)

    def _spawn(self, rows: list[int], deadline: Deadline) -> None:
        self._serial += 1
        serial = self._serial
        task = asyncio.create_task(self._read(rows, deadline), name=f"fetch-{serial}")
        self._tasks[serial] = task  # the loop itself keeps only a weak reference
        task.add_done_callback(lambda _: self._tasks.pop(serial))

    async def _read(self, rows: list[int], deadline: Deadline) -> None:
        """Read rows, and end each one's reading, whatever happens."""
        try:
            await self._read_each(rows, deadline)
        except Exception:  # noqa: BLE001  (a defect must not keep slots)
            _log.exception("a read failed; it counts as a miss")
        for row in rows:
            if row in self._reading:
                self._end(row, NO_ROW, None)

    async def _read_each(self, rows: list[int], deadline: Deadline) -> None:
        """Read rows from the fastest tier that has them; what fails there, from the next."""
        for number, tier in sorted(self._tiers.items()):
            left = [row for row in rows if row in self._reading]
            here = [row for row in left if number in self._catalog.tiers_of(row)]
            wanted = []
            for row in here:
                part, namespace, slot, _ = self._catalog.describe(row)
                into = self._arena.view(slot.offset, slot.nbytes)
                wanted.append(Wanted(part.name, namespace, part.nbytes, into))
            asked = tier.readable  # else a failure says nothing of the records
            outcomes = await tier.read(wanted, deadline)
            for row, one, outcome in zip(here, wanted, outcomes, strict=True):
                if outcome.status is Status.OK:
                    self._end(row, number, outcome.raw_sum)
                # It must not fail twice, nor count as stored when it is computed anew.
                elif _tells(outcome, asked=asked) and self._catalog.lost(
                    row, number, _WHY.get(outcome.status, "lost")
                ):
                    self._strays[number].note(one.id, tier.footprint(one.raw_bytes))

    def _end(self, row: int, tier: int, raw_sum: bytes | None) -> None:
        self._catalog.fetched(row, raw_sum)
        self._reading.pop(row).done.set_result(tier)


def call_bytes(total: int, threads: int) -> int:
    """Return how much one call reads of so much in all: more where all threads have enough.

    What a call costs whatever it reads is then paid less often.
    """
    share = total // (_CALLS_A_THREAD * threads)
    return max(_CALL_BYTES, min(share, _MOST_CALL_BYTES))


def _tells(outcome: Fetched, *, asked: bool) -> bool:
    """Say whether a read that came to nothing says something of the record.

    asked: whether the tier was in use.
    """
    return outcome.status is not Status.FAILED or (asked and not outcome.late)
