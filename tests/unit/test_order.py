"""The order in which parts leave a tier: first what is of no use, then by priority and policy."""

from __future__ import annotations

import pytest

from kvtier.catalog.index import DRAM, Index
from kvtier.catalog.order import Order
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SmallCatalog, chain


@pytest.fixture
def small():
    """Room for six parts in DRAM, and for six below."""
    fixture = SmallCatalog(6, capacity=6 * PART_BYTES)
    yield fixture
    fixture.close()


def order(small: SmallCatalog, tier: int = DRAM) -> Order:
    return small.catalog._shelves[tier].order


def leaving(small: SmallCatalog, count: int, tier: int = DRAM) -> list[bytes]:
    """Return the names of those that leave a tier when so many have to."""
    index = small.catalog._index
    names = []
    for row, _ in zip(small.catalog._room.victims(tier), range(count), strict=False):
        names.append(index.names[row])
        small.catalog._room.leave(row, tier)
    return names


def names_of(*parts):
    return [part.name for part in parts]


def test_what_is_oldest_leaves_first(small):
    old, new = chain(1, 1), chain(1, 2)
    small.save(old)
    small.save(new)
    small.found(old)
    assert leaving(small, 2) == names_of(*new, *old)


def test_lower_priorities_leave_before_all_of_a_higher_one(small):
    parts = [chain(1, seed)[0]._replace(level=level) for seed, level in enumerate((0, 5, -3, 0))]
    for part in parts:
        small.save([part])
    assert leaving(small, 4) == names_of(parts[2], parts[0], parts[3], parts[1])


def test_a_head_of_low_priority_waits_for_its_tail_and_then_leaves_at_once(small):
    head, tail = chain(2)
    (other,) = chain(1, 1)
    small.save([head._replace(level=-1)])
    small.save([tail._replace(level=1)])
    small.save([other])
    assert leaving(small, 3) == names_of(other, tail, head)


def test_parts_that_must_stay_are_looked_at_once(small, monkeypatch):
    """However many are held, and however often room is made."""
    parts = chain(5)
    small.save(parts)
    lease = small.lease(parts, 9.0)
    (free,) = chain(1, 1)
    small.save([free])
    looked = []
    leaf = Index.leaf
    monkeypatch.setattr(
        Index, "leaf", lambda self, row, tier: looked.append(row) or leaf(self, row, tier)
    )
    for _ in range(50):
        assert leaving(small, 1) in ([free.name], [])
        small.save([free])
    assert len(looked) <= 5 + 2 * 50
    lease.release()
    assert leaving(small, 6) == names_of(*reversed(parts), free)


def test_a_parked_part_that_is_used_is_as_new_as_any(small):
    old, new = chain(2, 1), chain(1, 2)
    small.save(old)
    small.save(new)
    lease = small.lease(old, 9.0)
    assert leaving(small, 0) == []
    assert next(small.catalog._room.victims(DRAM)) == small.rows(new)[0]
    small.found(new)
    small.found(old)
    lease.release()
    assert leaving(small, 3) == names_of(*new, *reversed(old))


def test_what_hangs_under_an_orphan_leaves_with_it_deepest_first(small):
    (old,) = chain(1, 9)
    parts = chain(4)
    for part in (old, *parts):
        small.catalog.stored(part, LMDB, PART_BYTES)
    small.catalog.lost(small.rows(parts)[0], LMDB)
    assert leaving(small, 4, LMDB) == names_of(parts[3], parts[2], parts[1], old)


def test_a_held_orphan_leaves_as_soon_as_it_may(small):
    parts = chain(2)
    (old,) = chain(1, 9)
    small.save([old])
    small.save(parts)
    lease = small.lease(parts, 9.0)
    small.catalog._room.withdraw(small.rows(parts)[0])
    assert small.catalog._index.orphans == 1
    assert leaving(small, 0) == []
    assert next(small.catalog._room.victims(DRAM)) == small.rows([old])[0]
    lease.release()
    assert leaving(small, 2) == names_of(parts[1], old)


def test_what_was_used_before_it_was_outgrown_leaves_first_all_the_same(small):
    (old,), (outgrown,) = chain(1, 1), chain(1, 2)
    small.save([old])
    small.save([outgrown])
    small.found([outgrown])
    small.catalog.outgrown([outgrown.name])
    assert leaving(small, 2) == names_of(outgrown, old)


def test_every_part_is_in_the_order_once_wherever_it_stands(small):
    parts = chain(6)
    small.save(parts)
    lease = small.lease(parts[:3], 9.0)
    small.catalog._room.withdraw(small.rows(parts)[4])
    next(small.catalog._room.victims(DRAM), None)
    rows = [row for row in small.rows(parts) if row >= 0 and small.catalog._room.in_dram(row)]
    assert sorted(order(small)) == sorted(rows)
    assert len(order(small)) == len(rows) == 5
    lease.release()


def test_without_parking_each_pass_would_look_at_all_that_is_held(small, monkeypatch):
    """The twin: what `parked` is for."""

    def unparked(self, share=None, _by=0):
        return (row for row in list(self) if self._index.leaf(row, self._tier))

    monkeypatch.setattr(Order, "victims", unparked)
    parts = chain(5)
    small.save(parts)
    lease = small.lease(parts, 9.0)
    looked = []
    leaf = Index.leaf
    monkeypatch.setattr(
        Index, "leaf", lambda self, row, tier: looked.append(row) or leaf(self, row, tier)
    )
    for _ in range(50):
        assert leaving(small, 1) == []
    assert len(looked) == 5 * 50
    lease.release()
