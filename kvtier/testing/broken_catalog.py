"""The Catalog with one guard less: matching, leases, slots, eviction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvtier.cache import Cache
from kvtier.catalog.catalog import LOT, Catalog, Found, Parts
from kvtier.catalog.index import DRAM, NO_ROW, Index
from kvtier.catalog.lease import Lease, Leases, LeaseState
from kvtier.catalog.shelf import Room
from kvtier.identity.record import RecordId
from kvtier.identity.shape import Shape
from kvtier.memory.arena import Slot
from kvtier.testing.mutation import Mutation, Patch, collector

__all__ = ["CATALOG"]

CATALOG: Final[list[Mutation]] = []
_takes_away = collector(CATALOG)


def _all_of(chunks: int, shape: Shape, limit: int) -> Found:
    """Return a match of so many chunks, wherever they are."""
    size, block = shape.chunk_tokens, shape.block_tokens
    tokens = min(chunks * size, limit // block * block)
    return Found(tokens, [DRAM] * -(-tokens // size), chunks)


# ---- match


@_takes_away("a match ends at the first part that is in no tier", "is nowhere was matched")
def match_across_a_hole() -> list[Patch]:
    def broken(self: Catalog, names: Sequence[object], shape: Shape, limit: int) -> Found:
        with self._lock:
            return _all_of(len(names), shape, limit)

    return [(Catalog, "match", broken)]


@_takes_away("an orphan is not served: a match needs every ancestor", "is nowhere was matched")
def serve_an_orphan() -> list[Patch]:
    match = Catalog.match

    def broken(
        self: Catalog, names: Sequence[Sequence[RecordId]], shape: Shape, limit: int
    ) -> Found:
        count = match(self, names, shape, limit).chunks
        index = self._index
        for parts in names[count:]:  # an absent head has a row while it has children
            rows = [index.find(name) for name in parts]
            if any(row == NO_ROW or not index.children[row] for row in rows):
                break
            count += 1
        return _all_of(count, shape, limit)

    return [(Catalog, "match", broken)]


@_takes_away("a chunk is there only when all its parts are", "is nowhere was matched")
def match_a_chunk_by_its_first_part() -> list[Patch]:
    match = Catalog.match

    def broken(
        self: Catalog, names: Sequence[Sequence[RecordId]], shape: Shape, limit: int
    ) -> Found:
        return match(self, [parts[:1] for parts in names], shape, limit)

    return [(Catalog, "match", broken)]


# ---- leases


@_takes_away(
    "a lease's slots stay while a plan is out",
    "loaded slot is not in use|holds|are pinned, counted",
)
def drop_holds_at_the_deadline_of_a_plan() -> list[Patch]:
    def broken(self: Leases, lease: Lease) -> None:
        if lease.serial in self._all and lease.state.name != "HELD":
            del self._all[lease.serial]
            self._room.unhold(lease.rows)

    return [(Leases, "drop", broken)]


@_takes_away("a plan that is issued is counted until it settles", "loaded|row .* slot|holds")
def forget_a_plan_that_is_out() -> list[Patch]:
    def broken(self: Catalog, lease: Lease, _owner: int) -> bool:
        self.expire()
        return lease.state is LeaseState.HELD

    return [
        (Catalog, "issue", broken),
        (Catalog, "settle", lambda _self, _lease: None),
    ]


@_takes_away("a plan that has settled lets go of its lease", "a lease is left")
def never_settle_a_load() -> list[Patch]:
    return [(Catalog, "settle", lambda _self, _lease: None)]


@_takes_away("no plan is issued after a lease's deadline", "its lease's deadline|was renewed")
def never_expire_a_lease() -> list[Patch]:
    return [(Leases, "expire", lambda _self: None)]


@_takes_away("a lease that expired lets go of its slots", "a lease is left")
def keep_the_slots_of_an_expired_lease() -> list[Patch]:
    end = Leases.end

    def broken(self: Leases, lease: Lease, state: LeaseState) -> None:
        if state is LeaseState.EXPIRED:
            lease.state = state
        else:
            end(self, lease, state)

    return [(Leases, "end", broken)]


@_takes_away("a plan settles once, and is forgotten", "a plan is left|not reserved|not issued")
def settle_without_forgetting_the_plan() -> list[Patch]:
    settle = Cache.settle

    def broken(self: Cache, plan: Any, result: Any) -> None:
        issued = self._plans._out.get((plan.arena, plan.id))
        settle(self, plan, result)
        if issued is not None:
            self._plans._out[plan.arena, plan.id] = issued

    return [(Cache, "settle", broken)]


# ---- slots


@_takes_away("a slot that was taken back belongs to no row", "not in use")
def free_an_aborted_slot_and_keep_it() -> list[Patch]:
    def broken(self: Room, row: int) -> None:
        self.arena.free(self.index.slot(row))
        self.unhold(self._with_parent(row))

    return [(Room, "abort", broken)]


@_takes_away("a slot is given back once", "not in use")
def free_an_evicted_slot_twice() -> list[Patch]:
    leave = Room.leave

    def broken(self: Room, row: int, tier: int, *why: str) -> None:
        slot = self.index.slot(row)
        leave(self, row, tier, *why)
        if slot.serial and not self.index.serial[row]:
            self.arena.free(slot)

    return [(Room, "leave", broken)]


@_takes_away("a part that leaves DRAM gives its slot back", "belongs to no row|in use")
def never_free_what_is_evicted() -> list[Patch]:
    leave = Room.leave

    def broken(self: Room, row: int, tier: int, *why: str) -> None:
        if tier == DRAM and self.index.serial[row]:
            self.index.set_slot(row, None)
        leave(self, row, tier, *why)

    return [(Room, "leave", broken)]


@_takes_away("a save whose copy failed gives its slot back", "is left|leaks|held|belongs|dealt")
def never_free_what_was_not_saved() -> list[Patch]:
    return [(Catalog, "abort", lambda _self, _name, _slot: None)]


@_takes_away("a slot's serial is compared, so that a stale one frees nothing", "slot|holds|order")
def settle_twice_without_comparing_serials() -> list[Patch]:
    settle, reserved = Cache.settle, Room.reserved

    def twice(self: Cache, plan: Any, result: Any) -> None:
        issued = self._plans._out.get((plan.arena, plan.id))
        settle(self, plan, result)
        if isinstance(issued, list):  # a worker reports a save again, later
            self._plans._out[plan.arena, plan.id] = issued
            settle(self, plan, result)

    def unchecked(self: Room, name: RecordId, slot: Slot) -> int:
        row = self.index.find(name)
        return row if row != NO_ROW else reserved(self, name, slot)

    return [(Cache, "settle", twice), (Room, "reserved", unchecked)]


@_takes_away("nothing is published whose parent is gone", "orphans, and no tier lost anything")
def commit_a_headless_tail() -> list[Patch]:
    def broken(self: Catalog, name: RecordId, slot: Slot, raw_sum: bytes) -> bool:
        with self._lock:
            self._room.publish(self._room.reserved(name, slot), raw_sum)
            return True

    return [(Catalog, "commit", broken)]


# ---- eviction


@_takes_away("what is held does not leave", "leased slot|its own ancestors")
def evict_what_is_held() -> list[Patch]:
    def broken(self: Index, row: int, tier: int) -> bool:
        return not self.kids[tier][row] and (
            not self.children[row] or self.present[row] != 1 << tier
        )

    return [(Index, "leaf", broken)]


@_takes_away("children leave before parents", "no tier lost anything|its own ancestors")
def evict_parents_before_children() -> list[Patch]:
    return [(Index, "leaf", lambda self, row, _tier: not self.holds[row])]


@_takes_away("a tier that is cleared keeps what is held", "leased|row|slot")
def clear_what_is_held() -> list[Patch]:
    def broken(self: Catalog, tier: int, keep: int = 0) -> list[Any]:
        del keep
        with self._lock:
            rows = list(self._shelves[tier].order)[:LOT]
            return [self._take_out(row, tier) for row in rows]

    return [(Catalog, "clear", broken)]


@_takes_away("a reservation does not evict its own ancestors", "evicted its own ancestors")
def let_a_reservation_evict_its_ancestors() -> list[Patch]:
    return [
        (Room, "hold_names", lambda _self, _names: []),
        (Room, "_with_parent", lambda _self, row: (row,)),
    ]


@_takes_away("what a tier stores counts against its budget", "bytes of|budget|are counted")
def charge_nothing_for_what_is_stored() -> list[Patch]:
    stored, stored_many = Catalog.stored, Catalog.stored_many

    def broken(self: Catalog, part: Any, tier: int, charged: int, *args: Any) -> None:
        stored(self, part, tier, charged * 0, *args)

    def many(self: Catalog, parts: Parts, tier: int) -> None:
        stored_many(self, parts._replace(charged=parts.charged * 0), tier)

    return [(Catalog, "stored", broken), (Catalog, "stored_many", many)]


@_takes_away("a part that a tier lost is dropped, so that it fails once", "second time|lacks")
def keep_what_a_tier_lost() -> list[Patch]:
    return [(Catalog, "lost", lambda *_: None)]
