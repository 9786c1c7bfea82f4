"""The Catalog against plain dicts: long walks of calls, after each of which all is recounted."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvtier.catalog.below import Part
from kvtier.catalog.catalog import Catalog, Shelf
from kvtier.catalog.index import DRAM, NO_ROW
from kvtier.catalog.owners import Quota
from kvtier.memory.arena import Arena
from kvtier.metrics import Metrics
from kvtier.policies.door import load_policy
from kvtier.testing.hands import Hands
from kvtier.testing.small_catalog import PART_BYTES, SHAPE, SUM, chain, names

SLOTS = 12
STEPS = 150
QUOTAS = {"a": Quota(0.2, 0.5), "b": Quota(0.1, 0.75)}
TENANTS = ("a", "b", "none")
MID, LOW = 1, 2


class Walk:
    """One walk. It knows every hold that it took, and so how many each row must have."""

    def __init__(self, seed: int, policy: str = "lru") -> None:
        self.rng = random.Random(f"{seed}/walk")
        self.clock, self.metrics = Hands(), Metrics()
        self.arena = Arena(SLOTS * PART_BYTES, [PART_BYTES])
        shelves = [
            Shelf("dram", load_policy(policy), SLOTS * PART_BYTES),
            Shelf("mid", load_policy(policy), 10 * PART_BYTES),
            Shelf("low", load_policy(policy), None),
        ]
        self.catalog = Catalog(self.arena, shelves, self.clock, self.metrics, QUOTAS)
        self.index, self.room = self.catalog._index, self.catalog._room
        self.owners = [self.catalog.owner(tenant.encode() * 32, tenant) for tenant in TENANTS]
        self.prompts = [self.prompt(number) for number in range(6)]
        self.reserved: list = []
        self.reading: list = []
        self.fetches: list = []
        self.spills: list = []
        self.leases: list = []
        self.evicted: Counter[str] = Counter()
        self.floors = True
        leave = self.room.leave

        def watched(row: int, tier: int, *why: str) -> None:
            self.expect_may_leave(row, tier)
            leave(row, tier, *why)

        self.room.leave = watched

    def prompt(self, number: int) -> list[Part]:
        owner, level = self.rng.choice(self.owners), self.rng.choice((0, 0, 1))
        parts = [one._replace(owner=owner, level=level) for one in chain(7, number // 2)]
        branch = [
            one._replace(owner=owner, level=level, name=one.name[:-1] + b"\1") for one in parts[4:]
        ]
        if number % 2 == 0:
            return parts
        fork = [
            one._replace(parent=above.name) for one, above in zip(branch[1:], branch, strict=False)
        ]
        return [*parts[:4], branch[0], *fork]

    # ---- what it does

    def step(self) -> None:
        action = self.rng.choice(
            (self.save, self.save, self.commit, self.commit, self.abort, self.spill, self.spill,
             self.stored, self.stored, self.lose, self.lease, self.end_lease, self.issue,
             self.settle, self.match, self.fetch, self.fetch, self.fetched, self.fetched,
             self.release, self.clear, self.withdraw, self.outgrow, self.move)
        )  # fmt: skip
        action()
        self.recount()

    def head(self) -> list[Part]:
        prompt = self.rng.choice(self.prompts)
        return prompt[: self.rng.randint(1, len(prompt))]

    def pick(self, rows: list) -> list:
        return [rows.pop(self.rng.randrange(len(rows)))] if rows else []

    def present(self, tier: int) -> list[int]:
        return [row for row in self.index.rows.values() if self.index.present[row] >> tier & 1]

    def save(self) -> None:
        parts = self.head()
        known = [self.known(part.name) for part in parts]
        taken, missing = self.catalog.reserve([[part] for part in parts])
        self.reserved += [(part, slot, self.index.find(part.name)) for part, slot in taken]
        assert len(taken) + missing == known.count(False)
        wanted = [part for part, there in zip(parts, known, strict=True) if not there]
        assert [part for part, _ in taken] == wanted[: len(taken)]

    def commit(self) -> None:
        for part, slot, row in self.pick(self.reserved):
            above = self.index.parent[row]
            headless = above != NO_ROW and not self.index.present[above]
            void = slot.serial in self.room.withdrawn
            assert self.catalog.commit(part.name, slot, SUM) is not (headless or void)

    def abort(self) -> None:
        for part, slot, _ in self.pick(self.reserved):
            self.catalog.abort(part.name, slot)

    def spill(self) -> None:
        part, tier = self.rng.choice(self.head()), self.rng.choice((MID, LOW))
        missing = self.catalog.missing_chain(part.name, tier, ())
        for name in reversed(missing):
            row = self.catalog.hold_for_spill(name, tier)
            described = self.catalog.describe(row)
            assert described.part.name == name
            assert described.slot == self.index.slot(row)
            self.spills.append((row, tier))

    def stored(self) -> None:
        for row, tier in self.pick(self.spills):
            self.make_room(tier, row)
            shelf = self.room.shelves[tier]
            room = shelf.capacity is None or shelf.used + PART_BYTES <= shelf.capacity
            if room:
                self.catalog.written(row, tier, PART_BYTES)
            self.catalog.release_rows((row,))

    def make_room(self, tier: int, row: int) -> None:
        at_least = self.rng.choice((0, 0, 0, 2))
        shelf = self.room.shelves[tier]
        before = shelf.used
        owner = self.index.owner[row]
        victims = self.catalog.evict(tier, {owner: PART_BYTES}, at_least=at_least, below=(row,))
        assert before - shelf.used == sum(victim.charged for victim in victims)
        self.evicted[shelf.name] += len(victims)
        if len(victims) < at_least:
            assert not self.may_leave(tier, keep=row)

    def lose(self) -> None:
        tier = self.rng.choice((MID, LOW))
        for row in self.pick(self.present(tier)):
            self.catalog.lost(row, tier)
            assert not self.index.present[row] >> tier & 1

    def match(self) -> None:
        parts = self.head()
        found = self.catalog.match(names(parts), SHAPE, len(parts) * SHAPE.chunk_tokens)
        tiers = []
        for part in parts:
            bits = self.bits(part.name)
            if not bits:
                break
            tiers.append(min(tier for tier in range(3) if bits >> tier & 1))
        assert found.tiers == tiers
        assert found.tokens == len(tiers) * SHAPE.chunk_tokens

    def lease(self) -> None:
        parts = self.head()
        whole = self.rng.random() < 0.5
        there = 0
        while there < len(parts) and self.bits(parts[there].name) & 1:
            there += 1
        tokens = len(parts) * SHAPE.chunk_tokens
        seconds = self.rng.choice((1.0, 50.0))
        lease = self.catalog.lease(names(parts), SHAPE, 0, tokens, seconds, whole=whole)
        if whole and there < len(parts):
            there = 0
        assert (lease.chunks if lease else 0) == there
        if lease:
            self.leases.append(lease)

    def end_lease(self) -> None:
        self.clock.now += self.rng.choice((0.0, 0.7))
        for lease in self.pick(self.leases):
            if lease.held:
                lease.release()
            if lease.plans:
                self.leases.append(lease)
        self.expire()

    def expire(self) -> None:
        left = self.catalog.expire()
        now = self.clock.now
        assert all(lease.held == (lease.deadline > now) for lease in self.leases if lease.held)
        self.leases = [lease for lease in self.leases if lease.held or lease.plans]
        assert left == len(self.leases)

    def issue(self) -> None:
        for lease in self.leases[-1:]:
            in_time = lease.held and lease.deadline > self.clock.now
            assert self.catalog.issue(lease, self.index.owner[lease.rows[0]]) is in_time
        self.expire()

    def settle(self) -> None:
        for lease in [lease for lease in self.leases if lease.plans][:1]:
            self.catalog.settle(lease)
        self.expire()

    def fetch(self) -> None:
        parts = self.head()
        owner = parts[0].owner
        before = {part.name: self.bits(part.name) for part in parts}
        chunks, fresh = self.catalog.hold_for_fetch(
            names(parts), SHAPE, 0, len(parts) * SHAPE.chunk_tokens, owner
        )
        assert all(before[self.index.names[row]] for rows in chunks for row in rows)
        assert not any(before[self.index.names[row]] & 1 for row in fresh)
        self.reading += fresh
        self.fetches += [row for rows in chunks for row in rows]

    def fetched(self) -> None:
        for row in self.pick(self.reading):
            good, void = self.rng.random() < 0.8, self.index.serial[row] in self.room.withdrawn
            self.index.hold(row, 1)  # so that it can be looked at afterwards
            self.catalog.fetched(row, SUM if good else None)
            assert bool(self.index.present[row] & 1) == (good and not void)
            self.catalog.release_rows((row,))

    def release(self) -> None:
        for row in self.pick(self.fetches):
            self.catalog.release_rows((row,))

    def clear(self) -> None:
        if self.rng.random() < 0.3:
            tier = self.rng.randrange(3)
            self.catalog.clear(tier)
            assert not self.may_leave(tier)

    def withdraw(self) -> None:
        if self.index.rows and self.rng.random() < 0.5:
            row = self.rng.choice(list(self.index.rows.values()))
            self.room.withdraw(row)
            assert not self.index.present[row]

    def outgrow(self) -> None:
        if self.rng.random() < 0.3:
            self.catalog.outgrown([self.rng.choice(self.head()).name])

    def move(self) -> None:
        """Count what an owner has in another share."""
        if self.rng.random() < 0.1:
            number = self.rng.randrange(3)
            self.catalog.owner(TENANTS[number].encode() * 32, self.rng.choice(TENANTS))
            self.floors = False

    # ---- what must hold

    def bits(self, name: bytes) -> int:
        row = self.index.find(name)
        return 0 if row == NO_ROW else self.index.present[row]

    def known(self, name: bytes) -> bool:
        row = self.index.find(name)
        return row != NO_ROW and bool(self.index.present[row] or self.index.serial[row])

    def may_leave(self, tier: int, keep: int = NO_ROW) -> list[int]:
        """Rows that nothing keeps in a tier, of shares that anybody may take from."""
        kept = self.index.parent[keep] if keep != NO_ROW else NO_ROW
        rows = [row for row in self.present(tier) if self.free(row, tier) and row != kept]
        return [row for row in rows if self.spare(row, tier) > 0 or not self.room.share(row)]

    def free(self, row: int, tier: int) -> bool:
        index = self.index
        below = [child for child in index.rows.values() if index.parent[child] == row]
        if index.holds[row] or any(index.present[child] >> tier & 1 for child in below):
            return False
        return index.present[row] != 1 << tier or not any(index.present[c] for c in below)

    def spare(self, row: int, tier: int) -> int:
        share, shelf = self.room.share(row), self.room.shelves[tier]
        return shelf.used_by[share] - int(
            self.room.owners.quotas[share].floor * (shelf.capacity or 0)
        )

    def expect_may_leave(self, row: int, tier: int) -> None:
        """What leaves is free to, or it was lost, or it is the last copy where all else is held."""
        if self.free(row, tier) or tier != DRAM:
            return
        assert not self.index.holds[row]
        assert not any(
            self.free(other, DRAM)
            for other in self.present(DRAM)
            if other != row and self.room.share(other) == 0
        )

    def recount(self) -> None:
        index, room = self.index, self.room
        nameless = [one for row in room.withdrawn.values() for one in index.line(row)]
        rows = list(dict.fromkeys((*index.rows.values(), *nameless)))
        holds: Counter[int] = Counter()
        for lease in self.catalog._leases._all.values():
            holds.update(lease.rows)
        filling = [row for _, _, row in self.reserved] + self.reading
        holds.update(filling)
        holds.update(index.parent[row] for row in filling if index.parent[row] != NO_ROW)
        holds.update(self.fetches)
        holds.update(row for row, _ in self.spills)
        assert {row: index.holds[row] for row in rows if index.holds[row]} == +holds
        assert index.held_rows == len(+holds)
        slots = {row for row in rows if index.serial[row]}
        assert slots == {r for r in rows if index.present[r] & 1} | set(filling) | set(
            room.withdrawn.values()
        )
        assert self.arena.slots_in_use == len(slots)
        assert all(self.arena.holds(index.slot(row)) for row in slots)
        assert all(index.names[row] == name for name, row in index.rows.items())
        for row in rows:
            needed = index.present[row] or index.holds[row] or index.serial[row]
            assert needed or any(index.parent[child] == row for child in rows)
            assert sorted(index.children_of(row)) == sorted(
                c for c in rows if index.parent[c] == row
            )
            assert index.children[row] == sum(
                bool(index.present[c]) for c in index.children_of(row)
            )
        orphans = [row for row in rows if index.present[row] and self.headless(row)]
        assert index.orphans == len(orphans)
        for tier in range(3):
            self.recount_tier(tier, slots)

    def headless(self, row: int) -> bool:
        above = self.index.parent[row]
        return above != NO_ROW and not self.index.present[above]

    def recount_tier(self, tier: int, slots: set[int]) -> None:
        index, shelf = self.index, self.room.shelves[tier]
        here, order = self.present(tier), shelf.order
        assert sorted(order) == sorted(here)
        assert len(order) == len(here)
        for row in index.rows.values():
            kids = [child for child in index.children_of(row) if index.present[child] >> tier & 1]
            assert index.kids[tier][row] == len(kids)
            assert bool(index.parked[row] >> tier & 1) == (
                row in order._parked or row in order._stuck
            )
        for row in (*order._parked, *order._stuck):
            assert not self.free(row, tier)  # it is looked at again as soon as it may leave
        used: Counter[int] = Counter()
        for row in slots if tier == DRAM else here:
            charged = PART_BYTES if tier == DRAM else index.charged[tier][row]
            used[self.room.share(row)] += charged
        assert shelf.used_by == [used[share] for share in range(3)]
        if tier != DRAM:
            assert shelf.used == sum(used.values())
            assert shelf.capacity is None or shelf.used <= shelf.capacity
            assert self.metrics.get("evicted_parts", tier=shelf.name) == self.evicted[shelf.name]
        if self.floors and shelf.capacity:
            for share, quota in enumerate(self.room.owners.quotas):
                assert used[share] <= max(quota.ceiling * shelf.capacity, 0)

    def rest(self) -> None:
        """Give everything back; all can leave then, and nothing is left."""
        while self.reserved or self.reading or self.fetches or self.spills:
            for action in (self.abort, self.fetched, self.release, self.stored):
                action()
        self.clock.now += 100
        self.catalog.expire()
        for lease in list(self.catalog._leases._all.values()):
            while lease.plans:
                self.catalog.settle(lease)
        self.leases.clear()
        self.recount()
        for _ in range(20):
            for tier in (DRAM, MID, LOW):
                while self.catalog.clear(tier):
                    pass
        self.index_is_empty()

    def index_is_empty(self) -> None:
        assert len(self.index) == 0
        assert self.arena.slots_in_use == 0
        assert self.index.orphans == self.index.held_rows == 0
        self.arena.close()


@pytest.mark.parametrize("seed", range(12))
def test_a_long_walk_leaves_everything_in_its_place(seed):
    walk = Walk(seed)
    for _ in range(STEPS):
        walk.step()
    walk.rest()


@pytest.mark.parametrize("policy", ["arc", "lfu", "s3fifo"])
@pytest.mark.parametrize("seed", range(3))
def test_so_does_a_walk_under_another_policy(policy, seed):
    walk = Walk(seed, policy)
    for _ in range(STEPS):
        walk.step()
    walk.rest()
