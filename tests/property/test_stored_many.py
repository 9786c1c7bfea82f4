"""Taking in at once all that a tier has ends where one by one, heads first, does."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.catalog import filling, index
from kvtier.catalog.catalog import Catalog, Part, Parts, Shelf
from kvtier.catalog.filling import Parts as Columns
from kvtier.catalog.index import Index
from kvtier.catalog.owners import Quota
from kvtier.identity.record import RECORD_ID_BYTES, PartName, record_id
from kvtier.memory.arena import Arena
from kvtier.metrics import Metrics
from kvtier.policies.lru import Lru
from kvtier.policies.s3fifo import S3Fifo
from kvtier.testing.hands import Hands
from kvtier.testing.small_catalog import PART_BYTES

MID, LOW = 1, 2
QUOTAS = {"a": Quota(0.2, 0.5), "b": Quota(0.1, 0.75)}
NO_PARENT = bytes(RECORD_ID_BYTES)
Node = tuple[int, int, int, int]
"""How far before a part its parent was made, 0 for none; by how much its depth is wrong; its owner;
its bytes."""

NODES = st.tuples(
    st.integers(0, 5), st.sampled_from((0, 0, 0, 0, 1)), st.integers(0, 3), st.integers(1, 3)
)
FORESTS = st.tuples(
    st.lists(NODES, max_size=24),
    st.randoms(use_true_random=False),
    st.sampled_from((0, 0, 1, 3)),  # parts that the tier has lost
    st.booleans(),  # whether parts are in the order in which they were made
)


def forest(nodes: Sequence[Node], choose: Any, lost: int, in_order: bool) -> list[Part]:
    parts: list[Part] = []
    for number, (back, wrong, owner, size) in enumerate(nodes):
        name = record_id(number.to_bytes(2, "big") * 16, PartName())
        above = parts[number - back] if 0 < back <= number else None
        depth = (above.depth + 1 if above else 0) + wrong
        parts.append(Part(name, above.name if above else None, depth, size * PART_BYTES, owner))
    for _ in range(min(lost, len(parts))):
        del parts[choose.randrange(len(parts))]
    if not in_order:
        choose.shuffle(parts)
    return parts


@contextmanager
def catalog(policy: Any = Lru.together) -> Iterator[Catalog]:
    arena = Arena(4 * PART_BYTES, [PART_BYTES])
    shelves = [
        Shelf("dram", policy(), arena.nbytes),
        Shelf("mid", policy(), 10 * PART_BYTES),
        Shelf("low", policy(), None),
    ]
    made = Catalog(arena, shelves, Hands(), Metrics(), QUOTAS)
    for tenant in ("a", "b", "none"):
        made.owner(tenant.encode() * 32, tenant)
    yield made
    arena.close()


def charged(part: Part) -> int:
    return part.nbytes + 7


def columns(parts: Sequence[Part]) -> Columns:
    return Parts(
        [part.name for part in parts],
        b"".join(part.parent or NO_PARENT for part in parts),
        np.array([part.depth for part in parts], np.int32),
        np.array([part.nbytes for part in parts], np.int64),
        np.array([part.owner for part in parts], np.uint16),
        np.array([charged(part) for part in parts], np.int64),
    )


def heads_first(parts: Sequence[Part]) -> list[Part]:
    """Sort parts behind their ancestors; last those whose line to a first chunk is not there."""
    place = {part.name: at for at, part in enumerate(parts)}

    def key(part: Part) -> tuple[bool, int, int]:
        turn, here = place[part.name], part
        while here.parent is not None:
            above = parts[place[here.parent]] if here.parent in place else None
            if above is None or above.depth != here.depth - 1:
                return True, place[part.name], 0
            turn, here = max(turn, place[above.name]), above
        return False, turn, part.depth

    return sorted(parts, key=key)


def state(one: Catalog) -> dict[str, Any]:
    """Return all that a catalog knows of parts, as it lies there."""
    found: dict[str, Any] = {"rows": list(one._index.rows.items())}
    for name, value in vars(one._index).items():
        if name != "freed":
            found[name] = [list(each) for each in value] if name in ("kids", "charged") else value
    for shelf in one._shelves:
        order = shelf.order
        found[shelf.name] = (shelf.used, shelf.used_by, len(order), list(order))
        first = {share: list(stack) for share, stack in order._first.items() if stack}
        found[f"{shelf.name} first"] = first
        for key, queue in order._queues.items():
            found[f"{shelf.name} {key}"] = (list(queue.ready), dict(vars(queue.policy)))
    return found


def leaving(one: Catalog, tier: int) -> list[bytes]:
    return [victim.name for _ in range(9) for victim in one.clear(tier)]


def one_by_one(one: Catalog, parts: Sequence[Part], tier: int) -> None:
    for part in heads_first(parts):
        one.stored(part, tier, charged(part))


def alike(parts: Sequence[Part]) -> bool:
    """Say whether both ways end in one state, also once a second tier was taken in."""
    with catalog() as at_once, catalog() as slowly:
        for tier, some in ((MID, parts), (LOW, parts[::2])):
            at_once.stored_many(columns(some), tier)
            one_by_one(slowly, some, tier)
            if state(at_once) != state(slowly):
                return False
        return leaving(at_once, MID) == leaving(slowly, MID) and state(at_once) == state(slowly)


@given(FORESTS)
def test_at_once_ends_where_one_by_one_does(drawn):
    assert alike(forest(*drawn))


def test_it_does_for_many_forests():
    for seed in range(40):
        choose = random.Random(seed)
        nodes = [
            (
                choose.randint(0, 4),
                choose.random() < 0.1,
                choose.randint(0, 3),
                choose.randint(1, 3),
            )
            for _ in range(choose.randint(1, 20))
        ]
        assert alike(forest(nodes, choose, choose.choice((0, 1)), choose.random() < 0.5)), seed


@given(FORESTS)
def test_so_does_a_policy_that_takes_one_at_a_time(drawn):
    parts = forest(*drawn)
    with catalog(lambda: S3Fifo) as at_once, catalog(lambda: S3Fifo) as slowly:
        at_once.stored_many(columns(parts), MID)
        one_by_one(slowly, parts, MID)
        assert leaving(at_once, MID) == leaving(slowly, MID)


# ---- each of these is what a part of it is for

CHAIN: list[Node] = [(0, 0, 1, 1), (1, 0, 1, 1), (1, 0, 1, 2), (2, 0, 1, 1), (0, 0, 2, 1)]


@pytest.fixture
def branched() -> list[Part]:
    """A chain with a branch, and another tenant's first chunk."""
    return forest(CHAIN, None, 0, in_order=True)


def test_the_order_of_parts_that_stand_right_is_kept(branched):
    assert alike(branched)
    assert heads_first(branched) == branched


def test_nothing_of_a_whole_tier_is_taken_alone(branched, monkeypatch):
    alone: list[object] = []
    monkeypatch.setattr(Catalog, "stored", lambda *args: alone.append(args))
    monkeypatch.setattr(Lru, "insert", lambda *args: alone.append(args))
    with catalog() as one:
        one.stored_many(columns(branched[::-1]), MID)
        assert len(one._shelves[MID].order) == len(branched)
    assert alone == []


def test_a_policy_that_cannot_take_many_gets_one_at_a_time(branched):
    with catalog(lambda: S3Fifo) as at_once, catalog(lambda: S3Fifo) as slowly:
        at_once.stored_many(columns(branched), MID)
        one_by_one(slowly, branched, MID)
        assert leaving(at_once, MID) == leaving(slowly, MID) != []


def test_shares_have_their_turns_in_the_order_in_which_they_came():
    parts = forest([(0, 0, owner, 1) for owner in (0, 1, 3)], None, 0, in_order=True)
    tails = [part._replace(parent=parts[0].name, depth=2, name=part.name[::-1]) for part in parts]
    assert alike([tails[1], parts[2], tails[0]])


def test_a_name_that_stands_twice_is_taken_once(branched):
    with catalog() as at_once, catalog() as slowly:
        at_once.stored_many(columns([*branched, branched[0]]), MID)
        for part in branched:
            slowly.stored(part, MID, charged(part))
        assert state(at_once) == state(slowly)


def test_a_tier_that_has_nothing_is_taken_in():
    assert alike([])


def test_twin_children_that_do_not_stand_behind_their_parents(branched, monkeypatch):
    fill = Lru.fill
    monkeypatch.setattr(Lru, "fill", lambda self, rows, parents: fill(self, rows, [-1] * len(rows)))
    assert not alike(branched)


def test_twin_siblings_in_the_other_order(branched, monkeypatch):
    chained = index._chained

    def other(parents):
        child, following, last = chained(parents)
        return child, last, following

    monkeypatch.setattr(index, "_chained", other)
    assert not alike(branched)


def test_twin_children_that_are_not_counted(branched, monkeypatch):
    fill = Index.fill

    def uncounted(self, names, parents, *args):
        fill(self, names, parents, *args)
        self.children[0] = 0

    monkeypatch.setattr(Index, "fill", uncounted)
    assert not alike(branched)


@pytest.mark.parametrize("parts", [slice(1, None), slice(None, None, -1)])
def test_twin_parts_that_are_taken_as_they_stand(branched, monkeypatch, parts):
    """Without their head, or before it."""

    def as_they_stand(some):
        order, above, _ = ordered(some)
        return np.arange(len(order)), above, len(order)

    ordered = filling._heads_first
    assert alike(branched[parts])
    monkeypatch.setattr(filling, "_heads_first", as_they_stand)
    assert not alike(branched[parts])
