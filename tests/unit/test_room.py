"""Room: what is known of a part, what makes room for it, and who is counted for it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from kvtier.catalog.catalog import Part
from kvtier.catalog.index import DRAM, NO_ROW
from kvtier.catalog.order import Order
from kvtier.catalog.owners import Quota
from kvtier.catalog.shelf import Room
from kvtier.errors import MisuseError
from kvtier.memory.arena import Slot
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SUM, SmallCatalog, chain

PUT_OFF = 8  # chains whose marking waits


def stored(small: SmallCatalog, *parts: Part, charged: int = PART_BYTES) -> None:
    for part in parts:
        small.catalog.stored(part, LMDB, charged)


def owned(small: SmallCatalog, tenant: str, count: int, seed: int) -> list[Part]:
    owner = small.catalog.owner(tenant.encode(), tenant)
    return [part._replace(owner=owner) for part in chain(count, seed)]


def in_dram(small: SmallCatalog, parts: Sequence[Part]) -> int:
    return sum(small.catalog._room.in_dram(row) for row in small.rows(parts))


def left(small: SmallCatalog, tier: int = DRAM) -> list[bytes]:
    """Let all leave a tier that may; return their names."""
    names = []
    for row in small.catalog._room.victims(tier):
        names.append(small.catalog._index.names[row])
        small.catalog._room.leave(row, tier)
    return names


@pytest.fixture
def small():
    fixture = SmallCatalog(4)
    yield fixture
    fixture.close()


# ---- what is known of a part


def test_a_part_is_gone_unless_a_tier_has_it_or_will(small):
    head, below = chain(2)
    (saved,), (filling,), (never,) = chain(1, 1), chain(1, 2), chain(1, 3)
    stored(small, below)
    small.save([saved])
    (slot,) = small.reserve([filling])
    gone = {part: small.catalog.gone(part.name) for part in (head, below, saved, filling, never)}
    assert gone == {head: True, below: False, saved: False, filling: False, never: True}
    assert small.rows([head]) != [NO_ROW]  # it is known as a parent alone
    small.catalog.abort(filling.name, slot)


def test_nothing_is_reserved_under_a_part_that_is_known_as_a_parent_alone(small):
    tail = chain(2)[1]
    stored(small, tail)
    assert small.reserve([tail._replace(name=chain(1, 1)[0].name)]) == []


def test_what_a_slower_tier_has_is_not_reserved_unless_that_is_silent(small):
    (part,) = chain(1)
    stored(small, part)
    assert small.reserve([part]) == []
    small.catalog.silent = lambda: 1 << LMDB
    (slot,) = small.reserve([part])
    assert small.reserve([part]) == []
    small.catalog.abort(part.name, slot)


def test_a_part_that_nobody_knows_is_not_held_in_anothers_place(small):
    (saved,), (never,) = chain(1, 1), chain(1, 2)
    small.save([saved])
    assert small.catalog.hold_for_spill(never.name, LMDB) == NO_ROW
    assert list(small.catalog._index.holds) == [0]


def test_what_is_still_being_filled_cannot_leave(small):
    (part,) = chain(1)
    (slot,) = small.reserve([part])
    small.catalog._room.leave(small.rows([part])[0], DRAM)
    assert small.arena.holds(slot)
    assert small.catalog.commit(part.name, slot, SUM)


def test_a_slot_is_committed_under_the_name_for_which_it_was_reserved(small):
    with pytest.raises(MisuseError, match="not reserved"):
        small.catalog.commit(chain(1)[0].name, Slot(0, PART_BYTES, 1), SUM)
    one, other = chain(1, 1) + chain(1, 2)
    first, second = small.reserve([one]) + small.reserve([other])
    with pytest.raises(MisuseError, match="not reserved"):
        small.catalog.commit(one.name, second, SUM)
    small.catalog.withdraw([one.name], "invalidated")
    with pytest.raises(MisuseError, match="not reserved"):
        small.catalog.commit(other.name, first, SUM)
    assert not small.catalog.commit(one.name, first, SUM)
    assert small.catalog.commit(other.name, second, SUM)
    assert small.arena.slots_in_use == 1


def test_why_a_part_went_is_not_forgotten_when_it_is_withdrawn_after(small):
    (head, tail), gone = chain(2), small.catalog._room.gone
    stored(small, head, tail)
    small.catalog.lost(small.rows([head])[0], LMDB)
    assert gone.why(head.name).reason == "lost"
    small.catalog.withdraw([head.name], "invalidated")
    assert gone.why(head.name).reason == "lost"
    small.catalog.withdraw([tail.name], "invalidated")
    assert gone.why(tail.name)[:2] == ("invalidated", "lmdb")


def test_what_is_withdrawn_while_it_is_saved_was_withdrawn(small):
    (part,) = chain(1)
    (slot,) = small.reserve([part])
    small.catalog.withdraw([part.name], "invalidated")
    assert small.catalog._room.gone.why(part.name)[:2] == ("invalidated", "")
    assert not small.catalog.commit(part.name, slot, SUM)


def test_a_parent_that_is_saved_anew_stays_for_the_child_that_is_still_being_filled(small):
    head, tail = chain(2)
    small.save([head])
    (slot,) = small.reserve([tail])
    small.catalog.withdraw([head.name], "invalidated")
    small.save([head])
    assert small.save(chain(4, 1)) < 4
    assert in_dram(small, [head]) == 1
    assert small.catalog.commit(tail.name, slot, SUM)
    assert set(small.catalog._index.holds) == {0}


# ---- uses


def marked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list of the chains that are marked as used from now on."""
    rows: list[list[int]] = []
    touch = Order.touch
    monkeypatch.setattr(
        Order,
        "touch",
        lambda self, chain, **how: rows.append(list(chain)) or touch(self, chain, **how),
    )
    return rows


def test_a_use_is_marked_after_some_more_or_when_something_has_to_leave(small, monkeypatch):
    parts = chain(2)
    small.save(parts)
    small.catalog._room.settle_touches()
    rows = marked(monkeypatch)
    for _ in range(PUT_OFF):
        small.found(parts)
    assert rows == []
    small.found(parts)
    deepest_first = small.rows(parts)[::-1]
    tiers = 2
    assert rows == [deepest_first] * tiers
    small.found(parts)
    assert len(rows) == 2 * tiers
    next(small.catalog._room.victims(DRAM))
    assert rows == [deepest_first] * tiers * (PUT_OFF + 2)
    next(small.catalog._room.victims(DRAM))
    assert len(rows) == tiers * (PUT_OFF + 2)


def test_what_comes_was_not_used_before(small, monkeypatch):
    """A policy that counts uses would count the one that brought the part twice."""
    parts = chain(2)
    small.save(parts)
    small.found(parts)
    rows = marked(monkeypatch)
    (slot,) = small.reserve(chain(1, 1))
    assert rows == []
    small.catalog.commit(chain(1, 1)[0].name, slot, SUM)
    assert rows[0] == small.rows(parts)[::-1]
    assert not small.catalog._room.behind


def test_a_save_is_no_use_of_what_it_goes_on_from():
    """Where uses are counted: the match before it was that."""
    small = SmallCatalog(4, policy="lfu")
    grown, other = chain(3, 1), chain(1, 2)
    small.save(grown[:1])
    small.found(grown[:1])
    small.save(grown[:2])
    small.save(grown)
    small.save(other)
    small.found(other)
    small.found(other)
    assert small.save(chain(3, 3)) == 3
    assert small.found(grown) == []
    assert small.found(other) == [DRAM]
    small.close()


def test_a_miss_marks_nothing(small, monkeypatch):
    small.save(chain(1))
    rows = marked(monkeypatch)
    for seed in range(2 * PUT_OFF):
        assert small.found(chain(3, 1 + seed)) == []
    assert rows == []


# ---- room


def test_each_part_that_makes_room_is_counted(small):
    small.save(chain(4, 1))
    small.save(chain(3, 2))
    assert small.metrics.get("evicted_parts", tier="dram") == 3


def test_room_for_some_parts_is_one_pass_over_the_order(small, monkeypatch):
    small.save(chain(4, 1))
    asked = []
    victims = Room.victims
    monkeypatch.setattr(
        Room, "victims", lambda self, *which: asked.append(which) or victims(self, *which)
    )
    assert small.save(chain(4, 2)) == 4
    assert asked == [(DRAM, None, 0)]


def test_a_tenant_takes_from_others_up_to_its_ceiling_and_then_from_itself(monkeypatch):
    small = SmallCatalog(8, quotas={"a": Quota(ceiling=0.5)})
    others, mine, more = chain(6, 1), owned(small, "a", 2, 2), owned(small, "a", 4, 3)
    small.save(others)
    small.save(mine)
    asked = []
    victims = Room.victims
    monkeypatch.setattr(
        Room, "victims", lambda self, *which: asked.append(which) or victims(self, *which)
    )
    assert small.save(more) == 4
    assert [in_dram(small, parts) for parts in (others, mine, more)] == [4, 0, 4]
    assert asked == [(DRAM, None, 1), (DRAM, 1, 1)]
    small.close()


def test_a_prompt_that_fills_dram_gives_way_to_its_own_head():
    small = SmallCatalog(2)
    parts = chain(3)
    small.save(parts[:1])
    stored(small, parts[0])
    small.save(parts[1:2])
    small.catalog.lost(small.rows(parts)[0], DRAM)
    stored(small, parts[1])
    assert small.save(parts[2:]) == 1
    chunks, fresh = small.hold_for_fetch(parts)
    assert len(chunks) == 2
    assert fresh == small.rows(parts)[:1]
    small.catalog.fetched(fresh[0], SUM)
    small.catalog.release_rows(row for rows in chunks for row in rows)
    small.close()


def test_the_last_row_is_no_parent_of_what_has_none():
    """The head of a prompt has no parent; that must not keep some other prompt's."""
    small = SmallCatalog(1)
    (wanted,), (head, tail) = chain(1, 1), chain(2)
    stored(small, wanted)
    small.save([head])
    stored(small, tail)
    assert small.rows([tail]) == [len(small.catalog._index.names) - 1]
    chunks, fresh = small.hold_for_fetch([wanted])
    assert len(chunks) == len(fresh) == 1
    small.catalog.fetched(fresh[0], SUM)
    small.catalog.release_rows(fresh)
    small.close()


def test_nor_is_it_kept_when_a_slower_tier_makes_room():
    small = SmallCatalog(1, capacity=2 * PART_BYTES)
    head, other = chain(1, 1) + chain(1, 2)
    stored(small, head, other)
    below = small.rows([head])
    victims = small.evict(LMDB, 2 * PART_BYTES, below=below)
    assert [victim.name for victim in victims] == [head.name, other.name]
    small.close()


class Read(array):
    """A column that counts how often one of its items is read."""

    times = 0

    def __getitem__(self, row):
        self.times += 1
        return super().__getitem__(row)


def test_whoever_looks_for_a_last_copy_goes_up_a_chain_once(small):
    parts = chain(40)
    stored(small, *parts)
    room = small.catalog._room
    room.index.parent = parent = Read("i", room.index.parent)
    assert room.last_copy(small.rows(parts)) == NO_ROW
    assert parent.times == 40


# ---- shares


def test_a_floor_in_a_slower_tier_counts_what_a_part_is_charged_there():
    """Coded, it takes a quarter: one of five is above a floor of four quarters."""
    small = SmallCatalog(1, capacity=8 * PART_BYTES, quotas={"a": Quota(floor=1 / 8)})
    mine = owned(small, "a", 5, 1)
    stored(small, *mine, charged=PART_BYTES // 4)
    assert [victim.name for victim in small.evict(LMDB, 8 * PART_BYTES)] == [mine[4].name]
    small.close()


def test_nobody_without_a_quota_has_a_ceiling():
    small = SmallCatalog(1, capacity=PART_BYTES, quotas={"a": Quota()})
    mine = owned(small, "a", 1, 1)[0].owner
    parts = [(0, 2 * PART_BYTES), (mine, 2 * PART_BYTES)]
    assert small.catalog.over_ceilings(LMDB, parts) == [False, True]
    small.close()


def test_a_namespace_that_is_opened_again_keeps_its_order(small):
    one, other = owned(small, "a", 1, 1), owned(small, "a", 1, 2)
    small.save(one)
    small.save(other)
    small.found(one)
    small.catalog._room.settle_touches()
    assert small.catalog.owner(b"a", "a") == one[0].owner
    assert left(small) == [other[0].name, one[0].name]


def test_what_is_found_to_be_a_tenants_leaves_in_its_turn_and_counts_where_it_is():
    small = SmallCatalog(4, capacity=4 * PART_BYTES, quotas={"a": Quota()})
    owner = small.catalog.owner(b"a")
    (other,), (mine,) = chain(1, 1), chain(1, 2)
    mine = mine._replace(owner=owner, level=1)
    stored(small, other, mine)
    assert small.catalog.owner(b"a", "a") == owner
    assert [shelf.used_by for shelf in small.catalog._shelves] == [
        [0, 0],
        [PART_BYTES, PART_BYTES],
    ]
    assert left(small, LMDB) == [other.name, mine.name]
    small.close()
