"""The default policy, against a list that is kept in order by hand."""

from __future__ import annotations

import random

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
