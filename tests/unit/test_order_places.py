"""Where a part stands in the order of a tier after what has happened to it, to its parent, or to
what hangs under it."""

from __future__ import annotations

import pytest

from kvtier.catalog.index import DRAM
from kvtier.catalog.order import Order
from kvtier.catalog.owners import Quota
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SUM, SmallCatalog, chain


@pytest.fixture
def small():
    """Room for six parts in DRAM, and for six below."""
    fixture = SmallCatalog(6, capacity=6 * PART_BYTES)
    yield fixture
    fixture.close()


def order(small: SmallCatalog, tier: int = DRAM) -> Order:
    return small.catalog._shelves[tier].order


def leaving(small: SmallCatalog, tier: int = DRAM) -> list[bytes]:
    """Let all leave a tier that may; return their names."""
    names = []
    for row in small.catalog._room.victims(tier):
        names.append(small.catalog._index.names[row])
        small.catalog._room.leave(row, tier)
    return names


def named(*parts) -> list[bytes]:
    return [part.name for part in parts]


def first(small: SmallCatalog, tier: int = DRAM) -> int:
    """Return the row that would leave a tier first; those before it that may not are parked."""
    return next(small.catalog._room.victims(tier))


def stored(small: SmallCatalog, *parts) -> None:
    for part in parts:
        small.catalog.stored(part, LMDB, PART_BYTES)


def mark(small: SmallCatalog, parts) -> None:
    """Use parts, and have that marked at once."""
    small.found(parts)
    small.catalog._room.settle_touches()


# ---- of no use


def test_what_was_outgrown_last_leaves_first_and_is_listed_so(small):
    (one,), (other,) = chain(1, 1), chain(1, 2)
    small.save([one])
    small.save([other])
    small.catalog.outgrown([one.name])
    small.catalog.outgrown([other.name])
    assert list(order(small)) == small.rows([other, one])
    assert leaving(small) == named(other, one)


def test_what_is_used_again_leaves_in_its_turn_again(small):
    (outgrown,), (other,) = chain(1, 1), chain(1, 2)
    small.save([other])
    small.save([outgrown])
    small.catalog.outgrown([outgrown.name])
    assert first(small) == small.rows([outgrown])[0]
    mark(small, [outgrown])
    assert leaving(small) == named(other, outgrown)


def test_an_orphan_that_is_used_still_leaves_first(small):
    (old,) = chain(1, 9)
    parts = chain(2)
    stored(small, old, *parts)
    small.catalog.lost(small.rows(parts)[0], LMDB)
    order(small, LMDB).touch(small.rows(parts)[1:])
    assert leaving(small, LMDB) == named(parts[1], old)


def test_what_is_of_no_use_in_one_tier_is_of_none_in_the_next(small):
    (old,), (outgrown,) = chain(1, 1), chain(1, 2)
    small.save([old])
    small.save([outgrown])
    small.catalog.outgrown([outgrown.name])
    stored(small, old, outgrown)
    assert leaving(small, LMDB) == named(outgrown, old)


def test_an_orphan_that_a_tier_is_found_to_have_leaves_first(small):
    (old,), (orphan,) = chain(1, 9), chain(2)[1:]
    stored(small, old, orphan)
    assert leaving(small, LMDB) == named(orphan, old)


def test_all_that_hangs_under_a_part_that_returns_leaves_in_its_turn_again(small):
    parts, (old,) = chain(4), chain(1, 9)
    stored(small, old, *parts)
    small.catalog.lost(small.rows(parts)[0], LMDB)
    assert first(small, LMDB) == small.rows(parts)[3]  # those above it are to follow it
    stored(small, parts[0])
    assert leaving(small, LMDB) == named(old, *reversed(parts))


def test_what_was_outgrown_stays_so_when_its_parent_comes_into_another_tier(small):
    (old,) = chain(1, 9)
    head, tail = chain(2)
    small.save([old])
    small.save([head, tail])
    small.catalog.outgrown([tail.name])
    stored(small, head)
    assert first(small) == small.rows([tail])[0]


# ---- priorities


def test_lower_priorities_are_listed_first_whichever_came_first(small):
    high, low = chain(1, 1)[0]._replace(level=2), chain(1, 2)[0]._replace(level=1)
    small.save([high])
    small.save([low])
    rows = small.rows([low, high])
    assert list(order(small).useful()) == rows
    assert list(order(small)) == rows


@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
def test_an_orphan_of_a_high_priority_leaves_before_all_others(small, held):
    old = chain(1, 9)[0]._replace(level=-1)
    parts = [part._replace(level=1) for part in chain(2)]
    small.save([old])
    small.save(parts)
    lease = small.lease(parts, 9.0)
    small.catalog._room.withdraw(small.rows(parts)[0])
    if held:
        assert first(small) == small.rows([old])[0]
    lease.release()
    assert leaving(small) == named(parts[1], old)


def test_an_orphan_that_is_given_a_priority_still_leaves_first(small):
    (old,) = chain(1, 9)
    parts = chain(2)
    stored(small, old, *parts)
    small.catalog.lost(small.rows(parts)[0], LMDB)
    small.reserve([parts[1]._replace(level=5)])
    assert leaving(small, LMDB) == named(parts[1], old)


def test_what_is_given_a_priority_leaves_by_it_and_not_first(small):
    one, other, last = (chain(1, seed)[0] for seed in (1, 2, 3))
    for part in (one, other, last):
        small.save([part])
    small.catalog._room.settle_touches()
    small.reserve([one._replace(level=5)])
    small.reserve([other._replace(level=3)])
    assert leaving(small) == named(last, other, one)


# ---- what has to stay


def test_a_part_that_is_used_while_it_is_held_is_as_new_as_any(small):
    (old,), (new,) = chain(1, 1), chain(1, 2)
    small.save([old])
    small.save([new])
    lease = small.lease([old], 9.0)
    assert first(small) == small.rows([new])[0]
    mark(small, [new])
    mark(small, [old])
    lease.release()
    assert leaving(small) == named(new, old)


def test_what_had_to_stay_leaves_in_its_turn_afterwards(small):
    """Also with a part in mind that is in no tier: it is not the head's parent."""
    head, low = chain(1, 1)[0]._replace(level=1), chain(1, 2)[0]
    small.save([head])
    small.save([low])
    stored(small, chain(2, 3)[1])
    assert not small.catalog._index.present[-1]
    lease = small.lease([head], 9.0)
    for _ in small.catalog._room.victims(DRAM):
        small.catalog._room.leave(small.rows([low])[0], DRAM)
    small.save([low])
    lease.release()
    assert leaving(small) == named(low, head)


def test_a_last_copy_that_is_used_is_as_new_as_any(small):
    head, tail = chain(2)
    (new,) = chain(1, 2)
    small.save([head])
    small.save([new])
    stored(small, tail)
    assert first(small) == small.rows([new])[0]
    mark(small, [new])
    mark(small, [head])
    stored(small, head)
    assert leaving(small) == named(new, head)


def last_copy(small: SmallCatalog, *, below: int = 1):
    """Fill DRAM with a chain of which what follows lies below, all of it looked at once."""
    parts = chain(6 + below)
    small.save(parts[:6])
    stored(small, *parts[6:])
    assert next(small.catalog._room.victims(DRAM), None) is None
    return parts


def test_a_last_copy_that_is_held_does_not_leave(small):
    parts = last_copy(small)
    lease = small.lease(parts[:6], 9.0)
    assert small.save(chain(1, 9)) == 0
    assert small.found(parts) == [DRAM] * 6 + [LMDB]
    lease.release()
    assert small.save(chain(1, 9)) == 1
    assert small.found(parts) == [DRAM] * 5


def test_a_last_copy_does_not_leave_while_what_hangs_under_it_is_in_dram():
    small = SmallCatalog(3)
    head, tail = chain(2)
    (other,) = chain(1, 1)
    small.save([head])
    stored(small, tail)
    assert next(small.catalog._room.victims(DRAM), None) is None  # the head is a last copy
    held, fresh = small.hold_for_fetch([head, tail])
    for row in fresh:
        small.catalog.fetched(row, SUM)
    small.catalog.release_rows(held[0])
    small.save([other])
    lease = small.lease([other], 9.0)
    assert small.save(chain(1, 2)) == 0
    assert small.found([head, tail]) == [DRAM] * 2
    lease.release()
    small.catalog.release_rows(held[1])
    small.close()


def test_what_is_held_is_not_among_those_that_a_last_copy_is_looked_for_in(small):
    held, parts, below = chain(2, 1), chain(2, 2), chain(3, 3)
    small.save(held)
    small.save(parts)
    small.save(below[:1])
    stored(small, *below[1:2])
    lease = small.lease(held, 9.0), small.lease(parts[1:], 9.0)
    assert next(small.catalog._room.victims(DRAM), None) is None
    assert list(order(small)._stuck) == small.rows(below[:1])
    for one in lease:
        one.release()


# ---- shares


def test_room_in_one_share_is_made_without_a_look_at_others(monkeypatch):
    small = SmallCatalog(8, quotas={"a": Quota(), "b": Quota()})
    index = small.catalog._index
    mine, others = [
        [part._replace(owner=small.catalog.owner(tenant.encode(), tenant)) for part in chain(3)]
        for tenant in ("a", "b")
    ]
    others = [
        part._replace(name=other.name) for part, other in zip(others, chain(3, 2), strict=True)
    ]
    small.save([part._replace(parent=None, depth=0) for part in others])
    small.save(mine)
    looked = []
    leaf = index.leaf
    monkeypatch.setattr(index, "leaf", lambda row, tier: looked.append(row) or leaf(row, tier))
    share = small.catalog._room.share(small.rows(mine)[0])
    left = []
    for row in small.catalog._room.victims(DRAM, share):
        left.append(row)
        small.catalog._room.leave(row, DRAM)
    assert set(looked) == set(left)
    assert len(left) == 3
    small.close()
