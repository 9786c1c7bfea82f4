"""Spill: write chunks from DRAM down to one slower tier, ancestors first. On the flow loop.

A part in the queue is held: its slot stays. So the queue is bounded in bytes. What does not
fit yet waits by name only, without a hold; when DRAM has evicted it before its turn, it is
dropped and counted.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvtier.catalog.catalog import LOT, Catalog, Part
from kvtier.catalog.index import NO_ROW
from kvtier.catalog.owners import NOBODY
from kvtier.catalog.strays import Strays
from kvtier.identity.record import Header, RecordId, split_record_id
from kvtier.memory.arena import Arena
from kvtier.metrics import Metrics
from kvtier.tiers.store import Status, Write
from kvtier.tiers.tier import Tier

__all__ = ["Spiller"]

_log = logging.getLogger("kvtier")
_BATCH_BYTES: Final = 64 << 20
_FULL_TRIES: Final = 8
_SEEN_NAMES: Final = 1 << 16
_WAITING_NAMES: Final = 1 << 16
_DROPPED_NAMES: Final = 1 << 16


class _Job(NamedTuple):
    row: int
    part: Part
    write: Write


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
    ) -> None:
        self._catalog = catalog
        self._arena = arena
        self._number = number
        self._tier = tier
        self._metrics = metrics
        self._strays = strays
        self._waiting: dict[RecordId, None] = {}
        self._queue: deque[_Job] = deque()
        self._queued: dict[RecordId, None] = {}
        self._queued_bytes = 0
        self._dropped: dict[RecordId, None] = {}  # since the queue was empty
        self._seen: dict[RecordId, None] = {}
        self._task: asyncio.Task[None] | None = None

    def offer(self, names: Sequence[RecordId]) -> None:
        """Take parts that came into DRAM, or were used there, parents before children."""
        for name in names:
            if self._tier.admission == "second-touch" and not self._touched(name):
                continue
            if len(self._waiting) < _WAITING_NAMES:
                self._waiting[name] = None
            else:
                self._metrics.add("dropped_spills", tier=self._tier.name, reason="queue")
        self._refill()
        if self._queue and self._task is None:
            self._task = asyncio.create_task(self._drain(), name=f"spill-{self._tier.name}")

    async def drained(self) -> None:
        """Return when nothing waits to be written."""
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

    def _touched(self, name: RecordId) -> bool:
        """Say whether the part was offered before."""
        if name in self._seen:
            return True
        if len(self._seen) >= _SEEN_NAMES:
            del self._seen[next(iter(self._seen))]
        self._seen[name] = None
        return False

    def _refill(self) -> None:
        """Move waiting parts into the queue, each behind its missing ancestors, while they fit."""
        while self._waiting:
            name = next(iter(self._waiting))
            chain = self._catalog.missing_chain(name, self._number, self._queued)
            if not all(self._enqueue(missing) for missing in reversed(chain)):
                return
            del self._waiting[name]
            if not chain and self._catalog.gone(name):
                self._metrics.add("dropped_spills", tier=self._tier.name, reason="evicted")

    def _enqueue(self, name: RecordId) -> bool:
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
        self._queue.append(_Job(row, part, write))
        self._queued[name] = None
        self._dropped.pop(name, None)
        self._queued_bytes += nbytes
        return True

    async def _drain(self) -> None:
        try:
            while self._queue:
                jobs = self._batch()
                try:
                    async with self._strays.changing:
                        await self._write(jobs)
                except Exception:  # noqa: BLE001  (a defect must not keep slots)
                    _log.exception("%s: parts are not written down", self._tier.name)
                    self._drop(jobs, "failed")
                finally:
                    for job in jobs:
                        self._queued_bytes -= job.part.nbytes
                        del self._queued[job.part.name]
                    self._catalog.release_rows(job.row for job in jobs)
                self._refill()
        finally:
            self._task = None
            self._dropped.clear()

    def _batch(self) -> list[_Job]:
        """Take the next jobs off the queue: a fraction of the budget, or room would cost all."""
        capacity = self._catalog.capacity(self._number)
        left = _BATCH_BYTES if capacity is None else min(_BATCH_BYTES, capacity // 8)
        jobs = [self._queue.popleft()]
        while self._queue and (left := left - jobs[-1].part.nbytes) > self._queue[0].part.nbytes:
            jobs.append(self._queue.popleft())
        return jobs

    async def _write(self, jobs: list[_Job]) -> None:
        """Write jobs, making room as the tier asks for it; what still fails is dropped."""
        jobs = self._headed(jobs)
        room, extra = self._sizes(jobs), 0
        for _ in range(_FULL_TRIES):
            if not jobs:
                return
            await self._make_room(jobs, room, extra)
            jobs = self._fitting(self._headed(jobs))
            full = self._settle(jobs, await self._send(jobs))
            if not full:
                return
            jobs, room, extra = full, {}, max(len(full), self._lot(full[0]))
        self._drop(jobs, "full")
        if len(self._strays):
            await self._strays.delete({})

    def _settle(self, jobs: Sequence[_Job], statuses: Sequence[Status]) -> list[_Job]:
        """Note what became of jobs; return those to try again with more room, ancestors first.

        What was written below one of these comes again with it: the tier would have a tail
        without a head, which is an orphan after a restart.
        """
        again: dict[RecordId, _Job] = {}
        for job, status in zip(jobs, statuses, strict=True):
            if status is Status.FULL:
                again[job.part.name] = job
            elif job.part.parent in again:
                self._strays.note(job.part.name, self._tier.footprint(job.part.nbytes))
                again[job.part.name] = job
            else:
                self._settled(job, status)
        return list(again.values())

    def _drop(self, jobs: Sequence[_Job], reason: str) -> None:
        """Count parts that are not written; what hangs under them will not be kept either."""
        if jobs:
            self._dropped |= dict.fromkeys(job.part.name for job in jobs)
            while len(self._dropped) > _DROPPED_NAMES:  # their children were queued long ago
                del self._dropped[next(iter(self._dropped))]
            self._metrics.add("dropped_spills", len(jobs), tier=self._tier.name, reason=reason)

    def _headed(self, jobs: list[_Job]) -> list[_Job]:
        """Return the jobs whose parent was not dropped, nor they withdrawn; drop the others.

        Before room is made: it would be made of heads, for tails that are not kept.
        """
        kept: list[_Job] = []
        for job in jobs:
            if job.part.parent in self._dropped:
                self._drop([job], "failed")
            elif not self._catalog.in_dram(job.row):
                self._drop([job], "withdrawn")
            else:
                kept.append(job)
        return kept

    def _lot(self, job: _Job) -> int:
        """Return how many parts to evict at a time: each lot costs a durable Store a commit."""
        capacity = self._catalog.capacity(self._number)
        lot = _BATCH_BYTES if capacity is None else min(_BATCH_BYTES, capacity // 32)
        return lot // self._tier.footprint(job.part.nbytes)

    def _fitting(self, jobs: list[_Job]) -> list[_Job]:
        """Return the jobs, ancestors first, that the budget has room for; drop the others."""
        spare = self._catalog.spare(self._number)
        if spare is None:
            return jobs
        spare -= self._strays.nbytes
        sizes = [self._tier.footprint(job.part.nbytes) for job in jobs]
        count = bisect.bisect_right(list(itertools.accumulate(sizes)), spare)
        self._drop(jobs[count:], "full")
        jobs, sizes = jobs[:count], sizes[:count]
        owners = (job.part.owner for job in jobs)
        over = self._catalog.over_ceilings(self._number, zip(owners, sizes, strict=True))
        if not any(over):
            return jobs
        self._drop([job for job, above in zip(jobs, over, strict=True) if above], "quota")
        return self._headed([job for job, above in zip(jobs, over, strict=True) if not above])

    def _settled(self, job: _Job, status: Status) -> None:
        """Note a part's outcome.

        One whose parent was dropped is dropped too: it would be a tail without a head here, and
        keep the head in DRAM, as the last copy of it, for ever.
        """
        charged = self._tier.footprint(job.part.nbytes)
        kept = status is Status.OK and job.part.parent not in self._dropped
        if kept and self._catalog.written(job.row, self._number, charged):
            self._strays.forget(job.part.name)
        else:
            self._strays.note(job.part.name, charged)
            self._drop([job], "failed")

    async def _send(self, jobs: list[_Job]) -> list[Status]:
        """Write with as many calls in parallel as the Store takes, in runs of the order."""
        calls = min(self._tier.store.THREADS, len(jobs))
        runs = [jobs[len(jobs) * i // calls : len(jobs) * (i + 1) // calls] for i in range(calls)]
        outcomes = await asyncio.gather(
            *(self._tier.write([job.write for job in run]) for run in runs)
        )
        return [status for run in outcomes for status in run]

    def _sizes(self, jobs: Sequence[_Job]) -> dict[int, int]:
        """Return the bytes of the budget that jobs take, by owner."""
        sizes: dict[int, int] = {}
        for job in jobs:
            owner = job.part.owner
            sizes[owner] = sizes.get(owner, 0) + self._tier.footprint(job.part.nbytes)
        return sizes

    async def _make_room(self, jobs: list[_Job], nbytes: dict[int, int], extra: int) -> None:
        if len(self._strays):
            await self._strays.delete({})
            if not self._tier.available:
                return  # it takes no write either, and what it has is not worth evicting
        rows = [job.row for job in jobs]
        needed = nbytes | {NOBODY: nbytes.get(NOBODY, 0) + self._strays.nbytes}
        victims: dict[RecordId, int] = {}
        while lot := self._catalog.evict(
            self._number, needed, at_least=extra - len(victims), below=rows
        ):
            victims |= {victim.name: victim.charged for victim in lot}
            if len(lot) < LOT:
                break
            await asyncio.sleep(0)  # engine threads wait for the Catalog's lock
        if victims:
            await self._strays.delete(victims)
