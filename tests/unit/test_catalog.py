"""The Catalog: what is visible when, who may leave, and who holds what."""

from __future__ import annotations

import pytest

from kvtier.catalog.catalog import Catalog, Part, Shelf
from kvtier.catalog.index import DRAM, NO_ROW
from kvtier.catalog.lease import LeaseState
from kvtier.catalog.shelf import Room
from kvtier.errors import MisuseError
from kvtier.identity.record import Part as PartName
from kvtier.identity.record import record_id
from kvtier.memory.arena import Arena
from kvtier.metrics import Metrics
from kvtier.policies.lru import Lru

PART_BYTES = 8192
SUM = bytes(16)
LMDB = 1


class Clock:
    """A clock that tests move by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Fixture:
    """A catalog with room for `slots` parts in DRAM and one slower tier."""

    def __init__(self, slots: int, capacity: int | None = None) -> None:
        self.clock = Clock()
        self.metrics = Metrics()
        self.arena = Arena(slots * PART_BYTES, [PART_BYTES])
        shelves = [Shelf("dram", Lru(), slots * PART_BYTES), Shelf("lmdb", Lru(), capacity)]
        self.catalog = Catalog(self.arena, shelves, self.clock, self.metrics)

    def save(self, parts: list[Part]) -> int:
        """Save parts as an engine would; return how many were kept."""
        slots = self.catalog.reserve(parts)
        taken = zip(parts, slots, strict=False)
        return sum(self.catalog.commit(part.name, slot, SUM) for part, slot in taken)

    def found(self, parts: list[Part]) -> list[int]:
        """Match one-part chunks; return the tier of each."""
        return self.catalog.match([[part.name] for part in parts])

    def rows(self, parts: list[Part]) -> list[int]:
        return [self.catalog._index.find(part.name) for part in parts]

    def close(self) -> None:
        self.arena.close()


def chain(count: int, seed: int = 0, start: int = 0) -> list[Part]:
    """Return the parts of a prefix of one-part chunks."""
    names = [
        record_id(bytes([seed]) * 16 + depth.to_bytes(16, "big"), PartName())
        for depth in range(count)
    ]
    parents = [None, *names]
    parts = [Part(name, parents[i], i, PART_BYTES) for i, name in enumerate(names)]
    return parts[start:]


@pytest.fixture
def small():
    """Room for four parts."""
    fixture = Fixture(4)
    yield fixture
    fixture.close()


def names(parts: list[Part]) -> list[list[bytes]]:
    return [[part.name] for part in parts]


# ------------------------------------------------------------------------------------ visibility


def test_a_reserved_part_is_invisible_until_it_is_committed(small):
    parts = chain(1)
    (slot,) = small.catalog.reserve(parts)
    assert small.found(parts) == []
    assert small.catalog.lease(0, names(parts), 1.0) is None
    assert small.catalog.commit(parts[0].name, slot, SUM)
    assert small.found(parts) == [DRAM]


def test_what_is_reserved_is_not_reserved_twice(small):
    parts = chain(2)
    assert len(small.catalog.reserve(parts[:1])) == 1
    assert small.catalog.reserve(parts[:1]) == []
    assert small.catalog.absent(parts) == 1


def test_an_aborted_part_leaves_no_trace(small):
    parts = chain(3)
    for part, slot in zip(parts, small.catalog.reserve(parts), strict=True):
        small.catalog.abort(part.name, slot)
    assert small.arena.slots_in_use == 0
    assert len(small.catalog._index) == 0
    assert small.save(chain(4, seed=1)) == 4


def test_committing_what_was_not_reserved_is_misuse(small):
    parts = chain(2)
    (slot,) = small.catalog.reserve(parts[:1])
    with pytest.raises(MisuseError):
        small.catalog.commit(parts[1].name, slot, SUM)
    small.catalog.commit(parts[0].name, slot, SUM)
    with pytest.raises(MisuseError):
        small.catalog.commit(parts[0].name, slot, SUM)
    assert small.found(parts[:1]) == [DRAM]


def test_a_chunk_whose_parent_is_nowhere_is_not_reserved(small):
    assert small.catalog.reserve(chain(3, start=1)) == []


def test_a_child_whose_parent_failed_is_not_published(small):
    parts = chain(2)
    slots = small.catalog.reserve(parts)
    small.catalog.abort(parts[0].name, slots[0])
    assert not small.catalog.commit(parts[1].name, slots[1], SUM)
    assert small.arena.slots_in_use == 0
    assert small.found(parts) == []


def test_without_the_parent_check_a_headless_tail_is_published(small, monkeypatch):
    """The twin: what the check in `commit` is for."""
    parts = chain(2)
    slots = small.catalog.reserve(parts)
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
    monkeypatch.setattr(Room, "touch", lambda self, rows: self.shelves[0].policy.touch(rows))
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
    lease = small.catalog.lease(0, names(parts), 10.0)
    assert small.save(chain(4, seed=1)) == 0
    assert small.found(parts) == [DRAM] * 4
    lease.release()
    assert small.save(chain(4, seed=1)) == 4


def test_without_holds_a_leased_part_would_be_evicted(small, monkeypatch):
    """The twin: a lease without its holds is worth nothing."""
    parts = chain(4)
    small.save(parts)
    monkeypatch.setattr("kvtier.catalog.index.Index.leaf", lambda self, row, tier: True)
    lease = small.catalog.lease(0, names(parts), 10.0)
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
    fixture = Fixture(4, capacity=3 * PART_BYTES)
    parts = chain(3)
    for part in parts:
        fixture.catalog.stored(part, LMDB, PART_BYTES)
    victims = fixture.catalog.evict(LMDB, PART_BYTES)
    assert [victim.name for victim in victims] == [parts[2].name]
    assert fixture.found(parts) == [LMDB] * 2
    assert fixture.metrics.get("evicted_parts", tier="lmdb") == 1
    fixture.close()


def test_room_for_a_child_is_not_made_of_its_ancestors():
    fixture = Fixture(4, capacity=2 * PART_BYTES)
    parts = chain(3)
    fixture.save(parts)
    for part in parts[:2]:
        fixture.catalog.stored(part, LMDB, PART_BYTES)
    child = fixture.catalog.hold_for_spill(parts[2].name, LMDB)
    assert fixture.catalog.evict(LMDB, PART_BYTES, below=[child]) == []
    fixture.catalog.release_rows([child])
    assert len(fixture.catalog.evict(LMDB, PART_BYTES)) == 1
    fixture.close()


# ---------------------------------------------------------------------------------------- leases


def test_a_lease_ends_at_its_deadline(small):
    parts = chain(4)
    small.save(parts)
    lease = small.catalog.lease(0, names(parts), 2.0)
    small.clock.now += 1.9
    small.catalog.expire()
    assert lease.state is LeaseState.HELD
    small.clock.now += 0.2
    small.catalog.expire()
    assert lease.state is LeaseState.EXPIRED
    assert small.save(chain(4, seed=1)) == 4
    lease.release()  # a documented no-op
    assert small.metrics.get("expired_leases") == 1


def test_a_plan_issued_in_time_keeps_its_slots_past_the_deadline(small):
    """P4: quarantine, until the copy has reported."""
    parts = chain(4)
    small.save(parts)
    lease = small.catalog.lease(0, names(parts), 2.0)
    assert small.catalog.issue(lease)
    small.clock.now += 5
    assert small.save(chain(4, seed=1)) == 0
    small.catalog.figures()
    assert small.metrics.get("quarantined_slots") == 4
    small.catalog.settle(lease)
    assert small.save(chain(4, seed=1)) == 4


def test_a_plan_is_refused_after_the_deadline(small):
    parts = chain(1)
    small.save(parts)
    lease = small.catalog.lease(0, names(parts), 2.0)
    small.clock.now += 3
    assert not small.catalog.issue(lease)


def test_releasing_while_a_copy_runs_frees_nothing_until_it_settles(small):
    parts = chain(4)
    small.save(parts)
    lease = small.catalog.lease(0, names(parts), 2.0)
    small.catalog.issue(lease)
    lease.release()
    assert small.save(chain(1, seed=1)) == 0
    small.catalog.settle(lease)
    assert small.save(chain(1, seed=1)) == 1


def test_releasing_twice_is_misuse_and_harms_nobody(small):
    parts = chain(4)
    small.save(parts)
    first = small.catalog.lease(0, names(parts), 9.0)
    second = small.catalog.lease(0, names(parts), 9.0)
    first.release()
    with pytest.raises(MisuseError):
        first.release()
    assert small.save(chain(1, seed=1)) == 0  # the second still holds
    second.release()
    assert small.catalog._index.held_rows == 0


def test_settling_what_was_not_issued_is_misuse(small):
    parts = chain(1)
    small.save(parts)
    lease = small.catalog.lease(0, names(parts), 9.0)
    with pytest.raises(MisuseError):
        small.catalog.settle(lease)


def test_ten_thousand_careless_leases_leave_nothing_held():
    """H14: leases that are used, released or forgotten all end."""
    fixture = Fixture(64)
    parts = chain(8)
    fixture.save(parts)
    for turn in range(10_000):
        fixture.clock.now += 0.01
        lease = fixture.catalog.lease(0, names(parts), 1.0)
        if turn % 3 == 0:
            lease.release()
        elif turn % 3 == 1:
            fixture.catalog.issue(lease)
            fixture.catalog.settle(lease)
    fixture.clock.now += 1.1
    assert fixture.catalog.expire() == 0
    assert fixture.catalog._index.held_rows == 0
    assert fixture.save(chain(64, seed=1)) == 64
    fixture.close()


# ----------------------------------------------------------------------------------------- fetch


def test_a_fetch_reserves_once_and_a_second_one_joins_it(small):
    parts = chain(2)
    for part in parts:
        small.catalog.stored(part, LMDB, 0)
    first, fresh = small.catalog.hold_for_fetch(names(parts))
    second, none = small.catalog.hold_for_fetch(names(parts))
    assert first == second
    assert len(fresh) == 2
    assert none == []
    assert small.catalog.resident(first) == 0
    for row in fresh:
        small.catalog.fetched(row, SUM)
    assert small.catalog.resident(first) == 2
    for rows in (*first, *second):
        small.catalog.release_rows(rows)
    assert small.catalog._index.held_rows == 0


def test_a_failed_read_shortens_the_result_and_frees_the_slot(small):
    parts = chain(3)
    for part in parts:
        small.catalog.stored(part, LMDB, 0)
    chunks, fresh = small.catalog.hold_for_fetch(names(parts))
    small.catalog.fetched(fresh[0], SUM)
    small.catalog.fetched(fresh[1], None)
    small.catalog.fetched(fresh[2], SUM)
    assert small.catalog.resident(chunks) == 1
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
    chunks, fresh = small.catalog.hold_for_fetch(names(parts))
    assert len(chunks) == len(fresh) == 4
    for row in fresh:
        small.catalog.fetched(row, None)
    for rows in chunks:
        small.catalog.release_rows(rows)
    assert small.arena.slots_in_use == small.catalog._index.held_rows == 0


# ---------------------------------------------------------------------------------------- shards


def test_a_chunk_is_there_only_when_all_its_parts_are():
    """P7 and H12: a part that one rank lost shortens the prefix for all."""
    fixture = Fixture(16)
    ranks = [PartName(0, shard, 4) for shard in range(4)]
    keys = [bytes([i]) * 32 for i in range(4)]
    chunks = [[record_id(key, rank) for rank in ranks] for key in keys]
    for depth, parts in enumerate(chunks):
        for shard, name in enumerate(parts):
            parent = chunks[depth - 1][shard] if depth else None
            fixture.catalog.stored(Part(name, parent, depth, PART_BYTES), LMDB, 0)
    assert fixture.catalog.match(chunks) == [LMDB] * 4
    lost = fixture.catalog._index.find(chunks[2][1])
    fixture.catalog.lost(lost, LMDB)
    assert fixture.catalog.match(chunks) == [LMDB] * 2
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


def test_clearing_a_tier_takes_all_that_nobody_holds(small):
    parts = chain(4)
    small.save(parts)
    lease = small.catalog.lease(0, names(parts[:1]), 9.0)
    assert len(small.catalog.clear(DRAM)) == 3
    assert small.found(parts) == [DRAM]
    lease.release()
    assert len(small.catalog.clear(DRAM)) == 1
    assert len(small.catalog._index) == 0
