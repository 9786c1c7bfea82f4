"""The Catalog: which part is where, who holds it, and what leaves to make room.

All calls touch memory only, under one lock, for microseconds; they may come from any thread.
What waits (reading, writing, hashing) is done by fetch and spill, which call back here to
publish. Nothing is visible before its bytes are whole, and nothing held is ever given away.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kvtier.catalog.index import DRAM, NO_ROW
from kvtier.catalog.lease import Lease, Leases, LeaseState
from kvtier.catalog.shelf import Room, Shelf
from kvtier.clock import Clock
from kvtier.errors import MisuseError
from kvtier.identity.record import RecordId
from kvtier.memory.arena import Arena, Slot
from kvtier.metrics import Metrics

__all__ = ["LOT", "Catalog", "Part", "Shelf", "Victim"]

LOT: Final = 256
"""Parts that leave a tier at a time: taking out more would hold the lock for milliseconds."""


class Part(NamedTuple):
    """One part that a caller wants reserved: its name, its parent's, and its raw bytes."""

    name: RecordId
    parent: RecordId | None
    depth: int
    nbytes: int


class Victim(NamedTuple):
    """A part that has left a slower tier's index and must be deleted from its Store."""

    row: int
    name: RecordId
    charged: int


class Catalog:
    """Index, arena and leases behind one lock."""

    def __init__(
        self, arena: Arena, shelves: Sequence[Shelf], clock: Clock, metrics: Metrics
    ) -> None:
        self._room = Room(arena, shelves, metrics)
        self._index = self._room.index
        self._shelves = self._room.shelves
        self._metrics = metrics
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._leases = Leases(self._room, clock, metrics)

    # ---- match

    def match(self, names: Sequence[Sequence[RecordId]]) -> list[int]:
        """Return, for each chunk from the first, the fastest tier that has all its parts.

        names: for each chunk the names of its parts. Ends at the first chunk of which a part is
        in no tier. Touches what it found, deepest first, so that heads outlive tails.
        """
        with self._lock:
            find, present = self._index.rows.get, self._index.present
            found: list[int] = []
            rows: list[int] = []
            for parts in names:
                slowest = 1
                for name in parts:
                    row = find(name, NO_ROW)
                    bits = present[row] if row != NO_ROW else 0
                    if not bits:
                        self._room.touch(rows)
                        return found
                    slowest = max(slowest, bits & -bits)
                    rows.append(row)
                found.append(slowest.bit_length() - 1)
            self._room.touch(rows)
            return found

    # ---- leases

    def lease(
        self, first: int, names: Sequence[Sequence[RecordId]], seconds: float
    ) -> Lease | None:
        """Hold the slots of chunks that are all in DRAM; None when one is not (any more)."""
        with self._lock:
            rows = tuple(tuple(self._index.find(name) for name in parts) for parts in names)
            if not all(self._room.in_dram(row) for parts in rows for row in parts):
                return None
            for parts in rows:
                for row in parts:
                    self._index.hold(row, 1)
            sources = (self._shelves[DRAM].name,) * len(rows)
            return self._leases.new(first, rows, sources, seconds, self._end_lease)

    def adopt(
        self, first: int, rows: Sequence[tuple[int, ...]], sources: Sequence[str], seconds: float
    ) -> Lease:
        """Turn holds that a fetch took on chunks now in DRAM into a lease."""
        with self._lock:
            return self._leases.new(first, tuple(rows), tuple(sources), seconds, self._end_lease)

    def issue(self, lease: Lease) -> bool:
        """Note that a CopyPlan of the lease goes out; False when its deadline has passed."""
        with self._lock:
            self._leases.expire()
            if lease.state is not LeaseState.HELD:
                return False
            lease.plans += 1
            return True

    def settle(self, lease: Lease) -> None:
        """Note that a plan's copies have ended everywhere; may free what the lease held."""
        with self._lock:
            if lease.plans < 1:
                raise MisuseError("a plan settled that was not issued")
            lease.plans -= 1
            self._leases.drop(lease)

    def expire(self) -> int:
        """End leases whose deadline has passed; return how many are left."""
        with self._lock:
            self._leases.expire()
            return len(self._leases)

    def _end_lease(self, lease: Lease) -> None:
        if os.getpid() != self._pid:  # before the lock, which another thread may have held
            raise MisuseError("a lease does not cross fork; its parent holds it")
        with self._lock:
            self._leases.end(lease, LeaseState.RELEASED)

    # ---- reserve, commit, abort

    def reserve(self, chunks: Sequence[Sequence[Part]]) -> tuple[list[tuple[Part, Slot]], int]:
        """Hand out slots for the parts of chunks that exist nowhere yet, evicting leaves.

        A part that exists or is being written needs none: a chunk of which some parts have left
        gets the others. Stops at the first chunk of which a part's parent is nowhere, or for
        which not enough can be evicted; ancestors and the chunks' own parts are not.
        Returns the parts with their slots, and how many chunks stay incomplete.
        """
        with self._lock:
            self._leases.expire()
            room, find = self._room, self._index.find
            lacking = [c for c in chunks if not all(room.known(find(part.name)) for part in c)]
            needed = (name for chunk in lacking for part in chunk for name in part[:2] if name)
            kept = room.hold_names(needed)
            victims = room.victims(DRAM)
            taken: list[tuple[Part, Slot]] = []
            count = 0
            for chunk in lacking:
                parts = [part for part in chunk if not room.known(find(part.name))]
                slots = self._reserve(parts, kept, victims)
                if len(slots) < len(parts):
                    break
                taken += zip(parts, slots, strict=True)
                count += 1
            room.unhold(kept)
            return taken, len(lacking) - count

    def _reserve(
        self, parts: Sequence[Part], kept: list[int], victims: Iterator[int]
    ) -> list[Slot]:
        """Reserve all of some parts of one chunk, or none."""
        rows: list[int] = []
        for part in parts:
            known = part.parent is None or self._room.known(self._index.find(part.parent))
            slot = self._room.slot_for(part.nbytes, kept, victims) if known else None
            if slot is None:
                for row in rows:
                    self._room.abort(row)
                return []
            row = self._index.ensure(part.name, part.parent, part.depth, part.nbytes)
            self._room.take(row, slot)
            rows.append(row)
        return [self._index.slot(row) for row in rows]

    def commit(self, name: RecordId, slot: Slot, raw_sum: bytes) -> bool:
        """Publish a reserved part whose bytes are whole.

        False, and the slot is taken back, when its parent is gone: it would be a headless tail.
        """
        with self._lock:
            row = self._room.reserved(name, slot)
            above = self._index.parent[row]
            if above != NO_ROW and not self._index.present[above]:
                self._room.abort(row)
                return False
            self._room.publish(row, raw_sum)
            return True

    def abort(self, name: RecordId, slot: Slot) -> None:
        """Take back a reserved slot whose bytes never became whole."""
        with self._lock:
            self._room.abort(self._room.reserved(name, slot))

    # ---- fetch: holds and slots for parts that lie in slower tiers

    def hold_for_fetch(
        self, names: Sequence[Sequence[RecordId]]
    ) -> tuple[list[tuple[int, ...]], list[int]]:
        """Hold the rows of chunks that are to come up to DRAM, and reserve slots for the absent.

        Returns the rows of each chunk, as far as all of it could be held, and those rows that
        were given a fresh slot here: the caller reads them, then calls ``fetched``. A row that
        another fetch is reading is held and not returned as fresh.
        """
        with self._lock:
            self._leases.expire()
            index, chunks, fresh = self._index, [], []
            victims = self._room.victims(DRAM)
            for parts in names:
                taken: list[int] = []
                for name in parts:
                    row = index.find(name)
                    if row == NO_ROW or not index.present[row]:
                        break
                    index.hold(row, 1)
                    taken.append(row)
                    if not index.serial[row]:
                        slot = self._room.slot_for(index.raw_bytes[row], taken, victims)
                        if slot is None:
                            break
                        self._room.take(row, slot)
                        fresh.append(row)
                else:
                    chunks.append(tuple(taken))
                    continue
                self._room.unhold(taken)
                break
            return chunks, fresh

    def fetched(self, row: int, raw_sum: bytes | None) -> None:
        """End the reading of a fresh row: publish it in DRAM, or with None take its slot back."""
        with self._lock:
            if raw_sum is None:
                self._room.abort(row)
            else:
                self._room.publish(row, raw_sum)

    def resident(self, chunks: Sequence[tuple[int, ...]]) -> int:
        """Return how many chunks, from the first, are wholly in DRAM."""
        with self._lock:
            for count, rows in enumerate(chunks):
                if not all(self._room.in_dram(row) for row in rows):
                    return count
            return len(chunks)

    def release_rows(self, rows: Iterable[int]) -> None:
        """Give back holds."""
        with self._lock:
            self._room.unhold(rows)

    # ---- slower tiers

    def capacity(self, tier: int) -> int | None:
        """Return a tier's budget in bytes; None for unbounded."""
        return self._shelves[tier].capacity

    def spare(self, tier: int) -> int | None:
        """Return the bytes that a tier's budget has left; None for unbounded."""
        with self._lock:
            shelf = self._shelves[tier]
            return None if shelf.capacity is None else shelf.capacity - shelf.used

    def missing_chain(
        self, name: RecordId, tier: int, queued: Container[RecordId]
    ) -> list[RecordId]:
        """Return a part and its ancestors that a tier lacks and DRAM has, deepest first.

        Ends at the first ancestor that the tier has, that is queued for it, or that DRAM has not.
        """
        with self._lock:
            index = self._index
            names: list[RecordId] = []
            row = index.find(name)
            while self._room.in_dram(row) and not index.present[row] & 1 << tier:
                if index.names[row] in queued:
                    break
                names.append(index.names[row])
                row = index.parent[row]
            return names

    def gone(self, name: RecordId) -> bool:
        """Say whether a part is in no tier, nor on its way into one."""
        with self._lock:
            return not self._room.known(self._index.find(name))

    def hold_for_spill(self, name: RecordId, tier: int) -> int:
        """Hold a part in DRAM that a tier lacks, for writing it; NO_ROW when there is none."""
        with self._lock:
            row = self._index.find(name)
            if not self._room.in_dram(row) or self._index.present[row] & 1 << tier:
                return NO_ROW
            self._index.hold(row, 1)
            return row

    def describe(self, row: int) -> tuple[RecordId, RecordId | None, int, Slot, int, bytes]:
        """Return a held row's name, parent's name, depth, slot, raw bytes and raw checksum."""
        with self._lock:
            index = self._index
            above = index.parent[row]
            parent = index.names[above] if above != NO_ROW else None
            return (
                index.names[row],
                parent,
                index.depth[row],
                index.slot(row),
                index.raw_bytes[row],
                index.sums[row],
            )

    def tiers_of(self, row: int) -> list[int]:
        """Return the slower tiers that have the part, fastest first."""
        with self._lock:
            bits = self._index.present[row]
            return [t for t in range(1, len(self._shelves)) if bits & 1 << t]

    def stored(self, part: Part, tier: int, charged: int) -> None:
        """Note that a tier has a part: written there, found on reopening, or seen by a probe."""
        with self._lock:
            row = self._index.ensure(part.name, part.parent, part.depth, part.nbytes)
            if self._index.present[row] & 1 << tier:
                return
            self._index.add(row, tier, charged)
            shelf = self._shelves[tier]
            shelf.policy.insert(row)
            shelf.used += charged

    def lost(self, row: int, tier: int) -> None:
        """Note that a tier does not have a part after all, or has it spoilt."""
        with self._lock:
            self._room.leave(row, tier)

    def evict(
        self, tier: int, nbytes: int, *, at_least: int = 0, below: Sequence[int] = ()
    ) -> list[Victim]:
        """Take leaves out of a slower tier until `nbytes` more fit its budget, LOT at most.

        at_least: parts that must leave even if the budget has room. below: rows for which the
        room is made; their parents, and so all their ancestors, stay. The caller asks again
        after a full lot, and deletes the victims from the Store; they can no longer be matched.
        """
        with self._lock:
            kept = self._room.hold_parents(below)
            shelf = self._shelves[tier]
            victims: list[Victim] = []
            rows = itertools.islice(self._room.victims(tier), LOT)
            while len(victims) < at_least or (
                shelf.capacity is not None and shelf.used + nbytes > shelf.capacity
            ):
                row = next(rows, NO_ROW)
                if row == NO_ROW:
                    break
                victims.append(self._take_out(row, tier))
            self._metrics.add("evicted_parts", len(victims), tier=shelf.name)
            self._room.unhold(kept)
            return victims

    def clear(self, tier: int) -> list[Victim]:
        """Take what nobody holds out of a tier, deepest first; fewer than LOT when all of it."""
        with self._lock:
            rows = itertools.islice(self._room.victims(tier), LOT)
            return [self._take_out(row, tier) for row in rows]

    def _take_out(self, row: int, tier: int) -> Victim:
        victim = Victim(row, self._index.names[row], self._index.charged[tier][row])
        self._room.leave(row, tier)
        return victim

    # ---- figures

    def figures(self) -> None:
        """Set the gauges."""
        with self._lock:
            index, metrics = self._index, self._metrics
            for shelf in self._shelves:
                metrics.set("tier_used_bytes", shelf.used, tier=shelf.name)
                metrics.set("tier_parts", len(shelf.policy), tier=shelf.name)
                metrics.set("tier_capacity_bytes", shelf.capacity or 0, tier=shelf.name)
            metrics.set(
                "tier_used_bytes", self._room.arena.used_bytes, tier=self._shelves[DRAM].name
            )
            metrics.set("leased_parts", index.held_rows)
            metrics.set("quarantined_slots", self._leases.quarantined)
            metrics.set("orphan_parts", index.orphans)
