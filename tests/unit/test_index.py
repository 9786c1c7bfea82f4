"""The Index: what hangs under what, what is forgotten, and who is told of what may leave."""

from __future__ import annotations

import pytest

from kvtier.catalog.index import DRAM, NO_ROW, Index
from kvtier.memory.arena import Slot
from kvtier.testing.small_catalog import LMDB, PART_BYTES

A, B, C, D = b"a", b"b", b"c", b"d"


@pytest.fixture
def index():
    return Index(2)


@pytest.fixture
def told(index):
    """The rows of which it is told that they may leave where they were parked."""
    rows: list[int] = []
    index.freed = rows.append
    return rows


def made(index, *names, parent=None, depth=0):
    """Make rows that hang under one parent."""
    return [index.ensure(name, parent, depth, PART_BYTES, 0) for name in names]


# ---------------------------------------------------------------------------------- what hangs


def test_a_line_begins_at_the_top(index):
    (top,) = made(index, A)
    (below,) = made(index, B, parent=A, depth=1)
    (last,) = made(index, C, parent=B, depth=2)
    assert index.line(last) == [top, below, last]
    assert index.line(NO_ROW) == []


def test_what_is_in_a_tier_without_a_parent_gets_none_later(index):
    """Whoever counts a parent's children counted without it."""
    (row,) = made(index, B, depth=1)
    index.add(row, LMDB)
    made(index, B, parent=A, depth=1)
    assert index.parent[row] == NO_ROW
    assert index.find(A) == NO_ROW


def test_a_row_with_a_slot_keeps_its_size_whatever_a_record_says(index):
    (row,) = made(index, A)
    index.set_slot(row, Slot(0, PART_BYTES, 1))
    index.ensure(A, None, 0, 2 * PART_BYTES, 0)
    assert index.slot(row).nbytes == PART_BYTES
    index.set_slot(row, None)
    index.ensure(A, None, 0, 2 * PART_BYTES, 0)
    assert index.slot(row).nbytes == 2 * PART_BYTES


def test_who_takes_a_name_over_hangs_where_it_hung(index):
    made(index, A)
    (held,) = made(index, B, parent=A, depth=1)
    (child,) = made(index, C, parent=B, depth=2)
    assert index.detach(held) == [child]
    fresh = index.find(B)
    assert fresh not in (held, NO_ROW)
    assert index.line(child) == [index.find(A), fresh, child]


def test_a_child_that_goes_leaves_the_others_where_they_were(index):
    (top, other) = made(index, A, B)
    (first, second) = made(index, C, D, parent=A, depth=1)
    (last,) = made(index, b"last", parent=B, depth=1)
    index.prune(first)
    index.prune(last)
    assert list(index.children_of(top)) == [second]
    assert list(index.children_of(other)) == []


# ------------------------------------------------------------------------------- what is forgotten


def test_a_row_that_nothing_needs_is_used_again_as_new(index):
    for name in (A, B, C):
        (row,) = made(index, name)
        assert index.level[row] == 0
        index.level[row] = 3
        index.prune(row)
        assert index.names == [b""]
    assert len(index) == 0


# --------------------------------------------------------------------------- who may leave again


def test_it_is_told_once_when_the_last_hold_of_a_parked_row_ends(index, told):
    parked, free = made(index, A, B)
    index.parked[parked] = 1 << DRAM
    for row in (parked, free):
        index.hold(row, 1)
        index.hold(row, 1)
        index.hold(row, -1)
    assert told == []
    index.hold(free, -1)
    index.hold(parked, -1)
    assert told == [parked]


def test_it_is_told_when_a_parked_row_is_no_last_copy_any_more(index, told):
    parked, free = made(index, A, B)
    for row in (parked, free):
        index.add(row, DRAM)
    index.parked[parked] = 1 << DRAM
    assert told == []
    for row in (parked, free):
        index.add(row, LMDB)
    assert told == [parked]


def test_it_is_told_when_a_child_of_a_parked_row_has_left(index, told):
    tops = made(index, A, B)
    below = [*made(index, C, parent=A, depth=1), *made(index, D, parent=B, depth=1)]
    for row in (*tops, *below):
        index.add(row, DRAM)
    index.parked[tops[0]] = 1 << DRAM
    for row in below:
        index.discard(row, DRAM)
    assert told == [tops[0]]
