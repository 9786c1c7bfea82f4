"""Withdrawing parts: at once for whoever matches, at its end for whoever holds."""

from __future__ import annotations

import pytest

from kvtier.catalog import removal
from kvtier.catalog.catalog import LOT
from kvtier.catalog.index import DRAM, NO_ROW
from kvtier.catalog.sweep import Removed
from kvtier.errors import MisuseError
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SUM, SmallCatalog, chain


@pytest.fixture
def small():
    one = SmallCatalog(slots=8)
    yield one
    one.close()


def withdraw(small, parts):
    return small.catalog.withdraw([part.name for part in parts], "invalidated")


def spilled(small, parts):
    """Save parts, and note them as written to the slower tier too."""
    assert small.save(parts) == len(parts)
    for part in parts:
        small.catalog.stored(part, LMDB, PART_BYTES)


def test_what_is_withdrawn_is_matched_no_more_and_leaves_its_slot(small):
    parts = chain(4)
    spilled(small, parts)
    assert withdraw(small, parts[2:]) == (2, 2)
    assert small.found(parts) == [DRAM, DRAM]
    assert small.arena.slots_in_use == 2
    assert small.catalog.take_withdrawn(LMDB) == {part.name: PART_BYTES for part in parts[2:]}
    assert small.catalog.take_withdrawn(LMDB) == {}
    assert small.catalog._shelves[LMDB].used == 2 * PART_BYTES


def test_parts_that_are_nowhere_are_no_parts(small):
    assert withdraw(small, chain(3)) == (0, 0)
    assert len(small.catalog._index) == 0


def test_a_shared_tier_deletes_what_the_index_does_not_know(small):
    small.catalog._shelves[LMDB].shared = True
    parts = chain(2)
    spilled(small, parts[:1])
    assert withdraw(small, parts) == (1, 2)
    assert small.catalog.take_withdrawn(LMDB) == dict.fromkeys((one.name for one in parts), 0)


def test_a_tier_that_was_not_listed_may_have_what_the_index_does_not_know(small):
    small.catalog._shelves[LMDB].unlisted = True
    parts = chain(2)
    assert withdraw(small, parts) == (0, 2)
    assert small.catalog.take_withdrawn(LMDB) == dict.fromkeys((one.name for one in parts), 0)
    small.catalog.lists(LMDB)
    assert withdraw(small, parts) == (0, 0)


def test_what_the_index_knows_of_a_tier_that_is_being_listed_is_charged_still(small):
    small.catalog._shelves[LMDB].unlisted = True
    parts = chain(3)
    spilled(small, parts[:2])
    assert withdraw(small, parts) == (2, 3)
    charged = [PART_BYTES, PART_BYTES, 0]
    names = [part.name for part in parts]
    assert small.catalog.take_withdrawn(LMDB) == dict(zip(names, charged, strict=True))


def test_descendants_are_orphans_and_leave_first(small):
    parts, other = chain(4), chain(4, seed=1)
    small.save(parts)
    small.save(other)
    withdraw(small, parts[:2])
    assert small.found(parts) == []
    assert small.catalog._index.orphans == 1
    assert small.save(chain(4, seed=2)) == 4
    assert small.rows(parts) == [NO_ROW] * 4
    assert small.found(other) == [DRAM] * 4
    assert small.catalog._index.orphans == 0


def test_a_leased_slot_stays_its_holders_and_the_part_is_saved_anew(small):
    parts = chain(3)
    small.save(parts)
    lease = small.lease(parts, 60)
    slots = [slot for slots in lease.slots for slot in slots]
    assert withdraw(small, parts) == (3, 0)
    assert small.found(parts) == []
    assert all(small.arena.holds(slot) for slot in slots)
    assert small.lease(parts, 60) is None
    assert small.save(parts) == 3
    assert small.found(parts) == [DRAM] * 3
    assert small.arena.slots_in_use == 6
    lease.release()
    assert not any(small.arena.holds(slot) for slot in slots)
    assert small.found(parts) == [DRAM] * 3
    assert small.catalog._room.withdrawn == {}
    assert small.catalog._index.held_rows == 0


def test_a_plan_keeps_its_slots_beyond_the_lease(small):
    parts = chain(1)
    small.save(parts)
    lease = small.lease(parts, 60)
    assert small.catalog.issue(lease, 0)
    withdraw(small, parts)
    lease.release()
    assert small.arena.holds(lease.slots[0][0])
    small.catalog.settle(lease)
    assert small.arena.slots_in_use == 0


def test_a_save_under_way_is_not_published_and_another_may_begin(small):
    parts = chain(2)
    first = small.reserve(parts)
    assert withdraw(small, parts) == (2, 0)
    second = small.reserve(parts)
    assert not {slot.serial for slot in first} & {slot.serial for slot in second}
    for part, slot in zip(parts, first, strict=True):
        assert not small.catalog.commit(part.name, slot, SUM)
    assert small.found(parts) == []
    for part, slot in zip(parts, second, strict=True):
        assert small.catalog.commit(part.name, slot, SUM)
    assert small.found(parts) == [DRAM] * 2
    assert small.catalog._index.held_rows == 0
    with pytest.raises(MisuseError, match="not reserved"):
        small.catalog.commit(parts[0].name, first[0], SUM)


def test_a_save_under_way_may_fail_after_it_was_withdrawn(small):
    parts = chain(2)
    slots = small.reserve(parts)
    withdraw(small, parts)
    for part, slot in zip(parts, slots, strict=True):
        small.catalog.abort(part.name, slot)
    assert small.arena.slots_in_use == 0
    assert len(small.catalog._index) == 0
    assert small.catalog._index.held_rows == 0


def test_a_child_that_is_being_filled_waits_for_the_parent_that_comes_anew(small):
    parts = chain(2)
    small.save(parts[:1])
    slots = small.reserve(parts)
    withdraw(small, parts[:1])
    assert small.save(parts[:1]) == 1
    assert small.catalog.commit(parts[1].name, slots[0], SUM)
    assert small.found(parts) == [DRAM] * 2
    assert small.catalog._index.held_rows == 0
    assert small.catalog._index.orphans == 0


def test_a_fetch_under_way_is_dropped(small):
    parts = chain(1)
    for part in parts:
        small.catalog.stored(part, LMDB, PART_BYTES)
    ((rows,), fresh) = small.hold_for_fetch(parts)
    withdraw(small, parts)
    assert small.catalog.tiers_of(rows[0]) == []
    small.catalog.fetched(rows[0], SUM)
    assert small.found(parts) == []
    small.catalog.release_rows(rows)
    assert fresh == list(rows)
    assert small.arena.slots_in_use == 0
    assert len(small.catalog._index) == 0


def test_what_a_withdrawn_read_says_of_the_tier_does_not_count(small):
    """The same part may have been saved and written down again meanwhile."""
    parts = chain(1)
    spilled(small, parts)
    small.catalog.clear(DRAM)
    (((row,),), _) = small.hold_for_fetch(parts)
    withdraw(small, parts)
    spilled(small, parts)
    assert not small.catalog.lost(row, LMDB)
    small.catalog.fetched(row, None)
    small.catalog.release_rows([row])
    assert small.catalog._shelves[LMDB].used == PART_BYTES
    assert small.found(parts) == [DRAM]


def test_a_spill_under_way_does_not_bring_it_back(small):
    parts = chain(1)
    small.save(parts)
    row = small.catalog.hold_for_spill(parts[0].name, LMDB)
    withdraw(small, parts)
    assert small.save(parts) == 1
    assert small.catalog.written(row, LMDB, PART_BYTES) == "withdrawn"
    small.catalog.release_rows([row])
    assert small.catalog._shelves[LMDB].used == 0
    assert small.found(parts) == [DRAM]


def test_what_a_shared_tier_was_asked_for_before_is_not_taken_in_after(small):
    parts = chain(2)
    seen = small.catalog.watch()
    withdraw(small, parts[1:])
    for part in parts:
        small.catalog.stored(part, LMDB, PART_BYTES, seen)
    assert small.found(parts) == [LMDB]
    small.catalog.unwatch(seen)
    withdraw(small, parts[:1])
    assert list(seen) == [parts[1].name]


def test_who_still_watches_is_told_after_another_has_ended(small):
    parts = chain(2)
    one, other = small.catalog.watch(), small.catalog.watch()
    small.catalog.unwatch(one)
    withdraw(small, parts[:1])
    assert (list(one), list(other)) == ([], [parts[0].name])


def test_stores_delete_children_before_their_parents(small):
    """Whenever that ends early, what is left there has its head."""
    parts = chain(3)
    spilled(small, parts)
    withdraw(small, parts)
    taken = small.catalog.take_withdrawn(LMDB)
    assert taken == dict.fromkeys(taken, PART_BYTES)
    assert list(taken) == [part.name for part in reversed(parts)]


def test_what_a_shared_tier_is_asked_to_delete_is_charged_to_nobody(small):
    parts = chain(1)
    small.catalog._shelves[LMDB].shared = True
    spilled(small, parts)
    withdraw(small, parts)
    assert small.catalog.take_withdrawn(LMDB) == {parts[0].name: 0}


# ------------------------------------------------------------------------------------ a namespace


def of(owner, parts):
    return [part._replace(owner=owner) for part in parts]


def purge(small, digest):
    row, names = 0, []
    while row != NO_ROW:
        lot, row = small.catalog.withdraw_namespace(digest, row)
        names += lot
    return names


def test_a_namespace_goes_and_others_never_notice(small):
    one, other = (small.catalog.owner(bytes([n]) * 32) for n in (1, 2))
    mine, others = of(one, chain(3)), of(other, chain(3, seed=1))
    spilled(small, mine)
    spilled(small, others)
    assert purge(small, bytes([1]) * 32) == [part.name for part in mine]
    assert small.found(mine) == []
    assert small.found(others) == [DRAM] * 3
    assert small.arena.slots_in_use == 3
    assert purge(small, bytes([3]) * 32) == []


def test_a_large_namespace_goes_in_lots(small):
    owner = small.catalog.owner(b"\1" * 32)
    for part in of(owner, chain(LOT * 2 + 3)):
        small.catalog.stored(part, LMDB, PART_BYTES)
    sizes, row = [], 0
    while row != NO_ROW:
        lot, row = small.catalog.withdraw_namespace(b"\1" * 32, row)
        sizes.append(len(lot))
    assert sizes == [LOT, LOT, 3]
    assert len(small.catalog._index) == 0
    assert len(small.catalog.take_withdrawn(LMDB)) == LOT * 2 + 3


def test_a_lot_that_is_exactly_full_is_the_last(small):
    owner = small.catalog.owner(b"\1" * 32)
    for part in of(owner, chain(LOT)):
        small.catalog.stored(part, LMDB, PART_BYTES)
    names, row = small.catalog.withdraw_namespace(b"\1" * 32, 0)
    assert (len(names), row) == (LOT, NO_ROW)


def test_a_purge_looks_at_so_many_rows_of_others_and_no_more(small, monkeypatch):
    monkeypatch.setattr(removal, "_LOOKED_AT", 2)
    small.catalog.owner(b"\1" * 32)
    for part in chain(5):
        small.catalog.stored(part, LMDB, PART_BYTES)
    steps, row = [], 0
    while row != NO_ROW:
        lot, row = small.catalog.withdraw_namespace(b"\1" * 32, row)
        assert lot == []
        steps.append(row)
    assert steps == [2, 4, NO_ROW]
    assert small.catalog.withdraw_namespace(b"nobody's", 0) == ([], NO_ROW)


def test_a_part_whose_slot_is_held_still_is_purged_once(small):
    owner = small.catalog.owner(b"\1" * 32)
    parts = of(owner, chain(1))
    small.save(parts)
    lease = small.lease(parts, 60)
    withdraw(small, parts)
    small.save(parts)
    assert purge(small, b"\1" * 32) == [parts[0].name]
    assert small.metrics.get("withdrawn_parts", reason="purged") == 1
    lease.release()


def test_a_purge_takes_what_is_under_way_too(small):
    owner = small.catalog.owner(b"\1" * 32)
    parts = of(owner, chain(2))
    slots = small.reserve(parts)
    assert len(purge(small, b"\1" * 32)) == 2
    assert not small.catalog.commit(parts[0].name, slots[0], SUM)
    assert not small.catalog.commit(parts[1].name, slots[1], SUM)
    assert small.arena.slots_in_use == 0


def test_a_withdrawn_slot_counts_for_its_tenant_until_it_is_free(small):
    parts = chain(1)
    small.save(parts)
    lease = small.lease(parts, 60)
    withdraw(small, parts)
    assert small.catalog._shelves[DRAM].used_by[0] == PART_BYTES
    lease.release()
    assert small.catalog._shelves[DRAM].used_by[0] == 0


def test_removed_is_a_value():
    assert Removed(3, 1) == (3, 1, ())
