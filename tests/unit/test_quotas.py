"""Quotas of tenants: a floor that nobody else takes, a ceiling that is never exceeded."""

from __future__ import annotations

import random

import pytest

from kvtier.catalog.catalog import Catalog
from kvtier.catalog.index import DRAM
from kvtier.catalog.order import Order
from kvtier.catalog.owners import Owners, Quota
from kvtier.catalog.shelf import Room
from kvtier.errors import ConfigError
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SmallCatalog, chain

SLOTS = 8


@pytest.fixture
def cut():
    """Make catalogs with room for eight parts in DRAM, and below it, with quotas."""
    made = []

    def make(below: int = SLOTS, **quotas: Quota) -> SmallCatalog:
        made.append(SmallCatalog(SLOTS, below * PART_BYTES, quotas))
        return made[-1]

    yield make
    for one in made:
        one.close()


def owned(small, tenant, count, seed):
    """Return a chain of parts of a namespace of a tenant."""
    owner = small.catalog.owner(f"{tenant} {seed}".encode(), tenant)
    return [part._replace(owner=owner) for part in chain(count, seed)]


def in_dram(small, parts) -> int:
    return sum(small.catalog._room.in_dram(row) for row in small.rows(parts))


def stored(small, parts) -> None:
    """Put parts into the slower tier only."""
    for part in parts:
        small.catalog.stored(part, LMDB, PART_BYTES)


def below(small, parts) -> int:
    index = small.catalog._index
    return sum(row >= 0 and bool(index.present[row] & 1 << LMDB) for row in small.rows(parts))


# ----------------------------------------------------------------------------------------- floor


@pytest.mark.parametrize(("floor", "kept"), [(0.5, 4), (0.0, 0)])
def test_what_is_below_a_floor_nobody_takes(cut, floor, kept):
    """Without a floor, the twin, it is the oldest and goes first."""
    small = cut(a=Quota(floor=floor))
    mine = owned(small, "a", 4, 1)
    small.save(mine)
    for seed in (2, 3):
        small.save(owned(small, "b", SLOTS, seed))
    assert in_dram(small, mine) == kept


def test_a_part_that_lies_across_the_floor_stays(cut):
    small = cut(a=Quota(floor=0.55))  # 4.4 parts
    mine = owned(small, "a", 5, 1)
    small.save(mine)
    assert small.save(owned(small, "b", SLOTS, 2)) == 3
    assert in_dram(small, mine) == 5


def test_without_looking_at_its_size_that_part_would_be_taken(cut, monkeypatch):
    small = cut(a=Quota(floor=0.55))
    mine = owned(small, "a", 5, 1)
    small.save(mine)
    monkeypatch.setattr(
        Order, "_may_take", lambda self, row, _share, _by: self._spare(self._share(row)) > 0
    )
    small.save(owned(small, "b", SLOTS, 2))
    assert in_dram(small, mine) == 4


def test_a_tenant_gives_its_own_way_when_nobody_has_more_than_its_floor(cut):
    small = cut(a=Quota(floor=0.55), b=Quota(floor=0.45))  # 4.4 and 3.6 parts
    mine, other = owned(small, "a", 4, 1), owned(small, "b", 4, 2)
    small.save(mine)
    small.save(other)
    assert small.save(owned(small, "a", 2, 3)) == 2
    assert in_dram(small, mine) == 2
    assert in_dram(small, other) == 4


def test_the_floor_holds_in_slower_tiers_too(cut):
    small = cut(a=Quota(floor=0.5))
    mine, other = owned(small, "a", 5, 1), owned(small, "b", 3, 2)
    stored(small, mine)
    stored(small, other)
    other_owner = other[0].owner
    small.catalog.evict(LMDB, {other_owner: SLOTS * PART_BYTES})
    assert (below(small, mine), below(small, other)) == (4, 0)


def test_useless_parts_below_a_floor_stay_for_their_tenant_to_take(cut):
    small = cut(a=Quota(floor=0.25))
    mine = owned(small, "a", 3, 1)
    stored(small, mine)
    small.catalog.lost(small.rows(mine)[0], LMDB)  # the others are orphans now
    stored(small, owned(small, "b", 6, 2))
    small.catalog.evict(LMDB, {owned(small, "b", 1, 3)[0].owner: 6 * PART_BYTES})
    assert below(small, mine[1:]) == 2
    victims = small.catalog.evict(LMDB, {mine[0].owner: 8 * PART_BYTES})
    assert victims[0].name == mine[2].name


# --------------------------------------------------------------------------------------- ceiling


def test_a_tenant_at_its_ceiling_takes_from_itself(cut):
    small = cut(a=Quota(ceiling=0.5))
    other = owned(small, "b", 4, 1)
    small.save(other)
    first, second = owned(small, "a", 4, 2), owned(small, "a", 3, 3)
    assert small.save(first) == 4
    assert small.save(second) == 3
    assert in_dram(small, other) == 4
    assert in_dram(small, first) == 1


def test_a_prompt_longer_than_the_ceiling_is_saved_up_to_it_though_dram_is_empty(cut):
    small = cut(a=Quota(ceiling=0.5))
    assert small.save(owned(small, "a", 6, 1)) == 4


def test_without_the_ceiling_it_would_take_all(cut, monkeypatch):
    small = cut(a=Quota(ceiling=0.5))
    monkeypatch.setattr(Room, "over_ceiling", lambda *_: False)
    assert small.save(owned(small, "a", 6, 1)) == 6


def test_a_ceiling_counts_whole_slots(cut):
    """A part of 5000 bytes takes a slot of 8192: four are half of DRAM, not six."""
    small = cut(a=Quota(ceiling=0.5))
    parts = [part._replace(nbytes=5000) for part in owned(small, "a", 6, 1)]
    assert small.save(parts) == 4


def last_copy_and_share(small):
    """Fill DRAM: with a head whose children lie below, all that "a" may have, and what is newer."""
    heads, mine = owned(small, "b", 4, 1), owned(small, "a", 4, 2)
    small.save(heads[:1])
    stored(small, heads[1:])
    small.save(mine)
    small.save(owned(small, "b", 3, 4))
    small.save(owned(small, "b", 1, 5))  # the head's turn came, and it stayed
    return heads, mine


def test_at_its_ceiling_with_all_of_it_held_nothing_of_others_leaves(cut):
    small = cut(a=Quota(ceiling=0.5))
    heads, mine = last_copy_and_share(small)
    lease = small.lease(mine, 9.0)
    assert small.save(owned(small, "a", 1, 3)) == 0
    assert in_dram(small, heads[:1]) == 1
    lease.release()
    assert small.save(owned(small, "a", 1, 3)) == 1


def test_without_that_others_heads_would_go_for_nothing(cut, monkeypatch):
    small = cut(a=Quota(ceiling=0.5))
    heads, mine = last_copy_and_share(small)
    last_copy = Room.last_copy
    monkeypatch.setattr(Room, "last_copy", lambda self, below, *_: last_copy(self, below))
    with small.lease(mine, 9.0):
        assert small.save(owned(small, "a", 1, 3)) == 0
    assert in_dram(small, heads[:1]) == 0
    assert small.catalog._index.orphans == 1


def test_a_slower_tier_gives_way_within_the_share_at_its_ceiling(cut):
    small = cut(a=Quota(ceiling=0.5))
    mine, other = owned(small, "a", 4, 1), owned(small, "b", 2, 2)
    stored(small, other)
    stored(small, mine)
    victims = small.catalog.evict(LMDB, {mine[0].owner: 2 * PART_BYTES})
    assert [victim.name for victim in victims] == [mine[3].name, mine[2].name]
    assert below(small, other) == 2


def test_what_would_be_above_a_ceiling_all_the_same_is_told_part_by_part(cut):
    small = cut(a=Quota(ceiling=0.5))
    mine = owned(small, "a", 3, 1)
    stored(small, mine)
    mine_, other = mine[0].owner, owned(small, "b", 1, 2)[0].owner
    parts = [(mine_, PART_BYTES), (mine_, PART_BYTES), (other, PART_BYTES), (mine_, 1)]
    assert small.catalog.over_ceilings(LMDB, parts) == [False, True, False, True]


# ---------------------------------------------------------------------------------------- owners


def test_two_namespaces_of_one_tenant_share_its_quota(cut):
    small = cut(a=Quota(ceiling=0.5))
    first, second = owned(small, "a", 3, 1), owned(small, "a", 3, 2)
    assert first[0].owner != second[0].owner
    small.save(first)
    assert small.save(second) == 3
    assert in_dram(small, first) == 1


def test_what_reopening_finds_counts_for_its_tenant_once_that_is_known(cut):
    small = cut(a=Quota(floor=0.25, ceiling=0.5))
    parts = chain(3, 1)
    owner = small.catalog.owner(b"found")  # nobody knows whose it is
    parts = [part._replace(owner=owner) for part in parts]
    small.save(parts)
    stored(small, parts)
    shelves = small.catalog._shelves
    assert [shelf.used_by for shelf in shelves] == [[3 * PART_BYTES, 0]] * 2
    assert small.catalog.owner(b"found", "a") == owner
    assert [shelf.used_by for shelf in shelves] == [[0, 3 * PART_BYTES]] * 2
    small.save(owned(small, "b", SLOTS, 2))
    assert in_dram(small, parts) == 2  # its floor holds from now on


def test_an_orphan_that_changes_its_share_still_leaves_first(cut):
    small = cut(a=Quota())
    owner = small.catalog.owner(b"found")
    parts = [part._replace(owner=owner) for part in chain(2, 1)]
    stored(small, parts)
    small.catalog.lost(small.rows(parts)[0], LMDB)
    small.catalog.owner(b"found", "a")
    newer = owned(small, "a", 1, 2)
    small.catalog._room.touch(small.rows(parts[1:]))
    stored(small, newer)
    assert [victim.name for victim in small.evict(LMDB, 7 * PART_BYTES)] == [parts[1].name]


def test_clearing_a_tier_takes_what_floors_keep(cut):
    small = cut(a=Quota(floor=1.0))
    mine = owned(small, "a", 4, 1)
    small.save(mine)
    assert len(small.catalog.clear(DRAM)) == 4


def test_the_gauges_name_the_tenants_that_have_a_quota(cut):
    small = cut(a=Quota(), b=Quota())
    small.save(owned(small, "a", 3, 1))
    small.save(owned(small, "c", 2, 2))
    small.catalog.figures()
    used = {
        (tenant, tier): small.metrics.get("tenant_used_bytes", tenant=tenant, tier=tier)
        for tenant in "ab"
        for tier in ("dram", "lmdb")
    }
    assert used == {
        ("a", "dram"): 3 * PART_BYTES,
        ("a", "lmdb"): 0,
        ("b", "dram"): 0,
        ("b", "lmdb"): 0,
    }


# ------------------------------------------------------------------------------------ at any time


QUOTAS = {"a": Quota(0.3, 0.6), "b": Quota(0.25, 0.45), "c": Quota(0.0, 0.3)}
TENANTS = ("a", "b", "c", "d")


class Crowd:
    """Tenants that save, store, fetch and lease at random in one catalog."""

    def __init__(self, small: SmallCatalog, seed: int) -> None:
        self.small = small
        self.rng = random.Random(seed)
        self.chains = {
            tenant: [owned(small, tenant, 4, number * 10 + turn) for turn in range(3)]
            for number, tenant in enumerate(TENANTS)
        }
        self.leases = []
        self.refused = 0

    def step(self) -> None:
        """Let one tenant do one thing, and check what that did to all of them."""
        rng, small = self.rng, self.small
        tenant = rng.choice(TENANTS)
        parts = rng.choice(self.chains[tenant])[: rng.randint(1, 4)]
        before = self.used()
        getattr(self, rng.choice(("save", "save", "write", "fetch", "lease", "lose")))(parts)
        for tier, used in enumerate(self.used()):
            capacity = small.catalog._shelves[tier].capacity
            for other, quota in QUOTAS.items():
                assert used[other] <= quota.ceiling * capacity
                if other != tenant and used[other] < before[tier][other]:
                    assert used[other] >= int(quota.floor * capacity)

    def used(self) -> list[dict[str, int]]:
        room = self.small.catalog._room
        found = []
        for tier, shelf in enumerate(room.shelves):
            counts = [0] * len(shelf.used_by)
            for row in room.index.rows.values():
                size = room.index.slot(row).nbytes if room.index.serial[row] else 0
                counts[room.share(row)] += size if tier == DRAM else room.index.charged[tier][row]
            assert counts == shelf.used_by
            found.append(dict(zip(room.owners.tenants, counts, strict=True)))
        return found

    def save(self, parts) -> None:
        self.refused += self.small.save(parts) < len(parts)

    def write(self, parts) -> None:
        """Write down what DRAM has of the parts, as a spill does."""
        catalog = self.small.catalog
        rows = [row for row in self.small.rows(parts) if catalog._room.in_dram(row)]
        owner = parts[0].owner
        catalog.evict(LMDB, {owner: len(rows) * PART_BYTES}, below=rows)
        for row in rows:
            part = catalog.describe(row).part
            fits = catalog.spare(LMDB) >= PART_BYTES
            if fits and not any(catalog.over_ceilings(LMDB, [(owner, PART_BYTES)])):
                catalog.stored(part, LMDB, PART_BYTES)

    def fetch(self, parts) -> None:
        chunks, fresh = self.small.hold_for_fetch(parts)
        for row in fresh:
            self.small.catalog.fetched(row, bytes(16) if self.rng.random() < 0.8 else None)
        self.small.catalog.release_rows([row for rows in chunks for row in rows])

    def lease(self, parts) -> None:
        if len(self.leases) > 1:
            self.leases.pop(0).release()
        lease = self.small.lease(parts, 9.0, whole=False)
        if lease is not None:
            self.leases.append(lease)

    def lose(self, parts) -> None:
        row = self.rng.choice(self.small.rows(parts))
        if row >= 0 and self.small.catalog._index.present[row] & 1 << LMDB:
            self.small.catalog.lost(row, LMDB)


def crowd(cut, seed: int, steps: int = 400) -> Crowd:
    found = Crowd(cut(5, **QUOTAS), seed)
    for _ in range(steps):
        found.step()
    return found


@pytest.mark.parametrize("seed", range(10))
def test_floors_and_ceilings_hold_at_every_moment(cut, seed):
    assert crowd(cut, seed).refused


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Order, "_may_take", lambda self, row, share, _by: share in (None, self._share(row))),
        (Room, "over_ceiling", lambda *_: False),
        (Catalog, "over_ceilings", lambda _self, _tier, parts: [False for _ in parts]),
    ],
)
def test_without_a_guard_a_crowd_breaks_them(cut, monkeypatch, owner, name, broken):
    monkeypatch.setattr(owner, name, broken)

    def crowds() -> None:
        for seed in range(10):
            crowd(cut, seed)

    with pytest.raises(AssertionError):
        crowds()


# ----------------------------------------------------------------------------------------- words


def test_floors_above_the_whole_are_refused_with_their_tenants():
    with pytest.raises(ConfigError, match=r"tenants 'a', 'c' add up to 120%.*lower some"):
        Owners({"a": Quota(0.7), "b": Quota(), "c": Quota(0.5)})
    Owners({name: Quota(0.1) for name in "abcdefghij"})  # 1.0, whatever the rounding


@pytest.mark.parametrize(("floor", "ceiling"), [(-0.1, 1), (0.5, 0.4), (0, 1.1), (float("nan"), 1)])
def test_a_quota_that_makes_no_sense_is_refused(floor, ceiling):
    with pytest.raises(ConfigError, match="0 <= floor <= ceiling <= 1"):
        Quota(floor, ceiling)
