"""Which part leaves first, and how little is looked at to find it."""

from __future__ import annotations

import pytest

from kvtier.catalog.index import DRAM, Index
from kvtier.policies.lru import Lru
from kvtier.testing.small_catalog import LMDB, SUM, SmallCatalog, chain


def left_when_one_must_go() -> tuple[list[int], list[int]]:
    """Fill DRAM with two chains, the first of which grew last; return what stays of each."""
    fixture = SmallCatalog(4)
    fixture.save(chain(1))
    fixture.save(chain(2, seed=1))
    fixture.save(chain(2)[1:])
    fixture.save(chain(1, seed=2))
    found = fixture.found(chain(2)), fixture.found(chain(2, seed=1))
    fixture.close()
    return found


def test_what_a_long_answer_adds_is_no_older_than_its_last_save():
    assert left_when_one_must_go() == ([DRAM] * 2, [DRAM])


def test_without_marking_the_whole_chain_the_newest_part_would_leave(monkeypatch):
    monkeypatch.setattr(Index, "line", lambda self, row: [])
    assert left_when_one_must_go() == ([DRAM], [DRAM] * 2)


def test_once_a_last_copy_has_left_those_above_it_may_leave_too():
    fixture = SmallCatalog(3)
    stays, wanted = chain(4), chain(2, seed=1)
    fixture.save(stays[:3])
    for part in (*stays[:2], stays[3], *wanted):  # stays[2] is in DRAM alone, its child below
        fixture.catalog.stored(part, LMDB, 0)
    held, fresh = fixture.hold_for_fetch(wanted)
    assert len(held) == len(fresh) == 2
    for row in fresh:
        fixture.catalog.fetched(row, SUM)
    assert fixture.found(wanted) == [DRAM] * 2
    fixture.catalog.release_rows(row for rows in held for row in rows)
    fixture.close()


def looks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Save chains, all parts of one depth before the next; count looks at rows for one to leave."""
    rows, leaf = [], Index.leaf
    monkeypatch.setattr(
        Index, "leaf", lambda self, row, tier: rows.append(row) or leaf(self, row, tier)
    )
    fixture = SmallCatalog(40)
    for depth in range(10):
        fixture.save([chain(10, seed)[depth] for seed in range(4)])
    rows.clear()
    fixture.save(chain(1, seed=9))
    fixture.close()
    return len(rows)


def test_no_parent_is_looked_at_before_its_children(monkeypatch):
    assert looks(monkeypatch) == 1


def test_parts_that_come_in_as_the_newest_would_have_older_parents(monkeypatch):
    monkeypatch.setattr(Index, "line", lambda self, row: [])
    insert = Lru.insert
    monkeypatch.setattr(Lru, "insert", lambda self, row, key, parent=-1: insert(self, row, key))
    assert looks(monkeypatch) == 37
