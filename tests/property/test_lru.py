"""Lru against an OrderedDict."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvtier.policies.lru import Lru

ROWS = st.integers(0, 12)
CALLS = st.lists(
    st.tuples(st.sampled_from(["insert", "remove"]), ROWS)
    | st.tuples(st.just("touch"), st.lists(ROWS, max_size=6)),
    max_size=80,
)


@given(CALLS)
def test_the_order_is_that_of_an_ordered_dict(calls: list[tuple[str, int | list[int]]]):
    lru, model = Lru(), OrderedDict[int, None]()
    for verb, row in calls:
        getattr(lru, verb)(*[row] * (2 if verb == "insert" else 1))
        if verb == "touch":
            for one in row:
                if one in model:
                    model.move_to_end(one)
        elif verb == "remove":
            model.pop(row, None)
        else:
            model[row] = None
            model.move_to_end(row)
        assert list(lru.victims()) == list(model)
        assert len(lru) == len(model)


@given(st.lists(st.integers(0, 10_000), unique=True, max_size=20))
def test_rows_may_come_in_any_order_and_far_apart(rows: list[int]):
    lru = Lru()
    lru.touch([5])
    lru.remove(7)
    for row in rows:
        lru.insert(row, row)
    assert list(lru.victims()) == rows


@given(st.integers(1, 30), st.integers(0, 29))
def test_a_chain_touched_deepest_first_loses_its_tail_first(length: int, other: int):
    lru = Lru()
    for row in range(length):
        lru.insert(row, row)
    lru.insert(100 + other, 100 + other)
    lru.touch(list(reversed(range(length))))
    assert list(lru.victims()) == [100 + other, *reversed(range(length))]


@given(st.lists(st.integers(0, 30), unique=True, max_size=20), st.data())
def test_rows_that_were_yielded_may_leave_while_the_order_is_read(rows, data):
    lru = Lru()
    for row in rows:
        lru.insert(row, row)
    seen = []
    for row in lru.victims():
        seen.append(row)
        lru.remove(data.draw(st.sampled_from(seen)))
    assert seen == rows
