"""Spill: write chunks from DRAM down to one slower tier, ancestors first. On the flow loop.

A part in the queue is held: its slot stays. So the queue is bounded in bytes, and in time. What
does not fit yet waits by name only, without a hold; when DRAM has evicted it before its turn, it
is dropped and counted.

Calls of one batch run side by side, so a Store may have a child before its parent, and after a
crash without it. The index never does: it takes a batch in its order, and a part only when its
parent is there. A tail that a crash left without its head is not served, leaves first, and is
whole again when the head is written anew; to write one after the other would cost every batch the
tier's parallel calls.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvtier.catalog.admission import Admission
from kvtier.catalog.catalog import LOT, Catalog, Part
from kvtier.catalog.index import NO_ROW
from kvtier.catalog.owners import NOBODY
from kvtier.catalog.strays import Strays
from kvtier.clock import Clock
from kvtier.identity.record import Header, RecordId, split_record_id
from kvtier.memory.arena import Arena
from kvtier.metrics import Metrics
from kvtier.tiers.store import Status, Write
from kvtier.tiers.tier import Tier, Written
from kvtier.tiers.unopened import UnopenedStore

_log = logging.getLogger("kvtier")
BATCH_BYTES: Final = 64 << 20
_BATCH_PARTS: Final = 128  # as many as are seen to in half a millisecond
_FULL_TRIES: Final = 8
_WAITING_NAMES: Final = 1 << 16
_SLICE: Final = 32  # parts between which other callbacks of the loop have their turn

LATE_SECONDS: Final = 60.0
"""What waits for longer to be written is dropped. It may be used again, and is offered then."""


class _Job(NamedTuple):
    row: int
    part: Part
    write: Write
    since: float


class Spiller:
    """The queue of one tier. Every method is called on the flow loop."""

    def __init__(
        self,
        catalog: Catalog,
        arena: Arena,
        number: int,
        tier: Tier,
        metrics: Metrics,
        strays: Strays,
        clock: Clock,
    ) -> None:
        self.admission = Admission(tier)
        self._catalog = catalog
        self._arena = arena
        self._number = number
        self._tier = tier
        self._metrics = metrics
        self._strays = strays
        self._clock = clock
        self._offering = asyncio.Lock()
        self._waiting: OrderedDict[RecordId, float] = OrderedDict()  # since when
        self._begun: dict[RecordId, RecordId] = {}  # a name, and what was queued for it last
        self._queue: deque[_Job] = deque()
        self._queued: dict[int, None] = {}  # rows: one that was withdrawn has lost its name
        self._queued_bytes = 0
        self._unpaid = 0  # bytes of a part for which the write budget had not enough left
        self._task: asyncio.Task[None] | None = None

    async def offer(self, names: Sequence[RecordId]) -> None:
        """Take parts that came into DRAM, or were used there, parents before children.

        In slices: the loop's other callbacks have their turn in between.
        """
        async with self._offering:
            for start in range(0, len(names), LOT):
                if start:
                    await asyncio.sleep(0)
                lot = names[start : start + LOT]
                self._wait([name for name in lot if self.admission.admits(name)])
            if self.admission.runs_ahead:
                self._wait(self._leaving())
            await self._refill()
            if self._queue and self._task is None:
                self._task = asyncio.create_task(self._drain(), name=f"spill-{self._tier.name}")

    async def expire(self) -> None:
        """Drop what has waited for too long. A call of the Store keeps its slots until it returns.

        What hangs under a dropped part is dropped at its own turn, or deadline.
        """
        late = self._clock() - LATE_SECONDS
        while self._queue and self._queue[0].since < late:
            oldest = itertools.islice(self._queue, _SLICE)
            jobs = [job for job in oldest if job.since < late]
            for _ in jobs:
                self._queue.popleft()
            self._count(len(jobs), "deadline")
            self._let_go(jobs)
            await asyncio.sleep(0)
        while self._waiting and next(iter(self._waiting.values())) < late:
            items = itertools.islice(self._waiting.items(), _SLICE)
            names = [name for name, since in items if since < late]
            for name in names:
                self._forget(name)
            self._count(len(names), "deadline")
            await asyncio.sleep(0)

    async def drained(self) -> None:
        """Return when nothing waits to be written."""
        async with self._offering:
            pass
        while self._task is not None:
            await asyncio.wait((self._task,))

    async def clear(self) -> None:
        """Take everything that nobody holds out of the tier."""
        async with self._strays.changing:
            victims: dict[RecordId, int] = {}
            while lot := self._catalog.clear(self._number):
                victims |= {victim.name: victim.charged for victim in lot}
                await asyncio.sleep(0)  # engine threads wait for the Catalog's lock
            await self._strays.delete(victims)

    def _wait(self, names: Sequence[RecordId]) -> None:
        now = self._clock()
        for name in names:
            if len(self._waiting) < _WAITING_NAMES:
                self._waiting.setdefault(name, now)
            else:
                self._count(1, "queue")

    def _forget(self, name: RecordId) -> None:
        """Let a name wait no longer."""
        del self._waiting[name]
        self._begun.pop(name, None)

    def _leaving(self) -> list[RecordId]:
        """Return what DRAM is about to give up, once it is nearly full: so much stays ahead."""
        mark = self._arena.nbytes * 7 // 8
        if self._tier.writes.left < self._unpaid:
            return []
        return self._catalog.leaving(self._number, self._arena.used_bytes - mark)

    async def _refill(self) -> None:
        """Move waiting parts into the queue, each behind its missing ancestors, while they fit."""
        moved = 0
        while self._waiting:
            name, since = next(iter(self._waiting.items()))
            chain = self._catalog.missing_chain(name, self._number, self._queued)
            if self._begun.get(name) in chain:  # it was queued, and dropped: so it would be again
                self._forget(name)
                self._count(1, "headless")
                continue
            lot = chain[-_SLICE:]  # the heads; the rest in the next turn
            for missing in reversed(lot):
                if not self._enqueue(missing, since):
                    return
                self._begun = {name: missing}
            if len(lot) == len(chain):
                self._forget(name)
                if self._catalog.gone(name):
                    self._count(1, "evicted")
            moved += 1 + len(lot)
            if moved > _SLICE:
                moved = 0
                await asyncio.sleep(0)

    def _enqueue(self, name: RecordId, since: float) -> bool:
        """Hold a part and queue it; False when the queue is full."""
        row = self._catalog.hold_for_spill(name, self._number)
        if row == NO_ROW:
            return True  # evicted from DRAM since the chain was read
        part, namespace, slot, raw_sum = self._catalog.describe(row)
        nbytes = part.nbytes
        if self._queued_bytes + nbytes > max(self._arena.nbytes // 2, nbytes):
            self._catalog.release_rows((row,))
            return False
        key, which = split_record_id(name)
        header = Header(
            namespace=namespace,
            key=key,
            parent=part.parent,
            depth=part.depth,
            part=which,
            raw_bytes=nbytes,
            stored_bytes=nbytes,
            raw_sum=raw_sum,
            stored_sum=raw_sum,
        )
        write = Write(header, self._arena.view(slot.offset, slot.nbytes))
        self._queue.append(_Job(row, part, write, since))
        self._queued[row] = None
        self._queued_bytes += nbytes
        return True

    def _let_go(self, jobs: Sequence[_Job]) -> None:
        """Give back the slots of jobs that have ended."""
        for job in jobs:
            self._queued_bytes -= job.part.nbytes
            del self._queued[job.row]
        self._catalog.release_rows(job.row for job in jobs)

    async def _drain(self) -> None:
        try:
            while self._queue:
                async with self._strays.changing:  # what waits for it is in the queue, and expires
                    jobs = self._batch()
                    try:
                        await self._write(jobs)
                    except Exception:  # noqa: BLE001  (a defect must not keep slots)
                        _log.exception("%s: parts are not written down", self._tier.name)
                        self._count(len(jobs), "failed")
                    finally:
                        self._let_go(jobs)
                await asyncio.sleep(0)  # nothing may have been waited for
                await self._refill()
        finally:
            self._task = None

    def _batch(self) -> list[_Job]:
        """Take the next jobs off the queue: a fraction of the budget, or room would cost all."""
        capacity = self._catalog.capacity(self._number)
        left = BATCH_BYTES if capacity is None else min(BATCH_BYTES, capacity // 8)
        jobs: list[_Job] = []
        while self._queue and len(jobs) < _BATCH_PARTS:
            nbytes = self._queue[0].part.nbytes
            if jobs and left <= nbytes:
                break
            left -= nbytes
            jobs.append(self._queue.popleft())
        for job in reversed(self._after_cells(jobs) if self._tier.packs and self._queue else ()):
            self._queue.appendleft(job)
            jobs.pop()
        return jobs

    def _after_cells(self, jobs: Sequence[_Job]) -> Sequence[_Job]:
        """Return the last jobs, with which a cell begins whose rest comes in the next batch."""
        for at in range(len(jobs) - 1, len(jobs) // 2, -1):
            part = jobs[at].part
            order = self._tier.longest_order(part.nbytes)
            if order and not part.depth % (1 << order):
                return jobs[at:]
        return ()

    async def _write(self, jobs: list[_Job]) -> None:
        """Write jobs, making room as the tier asks for it; what still fails is dropped."""
        if isinstance(self._tier.store, UnopenedStore):  # a stray would be a sound record there
            self._count(len(jobs), "failed")
            return
        extra = 0
        for _ in range(_FULL_TRIES):
            jobs = self._paid(self._fit(jobs))  # before room is made, which would cost others
            if not jobs:
                break
            await self._make_room(jobs, extra)
            jobs = self._fitting(self._fit(jobs))
            full = self._settle(jobs, await self._tier.write_all([job.write for job in jobs]))
            if not full:
                break
            jobs, extra = full, max(len(full), self._lot(full[0]))
        else:
            self._count(len(jobs), "full")
        if self._tier.available:  # or they are orphans after a restart
            await self._strays.delete({})

    def _settle(self, jobs: Sequence[_Job], outcomes: Sequence[Written]) -> list[_Job]:
        """Note what became of jobs; return those to try again with more room, ancestors first.

        What was written below one of these comes again with it: the tier would have a tail
        without a head, which is an orphan after a restart.
        """
        again: dict[RecordId, _Job] = {}
        for job, written in zip(jobs, outcomes, strict=True):
            if written.status is Status.FULL:
                again[job.part.name] = job
            elif job.part.parent in again:
                self._strays.note(job.part.name, self._tier.footprint(job.part.nbytes))
                again[job.part.name] = job
            else:
                self._settled(job, written)
        return list(again.values())

    def _count(self, parts: int, why: str) -> None:
        """Count parts that are not written."""
        if parts:
            self._metrics.add("dropped_spills", parts, tier=self._tier.name, reason=why)

    def _fit(self, jobs: Sequence[_Job]) -> list[_Job]:
        """Return the jobs that may be written; drop the others.

        Before room is made: it would be made of heads, for tails that are not kept.
        """
        late = self._clock() - LATE_SECONDS
        timely = [job for job in jobs if job.since >= late]
        self._count(len(jobs) - len(timely), "deadline")
        unfit = self._catalog.unfit([job.row for job in timely], self._number)
        for why in unfit.values():
            self._count(1, why)
        return [job for job in timely if job.row not in unfit]

    def _paid(self, jobs: list[_Job]) -> list[_Job]:
        """Return the jobs, ancestors first, that the write budget pays for; drop the others."""
        jobs, rest = self._split(jobs, self._tier.writes.left)
        self._unpaid = self._tier.footprint(rest[0].part.nbytes) if rest else 0
        self._count(len(rest), "budget")
        return jobs

    def _split(self, jobs: list[_Job], nbytes: float) -> tuple[list[_Job], list[_Job]]:
        """Return as many jobs, from the first, as so many bytes are enough for; and the rest."""
        sizes = [self._tier.footprint(job.part.nbytes) for job in jobs]
        count = bisect.bisect_right(list(itertools.accumulate(sizes)), nbytes)
        return jobs[:count], jobs[count:]

    def _lot(self, job: _Job) -> int:
        """Return how many parts to evict at a time: each lot costs a durable Store a commit."""
        capacity = self._catalog.capacity(self._number)
        lot = BATCH_BYTES if capacity is None else min(BATCH_BYTES, capacity // 32)
        return lot // self._tier.footprint(job.part.nbytes)

    def _fitting(self, jobs: list[_Job]) -> list[_Job]:
        """Return the jobs, ancestors first, that the budget has room for; drop the others."""
        spare = self._catalog.spare(self._number)
        if spare is None:
            return jobs
        jobs, rest = self._split(jobs, spare - self._strays.nbytes)
        self._count(len(rest), "full")
        sizes = [(job.part.owner, self._tier.footprint(job.part.nbytes)) for job in jobs]
        over = self._catalog.over_ceilings(self._number, sizes)
        if not any(over):
            return jobs
        self._count(sum(over), "quota")
        return self._fit([job for job, above in zip(jobs, over, strict=True) if not above])

    def _settled(self, job: _Job, written: Written) -> None:
        """Note a part's outcome.

        One whose parent was dropped is dropped too: it would be a tail without a head here, and
        keep the head in DRAM, as the last copy of it, for ever.
        """
        charged = self._tier.charge(written.header)
        why = str(written.status.value)
        if written.status is Status.OK:
            why = self._catalog.written(job.row, self._number, charged)
        if why:
            self._strays.note(job.part.name, charged)
            self._count(1, why)
        else:
            self._strays.forget(job.part.name)

    def _sizes(self, jobs: Sequence[_Job]) -> dict[int, int]:
        """Return the bytes of the budget that jobs take, by owner."""
        sizes: dict[int, int] = {}
        for job in jobs:
            owner = job.part.owner
            sizes[owner] = sizes.get(owner, 0) + self._tier.footprint(job.part.nbytes)
        return sizes

    async def _make_room(self, jobs: list[_Job], extra: int) -> None:
        if len(self._strays):
            await self._strays.delete({})
            if not self._tier.available:
                return  # it takes no write either, and what it has is not worth evicting
        rows, needed = [job.row for job in jobs], self._sizes(jobs)
        needed[NOBODY] = needed.get(NOBODY, 0) + self._strays.nbytes
        victims: dict[RecordId, int] = {}
        while True:
            lot = self._catalog.evict(
                self._number, needed, at_least=extra - len(victims), below=rows
            )
            victims |= {victim.name: victim.charged for victim in lot}
            if len(lot) < LOT:
                break
            await asyncio.sleep(0)  # engine threads wait for the Catalog's lock
        if victims:  # or the strays would be tried twice
            await self._strays.delete(victims)
