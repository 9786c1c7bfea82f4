"""The default policy, against a list that is kept in order by hand."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest

from kvtier.policies.lru import Lru


@pytest.mark.parametrize("seed", range(20))
def test_it_does_what_a_list_does(seed: int) -> None:
    rng = random.Random(seed)
    lru, expected = Lru(), []
    for _ in range(400):
        row = rng.randrange(40)
        action = rng.choice(["insert", "insert", "continue", "touch", "remove"])
        if action == "insert":
            lru.insert(row, row)
            expected = [one for one in expected if one != row] + [row]
        elif action == "continue" and row not in expected:
            parent = rng.randrange(40)
            lru.insert(row, row, parent)
            expected.insert(expected.index(parent) if parent in expected else len(expected), row)
        elif action == "touch":
            start = rng.randrange(len(expected) + 1)
            run = expected[start : start + rng.randrange(8)]  # in order already, others are not
            rows = run + rng.sample(range(60), 3)
            rows = list(dict.fromkeys(rows))
            lru.touch(rows)
            inside = [one for one in rows if one in expected]
            expected = [one for one in expected if one not in inside] + inside
        elif action == "remove":
            lru.remove(row)
            expected = [one for one in expected if one != row]
        assert list(lru.victims()) == expected
        assert len(lru) == len(expected)


def test_what_continues_a_part_leaves_before_it() -> None:
    lru = Lru()
    for row in range(5):
        lru.insert(row, row, row - 1)
    lru.insert(9, 9)
    assert list(lru.victims()) == [4, 3, 2, 1, 0, 9]


def test_a_row_may_leave_while_the_order_is_read() -> None:
    lru = Lru()
    for row in range(4):
        lru.insert(row, row)
    left = []
    for row in lru.victims():
        lru.remove(row)
        left.append(row)
    assert left == [0, 1, 2, 3]
    assert not len(lru)


@pytest.mark.parametrize("seed", range(5))
def test_lists_that_share_their_arrays_know_their_own_rows(seed: int) -> None:
    rng, new = random.Random(seed), Lru.together()
    both: list[tuple[Lru, list[int]]] = [(new(), []), (new(), [])]
    for _ in range(400):
        row, (lru, mine), (_, others) = rng.randrange(40), *rng.sample(both, 2)
        if rng.random() < 0.3:
            lru.remove(row)  # a stranger, maybe
            mine[:] = [one for one in mine if one != row]
        elif row in others:
            lru.touch([row])
        else:
            parent = rng.randrange(40)
            known = row in mine
            lru.insert(row, row, parent)
            mine[:] = [one for one in mine if one != row]
            at = mine.index(parent) if parent in mine and not known else len(mine)
            mine.insert(at, row)
        assert [list(lru) for lru, _ in both] == [rows for _, rows in both]


def bytes_for_a_row(new: Callable[[], Lru]) -> float:
    """Return what forty lists take, divided by the rows that they have together."""
    tracemalloc.start()
    lists = [new() for _ in range(40)]
    for row in range(20_000):
        lists[row % 40].insert(row, row)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return taken / 20_000


def test_many_lists_take_no_more_than_one() -> None:
    assert bytes_for_a_row(Lru.together()) < 16


def test_lists_that_share_nothing_take_it_again_and_again() -> None:
    assert bytes_for_a_row(Lru) > 16 * 20
