"""What moves between the tiers, with one guard less: fetch, spill, probe, Tier."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Final

from kvtier.asking import Asking
from kvtier.catalog import catalog
from kvtier.catalog.catalog import Catalog
from kvtier.catalog.fetch import Fetcher
from kvtier.catalog.index import DRAM, NO_ROW, Index
from kvtier.catalog.lease import Lease, Leases
from kvtier.catalog.probe import Probe
from kvtier.catalog.shelf import Room
from kvtier.catalog.spill import Spiller
from kvtier.catalog.strays import Strays
from kvtier.catalog.usable import leasable, usable_tokens
from kvtier.deadline import NEVER, Deadline
from kvtier.flow import Moves
from kvtier.identity.record import RecordId
from kvtier.identity.shape import Shape
from kvtier.testing.mutation import Mutation, Patch, collector
from kvtier.tiers import exact
from kvtier.tiers.breaker import Breaker
from kvtier.tiers.store import Status
from kvtier.tiers.tier import Written

__all__ = ["MOVES"]

MOVES: Final[list[Mutation]] = []
_takes_away = collector(MOVES)
_FOREVER: Final = 1e6

# ---- fetch


@_takes_away("what is read is visible only once it is whole", "published bytes")
def publish_before_the_read() -> list[Patch]:
    read, enter = Fetcher._read, Room.enter

    def once(self: Room, row: int, tier: int, charged: int = 0) -> None:
        if not self.index.present[row] & 1 << tier:
            enter(self, row, tier, charged)

    async def broken(self: Fetcher, rows: list[int], deadline: Deadline) -> None:
        for row in rows:
            self._catalog._room.enter(row, DRAM)
        await read(self, rows, deadline)

    return [(Fetcher, "_read", broken), (Room, "enter", once)]


@_takes_away("a fetch leases only what has arrived", "leased")
def serve_what_has_not_arrived() -> list[Patch]:
    def broken(
        index: Index, names: Sequence[Sequence[RecordId]], shape: Shape, first: int, tokens: int
    ) -> tuple[int, list[int]]:
        wanted = itertools.chain.from_iterable(shape.select(names, first, tokens))
        rows = list(itertools.takewhile(lambda row: row != NO_ROW, map(index.find, wanted)))
        if not shape.plain:
            return leasable(index, names, shape, first, tokens)
        whole = len(rows) // len(shape.names)
        usable = min((first + whole) * shape.chunk_tokens, tokens)
        return usable, rows[: whole * len(shape.names)]

    return [(catalog, "leasable", broken)]


@_takes_away("a fetch leases a chunk when all its parts have arrived", "leased|matched")
def serve_a_chunk_without_its_second_part() -> list[Patch]:
    def broken(shape: Shape, chunks: int, limit: int, has: Callable[[int, int], bool]) -> Any:
        return usable_tokens(shape, chunks, limit, lambda chunk, at: not at or has(chunk, at))

    return [(catalog, "usable_tokens", broken)]


@_takes_away("bytes from below are verified by their checksum", "bytes of .* are wrong")
def forget_the_checksum() -> list[Patch]:
    return [(exact, "is_exact", lambda _header, _wanted: True)]


@_takes_away("a read owns its slot until the call returns", "bytes of .* are wrong|slot")
def free_slots_of_reads_that_nobody_waits_for() -> list[Patch]:
    fetch, end = Fetcher.fetch, Fetcher._end

    async def broken(self: Fetcher, *args: Any, within: float, **more: Any) -> Lease | None:
        before = list(self._reading)
        lease = await fetch(self, *args, within=within, **more)
        for row in [row for row in self._reading if row not in before]:
            self._catalog.fetched(row, None)
            self._reading.pop(row).done.set_result(-1)
        return lease

    def broken_end(self: Fetcher, row: int, number: int, raw_sum: bytes | None) -> None:
        if row in self._reading:
            end(self, row, number, raw_sum)

    return [(Fetcher, "fetch", broken), (Fetcher, "_end", broken_end)]


@_takes_away("a read outlives the fetch that began it", "read is left|left behind|held|leaks")
def cancel_a_read_with_its_waiter() -> list[Patch]:
    fetch = Fetcher.fetch

    async def broken(self: Fetcher, *args: Any, within: float, **more: Any) -> Lease | None:
        before = list(self._tasks)
        lease = await fetch(self, *args, within=within, **more)
        for task in [task for serial, task in self._tasks.items() if serial not in before]:
            task.cancel()
        return lease

    return [(Fetcher, "fetch", broken)]


@_takes_away("all who wait for one read are woken", "Invalid|late|all of them|after its timeout")
def lose_the_coalesced_waiter() -> list[Patch]:
    def broken(self: Fetcher, row: int, number: int, raw_sum: bytes | None) -> None:
        index = self._catalog._index
        filling = sum(
            index.parent[child] == row
            and bool(index.serial[child])
            and not index.present[child] & 1
            for child in index.rows.values()
        )  # each holds its parent, and the read itself holds the row
        shared = index.holds[row] - filling - 1 > 1
        self._catalog.fetched(row, raw_sum)
        waiting = self._reading.pop(row).done
        if not shared:
            waiting.set_result(number)

    return [(Fetcher, "_end", broken)]


@_takes_away(
    "two fetches of one part share one read", "KeyError|slot|holds|order|to be saved|bytes"
)
def read_twice_what_two_fetch() -> list[Patch]:
    hold = Catalog.hold_for_fetch

    def broken(self: Catalog, *args: Any, **more: Any) -> tuple[list[tuple[int, ...]], list[int]]:
        chunks, fresh = hold(self, *args, **more)
        absent = [row for rows in chunks for row in rows if not self._index.present[row] & 1]
        return chunks, list(dict.fromkeys([*fresh, *absent]))

    return [(Catalog, "hold_for_fetch", broken)]


@_takes_away("a fetch returns when its time is over", "after its timeout")
def wait_past_the_timeout() -> list[Patch]:
    fetch = Fetcher.fetch

    async def broken(self: Fetcher, *args: Any, within: float, **more: Any) -> Lease | None:
        return await fetch(self, *args, within=within + _FOREVER, **more)

    return [(Fetcher, "fetch", broken)]


@_takes_away("a lease holds its parts", "holds")
def lease_without_a_hold() -> list[Patch]:
    new = Leases.new

    def broken(self: Leases, *args: Any) -> Lease | None:
        lease = new(self, *args)
        if lease is not None:
            self._room.unhold(lease.rows)
        return lease

    return [(Leases, "new", broken)]


@_takes_away("a fetch gives back what it held and does not lease", "held for ever")
def forget_what_a_fetch_held_when_it_ends_empty() -> list[Patch]:
    release = Catalog.release_rows

    def broken(self: Catalog, rows: Iterable[int]) -> None:
        release(self, list(rows)[1:])

    return [(Catalog, "release_rows", broken)]


@_takes_away("a shared tier is waited for as long as the fetch may take", "after its timeout")
def wait_for_a_shared_tier_for_ever() -> list[Patch]:
    async def broken(self: Asking, prefix: Any, known: int, seconds: float) -> bool:
        del seconds
        return await self._ask(prefix, known, NEVER)

    return [(Asking, "within", broken), (Probe, "due", lambda _self, _name: True)]


# ---- save and spill


@_takes_away("a chunk is saved once, however many parts it has", "were to be saved")
def count_parts_as_chunks() -> list[Patch]:
    def broken(self: Moves, parts: Sequence[Any], fates: Sequence[str]) -> None:
        del parts
        for why in fates:
            if why:
                self._metrics.add("dropped_saves", reason=why)
            else:
                self._metrics.add("saved_chunks")

    return [(Moves, "_count", broken)]


@_takes_away("a part in the spill queue is held", "bytes|its name|holds|row|copy|nobody knows")
def queue_a_spill_without_a_hold() -> list[Patch]:
    enqueue, batch = Spiller._enqueue, Spiller._batch

    def broken(self: Spiller, name: RecordId, since: float) -> bool:
        before = len(self._queue)
        fitted = enqueue(self, name, since)
        if len(self._queue) > before:
            self._catalog.release_rows((self._queue[-1].row,))
        return fitted

    def broken_batch(self: Spiller) -> list[Any]:
        jobs = batch(self)
        for job in jobs:
            self._catalog._index.hold(job.row, 1)
        return jobs

    return [(Spiller, "_enqueue", broken), (Spiller, "_batch", broken_batch)]


@_takes_away("a write that failed is not indexed", "lacks records|nobody|second time|of them came")
def count_a_failed_write_as_stored() -> list[Patch]:
    settled = Spiller._settled

    def broken(self: Spiller, job: Any, written: Written) -> None:
        failed = written.status is Status.FAILED
        settled(self, job, written._replace(status=Status.OK) if failed else written)

    return [(Spiller, "_settled", broken)]


@_takes_away("room is made before a write", "over its budget|had .* bytes of")
def write_over_the_budget() -> list[Patch]:
    async def broken(self: Spiller, jobs: Any, extra: int) -> None:
        del self, jobs, extra
        await asyncio.sleep(0)

    return [
        (Spiller, "_make_room", broken),
        (Spiller, "_fitting", lambda _self, jobs: jobs),
    ]


_ASTRAY: Final = "nobody knows|had .* bytes of|after it was cleared|twice|was withdrawn"


@_takes_away("a record that a Store may still have is remembered", _ASTRAY)
def forget_what_a_store_may_still_have() -> list[Patch]:
    return [(Strays, "note", lambda _self, _name, _charged: None)]


@_takes_away("what is evicted from a tier is deleted from its Store", _ASTRAY)
def leave_victims_in_the_store() -> list[Patch]:
    async def broken(self: Strays, records: Mapping[RecordId, int]) -> None:
        del records
        for name in list(self._charged):
            self.forget(name)

    return [(Strays, "delete", broken)]


@_takes_away("a delete counts when the Store has confirmed it", _ASTRAY)
def believe_in_every_delete() -> list[Patch]:
    async def broken(self: Strays, records: Mapping[RecordId, int]) -> None:
        names = list({**self._charged, **records})
        if names:
            await self._tier.delete(names)
        for name in names:
            self.forget(name)

    return [(Strays, "delete", broken)]


@_takes_away("a part that waits in vain is dropped", "waits for ever|did not end")
def wait_for_what_was_evicted() -> list[Patch]:
    enqueue = Spiller._enqueue

    def broken(self: Spiller, name: RecordId, since: float) -> bool:
        before = len(self._queue)
        fitted = enqueue(self, name, since)
        return fitted and len(self._queue) > before

    def stuck(self: Catalog, name: RecordId, tier: int, queued: Any) -> list[RecordId]:
        chain = missing(self, name, tier, queued)
        return chain if chain or not self.gone(name) else [name]

    missing = Catalog.missing_chain
    return [(Spiller, "_enqueue", broken), (Catalog, "missing_chain", stuck)]


# ---- Tier


@_takes_away("a tier that failed is tried again", "after it was cleared|second time")
def never_try_a_broken_tier_again() -> list[Patch]:
    def broken(self: Breaker, _verb: str = "", *, ok: bool) -> None:
        self._failures, self._unread = 0 if ok else self._failures + 1, not ok
        self._open_until = _FOREVER  # nor does the call that tries, ever end its turn

    return [(Breaker, "report", broken)]


@_takes_away("of a tier's copies the next is tried when one fails", "another copy")
def give_up_after_the_first_copy() -> list[Patch]:
    read = Fetcher._read_each

    async def broken(self: Fetcher, rows: list[int], deadline: Deadline) -> None:
        first = [tier for row in rows for tier in self._catalog.tiers_of(row)[:1]]
        only = copy(self)
        only._tiers = {tier: self._tiers[tier] for tier in first[:1]}
        await read(only, rows, deadline)

    return [(Fetcher, "_read_each", broken)]
