"""How little of a tier's order is looked at, however many tenants, orphans and siblings it has."""

from __future__ import annotations

import pytest

from kvtier.catalog.index import DRAM, Index
from kvtier.catalog.order import Order
from kvtier.catalog.owners import Quota
from kvtier.policies.lru import Lru
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SmallCatalog, chain


def owned(small: SmallCatalog, tenant: str, count: int, seed: int = 0):
    """Return a chain of parts of a tenant's namespace."""
    owner = small.catalog.owner(tenant.encode(), tenant)
    return [part._replace(owner=owner) for part in chain(count, seed)]


def test_a_chain_that_is_used_is_looked_for_where_it_may_be(monkeypatch):
    """And not among the parts of each tenant and each priority."""
    tenants = [f"tenant {number}" for number in range(8)]
    small = SmallCatalog(32, quotas={tenant: Quota() for tenant in tenants})
    chains = [owned(small, tenant, 2, seed) for seed, tenant in enumerate(tenants)]
    for parts in chains:
        small.save(parts)
    small.catalog._room.settle_touches()
    touched = []
    touch = Lru.touch
    monkeypatch.setattr(
        Lru, "touch", lambda self, rows: touched.append(list(rows)) or touch(self, rows)
    )
    small.found(chains[3])
    small.catalog._room.settle_touches()
    assert touched == [list(reversed(small.rows(chains[3])))]
    small.close()


def kept_back(monkeypatch: pytest.MonkeyPatch, count: int) -> int:
    """Return how often somebody's right to a part was asked, with `count` orphans of a floor's."""
    small = SmallCatalog(2 * count + 4, quotas={"a": Quota(floor=0.9)})
    head, *tails = owned(small, "a", 2)
    tails += [
        tails[0]._replace(name=part.name) for part in chain(count, 1)
    ]  # siblings, under one head
    small.save([head])
    small.save(tails)
    small.catalog._room.withdraw(small.rows([head])[0])
    assert small.catalog._index.orphans == len(tails)
    asked = []
    may_take = Order._may_take
    with monkeypatch.context() as patched:
        patched.setattr(
            Order,
            "_may_take",
            lambda self, row, share, by: asked.append(row) or may_take(self, row, share, by),
        )
        assert next(small.catalog._room.victims(DRAM), None) is None
    small.close()
    return len(asked)


def test_orphans_that_a_floor_keeps_are_not_gone_through(monkeypatch):
    assert kept_back(monkeypatch, 4) == kept_back(monkeypatch, 40) == 1


def looks_at_siblings(monkeypatch: pytest.MonkeyPatch, count: int) -> int:
    """Let a head of no use and what hangs under it leave DRAM; return how many rows were seen."""
    small = SmallCatalog(count + 1)
    head, tail = chain(2)
    tails = [tail._replace(name=part.name) for part in chain(count, 1)]
    small.save([head, *tails])
    for part in (head, *tails):
        small.catalog.stored(part, LMDB, PART_BYTES)  # so that none is forgotten
    small.catalog.outgrown([head.name])
    seen = []
    children_of = Index.children_of
    with monkeypatch.context() as patched:
        patched.setattr(
            Index,
            "children_of",
            lambda self, row: (seen.append(child) or child for child in children_of(self, row)),
        )
        left = []
        for _ in range(count + 1):
            left.append(next(small.catalog._room.victims(DRAM)))
            small.catalog._room.leave(left[-1], DRAM)
    assert sorted(left[:-1]) == sorted(small.rows(tails))
    assert left[-1:] == small.rows([head])
    small.close()
    return len(seen)


def test_siblings_are_looked_at_once_when_what_they_hang_under_leaves(monkeypatch):
    assert [looks_at_siblings(monkeypatch, count) for count in (4, 40)] == [4, 40]


def leaving(small: SmallCatalog, share: int | None = None) -> list[int]:
    """Take out of DRAM all that may leave; return the rows."""
    rows = []
    for row in small.catalog._room.victims(DRAM, share):
        rows.append(row)
        small.catalog._room.leave(row, DRAM)
    return rows


def test_only_what_is_in_the_tier_leaves_with_what_it_hangs_under():
    small = SmallCatalog(4)
    head, tail = chain(2)
    below = tail._replace(name=chain(1, 1)[0].name)
    small.save([head, tail])
    small.catalog.stored(head, LMDB, PART_BYTES)
    small.catalog.stored(below, LMDB, PART_BYTES)
    small.catalog.outgrown([head.name])
    rows = small.rows([tail, head])
    assert leaving(small) == rows
    small.close()


def test_what_is_held_keeps_what_it_hangs_under_and_is_looked_at_once():
    small = SmallCatalog(4)
    parts = chain(2)
    small.save(parts)
    rows = small.rows(parts)
    lease = small.lease(parts, 9.0)
    small.catalog.outgrown([parts[0].name])
    assert leaving(small) == []
    lease.release()
    assert leaving(small) == rows[::-1]
    small.close()


def test_a_record_that_names_a_strangers_part_as_its_parent_keeps_it_and_no_more():
    """What a durable tier says of itself may lie: each leaves in its own share."""
    small = SmallCatalog(4, quotas={"a": Quota(), "b": Quota()})
    (head,) = owned(small, "a", 1)
    (tail,) = owned(small, "b", 2)[1:]
    small.save([head, tail._replace(parent=head.name)])
    head_row, tail_row = small.rows([head, tail])
    small.catalog.outgrown([head.name])
    mine = small.catalog._room.share(head_row)
    assert leaving(small, mine) == []
    assert leaving(small) == [tail_row, head_row]
    small.close()


# ---- a chain that is used


class Passes(list):
    """A list that counts how often it is gone through."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def passes(*, parked: bool = False, ready: bool = False) -> int:
    """Return how often a chain is gone through that is used, while another had to stay."""
    small = SmallCatalog(4)
    other, parts = chain(1, 1), chain(2)
    small.save(other)
    small.save(parts)
    small.catalog._room.settle_touches()
    if parked or ready:
        lease = small.lease(other, 9.0)
        assert next(small.catalog._room.victims(DRAM)) == small.rows(parts)[1]
        if ready:
            lease.release()
    rows = Passes(small.rows(parts))
    small.catalog._shelves[DRAM].order.touch(rows)
    if parked:
        lease.release()
    small.close()
    return rows.times


def test_a_chain_is_gone_through_once_more_only_where_some_had_to_stay():
    least = passes()
    assert passes(parked=True) == least + 1
    assert passes(ready=True) == least + 1


@pytest.mark.parametrize("why", ["held", "a last copy", "of no use"])
def test_only_what_had_to_stay_or_is_of_no_use_is_moved_back_when_a_chain_is_used(monkeypatch, why):
    small = SmallCatalog(8)
    parts = chain(4)
    small.save(parts)
    small.catalog._room.settle_touches()
    lease = small.lease(parts[3:], 9.0) if why == "held" else None
    if why == "a last copy":
        small.catalog.stored(chain(5)[4], LMDB, PART_BYTES)
    if why == "of no use":
        small.catalog.outgrown([parts[3].name])
    else:
        assert next(small.catalog._room.victims(DRAM), None) is None
        for row in small.rows(parts[:3]):
            small.catalog._shelves[DRAM].order.wake(row)
    asked = []
    for name in ("revive", "_unpark"):
        method = getattr(Order, name)
        monkeypatch.setattr(
            Order,
            name,
            lambda self, row, method=method: asked.append(row) or method(self, row),
        )
    small.catalog._shelves[DRAM].order.touch(small.rows(parts))
    assert asked == small.rows(parts[3:])
    if lease:
        lease.release()
    small.close()
