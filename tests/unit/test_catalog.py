"""The Catalog: what is visible when, and who may leave."""

from __future__ import annotations

import pytest

from kvtier.catalog.catalog import Part
from kvtier.catalog.index import DRAM, NO_ROW, Index
from kvtier.catalog.shelf import Room
from kvtier.errors import MisuseError
from kvtier.identity.record import PartName, record_id
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SUM, SmallCatalog, chain


@pytest.fixture
def small():
    """Room for four parts."""
    fixture = SmallCatalog(4)
    yield fixture
    fixture.close()


# ------------------------------------------------------------------------------------ visibility


def test_a_reserved_part_is_invisible_until_it_is_committed(small):
    parts = chain(1)
    (slot,) = small.reserve(parts)
    assert small.found(parts) == []
    assert small.lease(parts, 1.0) is None
    assert small.catalog.commit(parts[0].name, slot, SUM)
    assert small.found(parts) == [DRAM]


def test_what_is_reserved_is_not_reserved_twice(small):
    parts = chain(2)
    assert len(small.reserve(parts[:1])) == 1
    assert small.reserve(parts[:1]) == []
    assert [small.catalog.gone(part.name) for part in parts] == [False, True]


def test_an_aborted_part_leaves_no_trace(small):
    parts = chain(3)
    for part, slot in zip(parts, small.reserve(parts), strict=True):
        small.catalog.abort(part.name, slot)
    assert small.arena.slots_in_use == 0
    assert len(small.catalog._index) == 0
    assert small.save(chain(4, seed=1)) == 4


def test_committing_what_was_not_reserved_is_misuse(small):
    parts = chain(2)
    (slot,) = small.reserve(parts[:1])
    with pytest.raises(MisuseError):
        small.catalog.commit(parts[1].name, slot, SUM)
    small.catalog.commit(parts[0].name, slot, SUM)
    with pytest.raises(MisuseError):
        small.catalog.commit(parts[0].name, slot, SUM)
    assert small.found(parts[:1]) == [DRAM]


def test_a_chunk_whose_parent_is_nowhere_is_not_reserved(small):
    assert small.reserve(chain(3, start=1)) == []


def test_a_child_whose_parent_failed_is_not_published(small):
    parts = chain(2)
    slots = small.reserve(parts)
    small.catalog.abort(parts[0].name, slots[0])
    assert not small.catalog.commit(parts[1].name, slots[1], SUM)
    assert small.arena.slots_in_use == 0
    assert small.found(parts) == []


def test_without_the_parent_check_a_headless_tail_is_published(small, monkeypatch):
    """The twin: what the check in `commit` is for."""
    parts = chain(2)
    slots = small.reserve(parts)
    small.catalog.abort(parts[0].name, slots[0])
    row = small.rows(parts)[1]
    monkeypatch.setitem(small.catalog._index.__dict__, "parent", [NO_ROW] * (row + 1))
    assert small.catalog.commit(parts[1].name, slots[1], SUM)
    assert small.arena.slots_in_use == 1


# -------------------------------------------------------------------------------------- eviction


def test_the_head_of_a_prefix_outlives_its_tail(small):
    """H10: when a prefix does not fit, what stays is its head."""
    parts = chain(8)
    assert small.save(parts[:4]) == 4
    assert small.save(parts[4:]) == 0  # its own ancestors are not evicted for it
    assert small.found(parts) == [DRAM] * 4
    assert small.save(chain(2, seed=1)) == 2
    assert small.found(parts) == [DRAM] * 2


def test_touching_forward_would_evict_the_head_first(small, monkeypatch):
    """The twin: why chains are touched deepest first."""
    monkeypatch.setattr(Room, "touch", lambda self, rows, **_: self.shelves[0].order.touch(rows))
    monkeypatch.setattr(
        "kvtier.catalog.index.Index.leaf", lambda self, row, tier: not self.holds[row]
    )
    parts = chain(4)
    small.save(parts)
    small.found(parts)
    small.save(chain(1, seed=1))
    assert small.found(parts) == []


def test_a_leased_part_is_never_evicted(small):
    parts = chain(4)
    small.save(parts)
    lease = small.lease(parts, 10.0)
    assert small.save(chain(4, seed=1)) == 0
    assert small.found(parts) == [DRAM] * 4
    lease.release()
    assert small.save(chain(4, seed=1)) == 4


def test_without_holds_a_leased_part_would_be_evicted(small, monkeypatch):
    """The twin: a lease without its holds is worth nothing."""
    parts = chain(4)
    small.save(parts)
    monkeypatch.setattr("kvtier.catalog.index.Index.leaf", lambda self, row, tier: True)
    lease = small.lease(parts, 10.0)
    small.save(chain(1, seed=1))
    assert not all(small.arena.holds(slot) for slots in lease.slots for slot in slots)


def test_a_parent_present_nowhere_else_stays_while_a_child_lies_below(small):
    parts = chain(2)
    small.save(parts)
    small.catalog.stored(parts[1], LMDB, 0)  # the child only was written down
    small.save(chain(3, seed=1))
    assert small.found(parts) == [DRAM, LMDB]
    assert small.catalog._index.orphans == 0


def test_a_last_copy_leaves_only_when_nothing_else_can(small):
    """Its slot is not lost for good; its child below is counted as an orphan."""
    parts = chain(2)
    small.save(parts)
    small.catalog.stored(parts[1], LMDB, 0)
    small.save(chain(4, seed=1))
    assert small.found(parts) == []
    assert small.catalog._index.orphans == 1
    small.catalog.stored(parts[0], LMDB, 0)
    assert small.found(parts) == [LMDB] * 2


def test_a_slower_tier_keeps_its_budget_and_evicts_leaves():
    fixture = SmallCatalog(4, capacity=3 * PART_BYTES)
    parts = chain(3)
    for part in parts:
        fixture.catalog.stored(part, LMDB, PART_BYTES)
    victims = fixture.evict(LMDB, PART_BYTES)
    assert [victim.name for victim in victims] == [parts[2].name]
    assert fixture.found(parts) == [LMDB] * 2
    assert fixture.metrics.get("evicted_parts", tier="lmdb") == 1
    fixture.close()


def test_room_for_a_child_is_not_made_of_its_ancestors():
    fixture = SmallCatalog(4, capacity=2 * PART_BYTES)
    parts = chain(3)
    fixture.save(parts)
    for part in parts[:2]:
        fixture.catalog.stored(part, LMDB, PART_BYTES)
    child = fixture.catalog.hold_for_spill(parts[2].name, LMDB)
    assert fixture.evict(LMDB, PART_BYTES, below=[child]) == []
    fixture.catalog.release_rows([child])
    assert len(fixture.evict(LMDB, PART_BYTES)) == 1
    fixture.close()


def test_room_for_many_parts_is_one_pass_over_what_must_stay(monkeypatch):
    """Looking anew for each part takes seconds under the lock, with 100,000 parts and leases."""
    fixture = SmallCatalog(400)
    for seed in range(4):
        fixture.save(chain(100, seed))
    leases = [fixture.lease(chain(100, seed), 9.0) for seed in (0, 1)]
    looked = []
    leaf = Index.leaf
    monkeypatch.setattr(
        Index, "leaf", lambda self, row, tier: looked.append(row) or leaf(self, row, tier)
    )
    assert fixture.save(chain(150, seed=4)) == 150
    assert fixture.metrics.get("evicted_parts", tier="dram") == 150
    assert [len(fixture.found(chain(100, seed))) for seed in range(4)] == [100, 100, 0, 50]
    assert len(looked) < 400 + 2 * 150
    for lease in leases:
        lease.release()
    fixture.close()


def test_parts_leave_in_lots_so_that_nobody_waits_long(monkeypatch):
    monkeypatch.setattr("kvtier.catalog.below.LOT", 3)
    fixture = SmallCatalog(8, capacity=8 * PART_BYTES)
    parts = chain(8)
    fixture.save(parts)
    for part in parts:
        fixture.catalog.stored(part, LMDB, PART_BYTES)
    assert len(fixture.evict(LMDB, 4 * PART_BYTES)) == 3
    assert len(fixture.evict(LMDB, 4 * PART_BYTES)) == 1
    assert fixture.evict(LMDB, 4 * PART_BYTES) == []
    assert [len(fixture.catalog.clear(DRAM)) for _ in range(4)] == [3, 3, 2, 0]
    assert fixture.found(parts) == [LMDB] * 4
    fixture.close()


# ----------------------------------------------------------------------------------------- fetch


def test_a_fetch_reserves_once_and_a_second_one_joins_it(small):
    parts = chain(2)
    for part in parts:
        small.catalog.stored(part, LMDB, 0)
    first, fresh = small.hold_for_fetch(parts)
    second, none = small.hold_for_fetch(parts)
    assert first == second
    assert len(fresh) == 2
    assert none == []
    assert small.lease(parts, 9.0) is None
    for row in fresh:
        small.catalog.fetched(row, SUM)
    small.lease(parts, 9.0).release()
    for rows in (*first, *second):
        small.catalog.release_rows(rows)
    assert small.catalog._index.held_rows == 0


def test_a_failed_read_shortens_the_result_and_frees_the_slot(small):
    parts = chain(3)
    for part in parts:
        small.catalog.stored(part, LMDB, 0)
    chunks, fresh = small.hold_for_fetch(parts)
    small.catalog.fetched(fresh[0], SUM)
    small.catalog.fetched(fresh[1], None)
    small.catalog.fetched(fresh[2], SUM)
    lease = small.lease(parts, 9.0, whole=False)
    assert lease.chunks == 1
    lease.release()
    small.catalog.lost(fresh[1], LMDB)
    for rows in chunks:
        small.catalog.release_rows(rows)
    assert small.found(parts) == [DRAM]
    assert small.catalog._index.orphans == 1
    assert small.arena.slots_in_use == 2


def test_a_fetch_takes_what_fits_and_holds_no_more(small):
    parts = chain(6)
    for part in parts:
        small.catalog.stored(part, LMDB, 0)
    chunks, fresh = small.hold_for_fetch(parts)
    assert len(chunks) == len(fresh) == 4
    assert small.hold_for_fetch(parts) == ([], []), "half of DRAM is being read into"
    assert small.metrics.get("refused_fetches") == 1
    for row in fresh:
        small.catalog.fetched(row, None)
    for rows in chunks:
        small.catalog.release_rows(rows)
    assert small.arena.slots_in_use == small.catalog._index.held_rows == 0


# ---------------------------------------------------------------------------------------- shards


def test_a_chunk_is_there_only_when_all_its_parts_are():
    """P7 and H12: a part that one rank lost shortens the prefix for all."""
    fixture = SmallCatalog(16)
    ranks = [PartName(0, shard, 4) for shard in range(4)]
    keys = [bytes([i]) * 32 for i in range(4)]
    chunks = [[record_id(key, rank) for rank in ranks] for key in keys]
    for depth, parts in enumerate(chunks):
        for shard, name in enumerate(parts):
            parent = chunks[depth - 1][shard] if depth else None
            fixture.catalog.stored(Part(name, parent, depth, PART_BYTES), LMDB, 0)
    wanted = [[Part(name, None, 0, PART_BYTES) for name in parts] for parts in chunks]
    assert fixture.found_chunks(wanted) == [LMDB] * 4
    lost = fixture.catalog._index.find(chunks[2][1])
    fixture.catalog.lost(lost, LMDB)
    assert fixture.found_chunks(wanted) == [LMDB] * 2
    fixture.close()


def test_an_orphan_is_counted_and_served_again_when_its_parent_returns(small):
    parts = chain(3)
    for part in parts[1:]:
        small.catalog.stored(part, LMDB, 0)
    assert small.found(parts) == []
    assert small.catalog._index.orphans == 1
    small.catalog.stored(parts[0], LMDB, 0)
    assert small.catalog._index.orphans == 0
    assert small.found(parts) == [LMDB] * 3


def test_orphans_leave_first():
    """Nobody can match them, so they make room before anything that is of use, however old."""
    fixture = SmallCatalog(4, capacity=5 * PART_BYTES)
    (old,) = chain(1, seed=1)
    parts = chain(4)
    for part in (old, *parts):
        fixture.catalog.stored(part, LMDB, PART_BYTES)
    fixture.catalog.lost(fixture.rows(parts)[1], LMDB)
    assert fixture.catalog._index.orphans == 1
    left = [victim.name for _ in range(3) for victim in fixture.evict(LMDB, 2 * PART_BYTES)]
    assert left == [parts[3].name]
    fixture.catalog.stored(chain(1, seed=2)[0], LMDB, PART_BYTES)
    left = [victim.name for victim in fixture.evict(LMDB, 2 * PART_BYTES)]
    assert left == [parts[2].name]
    assert fixture.catalog._index.orphans == 0
    assert fixture.found([old]) == [LMDB]
    fixture.close()


def test_an_orphan_leaves_in_its_turn_again_once_its_parent_is_back():
    fixture = SmallCatalog(4, capacity=4 * PART_BYTES)
    parts = chain(3)
    (old,) = chain(1, seed=1)
    for part in (old, *parts[1:]):
        fixture.catalog.stored(part, LMDB, PART_BYTES)
    fixture.catalog.stored(parts[0], LMDB, PART_BYTES)
    assert [victim.name for victim in fixture.evict(LMDB, PART_BYTES)] == [old.name]
    fixture.close()


def test_parents_that_lie_never_form_a_ring(small):
    """P10: records say of themselves whose children they are; a walk upward must end."""
    first, second, third = chain(3)
    for part, parent, depth in (
        (first, second, 1),
        (second, first, 2),
        (third, third, 3),
        (second, third, 0),
        (first, third, 4),
    ):
        small.catalog.stored(part._replace(parent=parent.name, depth=depth), LMDB, 0)
    index = small.catalog._index
    for row in small.rows([first, second, third]):
        above = [row]
        while above[-1] != NO_ROW and len(above) < 9:
            above.append(index.parent[above[-1]])
        assert above[-1] == NO_ROW
    while small.catalog.clear(LMDB):
        pass
    assert len(index) == index.orphans == 0


def test_clearing_a_tier_takes_all_that_nobody_holds(small):
    parts = chain(4)
    small.save(parts)
    lease = small.lease(parts[:1], 9.0)
    assert len(small.catalog.clear(DRAM)) == 3
    assert small.found(parts) == [DRAM]
    lease.release()
    assert len(small.catalog.clear(DRAM)) == 1
    assert small.catalog.clear(DRAM) == []
    assert len(small.catalog._index) == 0


# ------------------------------------------------------------------------------------- the arena


def test_slots_that_an_earlier_catalog_handed_out_are_given_back(small):
    slots = [small.arena.allocate(PART_BYTES) for _ in range(4)]
    assert small.save(chain(1)) == 0
    small.catalog.give_back(slots)
    assert small.save(chain(4)) == 4


def test_an_arena_is_cut_for_larger_parts_while_nothing_is_in_it(small):
    assert not small.arena.fits(4 * PART_BYTES)
    small.catalog.cut_for([4 * PART_BYTES])
    assert small.arena.fits(4 * PART_BYTES)
