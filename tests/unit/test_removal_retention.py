"""Priorities and times: what a save says of ranges of tokens, and what becomes of it."""

from __future__ import annotations

import heapq
import math

import pytest

import kvtier
from kvtier.catalog.catalog import LOT
from kvtier.catalog.expiry import NEVER, Expiry
from kvtier.catalog.index import DRAM
from kvtier.errors import ConfigError, MisuseError
from kvtier.retention import Retention, Term, terms
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SmallCatalog, chain

# --------------------------------------------------------------------------------- ranges to chunks


def test_ranges_say_what_holds_for_the_chunks_that_they_overlap():
    retention = [Retention(0, 17, priority=5), Retention(16, None, priority=-3, seconds=60.0)]
    assert terms(retention, 3, 16) == [Term(5), Term(5, 60.0), Term(-3, 60.0)]


def test_the_highest_priority_and_the_shortest_time_hold():
    retention = [Retention(0, 1, -5, 60), Retention(0, 1, -7, 9.5), Retention(0, 1, -9)]
    assert terms(retention, 2, 16) == [Term(-5, 9.5), Term(0, math.inf)]


def test_ranges_beyond_the_chunks_say_nothing():
    assert terms([Retention(32, 100, priority=9)], 2, 16) == [Term(), Term()]
    assert terms([Retention(0, 10**12, priority=9)], 1, 16) == [Term(9)]
    assert terms([], 2, 16) == []


@pytest.mark.parametrize(
    "given",
    [
        {"start": 5, "stop": 5},
        {"start": 6, "stop": 5},
        {"start": -1, "stop": 5},
        {"start": 0.5, "stop": 5},
        {"start": 0, "stop": "5"},
        {"start": True, "stop": 5},
        {"start": 0, "stop": 5, "priority": 101},
        {"start": 0, "stop": 5, "priority": -101},
        {"start": 0, "stop": 5, "priority": 1.0},
        {"start": 0, "stop": 5, "priority": None},
        {"start": 0, "stop": 5, "seconds": -1.0},
        {"start": 0, "stop": 5, "seconds": 0},
        {"start": 0, "stop": 5, "seconds": math.nan},
        {"start": 0, "stop": 5, "seconds": "60"},
    ],
)
def test_a_retention_that_means_nothing_is_refused(given):
    with pytest.raises(ConfigError, match="retention"):
        Retention(**given)


def test_only_retentions_are_taken():
    with pytest.raises(MisuseError, match=r"takes kvtier\.Retention"):
        terms([(0, 16, 5)], 1, 16)
    assert kvtier.Retention is Retention


# ------------------------------------------------------------------------------------------- expiry


def test_names_are_due_in_order_and_once():
    expiry = Expiry()
    for name, until in ((b"c", 3.0), (b"a", 1.0), (b"b", 2.0), (b"d", NEVER)):
        expiry.begin(name, until)
    assert expiry.due(0.9, LOT) == []
    assert expiry.due(2.0, LOT) == [b"a", b"b"]
    assert expiry.due(9.0, LOT) == [b"c"]
    assert len(expiry) == 0


def test_a_later_end_holds_and_no_end_is_the_latest():
    expiry = Expiry()
    for name in (b"a", b"b", b"c"):
        expiry.begin(name, 1.0)
    expiry.extend(b"a", 5.0)
    expiry.extend(b"a", 2.0)
    expiry.extend(b"b", 0.5)
    expiry.extend(b"c", NEVER)
    expiry.extend(b"new", 2.0)  # it had no end, so it gets none
    assert expiry.due(1.0, LOT) == [b"b"]
    assert expiry.due(4.9, LOT) == []
    assert expiry.due(5.0, LOT) == [b"a"]
    assert not len(expiry)


def test_a_part_that_comes_anew_may_have_a_shorter_time():
    expiry = Expiry()
    expiry.begin(b"a", 10.0)
    expiry.begin(b"a", 2.0)
    assert expiry.due(2.0, LOT) == [b"a"]
    expiry.begin(b"a", 30.0)
    assert expiry.due(10.0, LOT) == []  # the turn that it had at first
    assert expiry.due(30.0, LOT) == [b"a"]


def test_extending_takes_no_memory():
    expiry = Expiry()
    expiry.begin(b"a", 1.0)
    for turn in range(1000):
        expiry.extend(b"a", 2.0 + turn)
    assert len(expiry._heap) == 1


def test_the_same_end_again_takes_no_memory():
    expiry = Expiry()
    for _ in range(3):
        expiry.begin(b"a", 1.0)
    assert len(expiry._heap) == 1


def test_a_part_that_comes_anew_without_an_end_is_forgotten_at_its_old_turn():
    expiry = Expiry()
    expiry.begin(b"a", 1.0)
    expiry.begin(b"a", NEVER)
    assert expiry.due(2.0, LOT) == []
    assert len(expiry) == len(expiry._heap) == 0


def test_what_is_not_due_is_not_looked_at(monkeypatch):
    looked = []
    take = heapq.heappop
    monkeypatch.setattr(heapq, "heappop", lambda heap: (looked.append(None), take(heap))[1])
    expiry = Expiry()
    for name, until in ((b"a", 1.0), (b"b", 5.0), (b"c", 6.0)):
        expiry.begin(name, until)
    assert expiry.due(2.0, LOT) == [b"a"]
    assert len(looked) == 1


def test_so_many_are_looked_at_and_no_more():
    expiry = Expiry()
    for number in range(5):
        expiry.begin(bytes([number]), 1.0)
    assert len(expiry.due(1.0, 3)) == 3
    assert expiry.waiting(1.0)
    assert len(expiry.due(1.0, 3)) == 2
    assert not expiry.waiting(1.0)


# -------------------------------------------------------------------------------------- the catalog


@pytest.fixture
def small():
    one = SmallCatalog(slots=4)
    yield one
    one.close()


def kept(parts, level=0, seconds=NEVER):
    return [part._replace(level=level, seconds=seconds) for part in parts]


def test_what_has_a_higher_priority_stays_longer(small):
    dear, usual, cheap = (chain(1, seed=seed) for seed in range(3))
    small.save(kept(dear, 7))
    small.save(usual)
    small.save(kept(cheap, -7))
    small.save(chain(2, seed=3))
    assert (small.found(dear), small.found(usual), small.found(cheap)) == ([DRAM], [DRAM], [])
    small.save(chain(3, seed=4))
    assert (small.found(dear), small.found(usual)) == ([DRAM], [])


def test_a_second_save_makes_it_higher_never_lower(small):
    parts = chain(1)
    small.save(parts)
    small.save(kept(parts, 7))
    small.save(kept(parts, -7))
    assert small.catalog._index.level[small.rows(parts)[0]] == 7
    small.save(chain(3, seed=1))
    small.save(chain(1, seed=2))
    assert small.found(parts) == [DRAM]


def test_the_same_priority_again_is_no_use_of_the_part(small):
    one, other = chain(1), chain(1, seed=1)
    small.save(one)
    small.save(other)
    for _ in range(2):
        small.catalog.expire()  # marks what was put off, a prompt at a time
    assert small.reserve(one) == []
    assert small.save(chain(3, seed=2)) == 3
    assert small.found(other) == [DRAM]
    assert small.found(one) == []


def test_an_orphan_that_gets_a_higher_priority_leaves_first_all_the_same(small):
    parts = chain(2)
    small.save(parts)
    small.catalog.withdraw([parts[0].name], "invalidated")
    small.catalog.reserve([kept(parts[1:], 9)])
    assert small.save(chain(4, seed=1)) == 4
    assert small.catalog._index.orphans == 0


def test_a_priority_lasts_while_the_part_is_somewhere_below(small):
    parts = chain(1)
    small.save(kept(parts, 7))
    small.catalog.stored(parts[0], LMDB, PART_BYTES)
    small.catalog.clear(DRAM)
    (((row,),), _) = small.hold_for_fetch(parts)
    small.catalog.fetched(row, bytes(16))
    small.catalog.release_rows([row])
    small.catalog.evict(LMDB, {0: 0}, at_least=1)
    small.save(chain(3, seed=1))
    small.save(chain(1, seed=2))
    assert small.found(parts) == [DRAM]
    assert small.catalog._index.level[row] == 7


def test_a_part_that_left_has_the_priority_of_its_next_save(small):
    parts = chain(1)
    small.save(kept(parts, 7))
    small.catalog.clear(DRAM)
    small.save(parts)
    assert small.catalog._index.level[small.rows(parts)[0]] == 0


def test_what_is_over_is_withdrawn(small):
    parts = chain(2)
    small.save(kept(parts[:1]) + kept(parts[1:], seconds=10))
    small.catalog.stored(parts[1], LMDB, PART_BYTES)
    small.clock.now += 9.9
    assert small.catalog.withdraw_due() == (0, False)
    small.clock.now += 0.1
    assert small.catalog.withdraw_due() == (1, False)
    assert small.found(parts) == [DRAM]
    assert list(small.catalog.take_withdrawn(LMDB)) == [parts[1].name]
    assert small.metrics.get("withdrawn_parts", reason="expired") == 1


def test_a_save_without_an_end_takes_the_end_away(small):
    parts = chain(2)
    small.save(kept(parts, seconds=10))
    small.save(parts[:1])
    small.save(kept(parts[1:], seconds=30))
    small.clock.now += 20
    assert small.catalog.withdraw_due() == (0, False)
    small.clock.now += 20
    assert small.catalog.withdraw_due() == (1, False)
    assert small.found(parts) == [DRAM]


def test_what_is_withdrawn_before_its_time_begins_anew(small):
    parts = chain(1)
    small.save(kept(parts, seconds=10))
    small.catalog.withdraw([parts[0].name], "invalidated")
    small.save(parts)
    small.clock.now += 20
    small.catalog.withdraw_due()
    assert small.found(parts) == [DRAM]


def test_what_is_withdrawn_before_its_time_is_not_due_then(small):
    parts = chain(2)
    small.save(kept(parts, seconds=10.0))
    small.catalog.withdraw([part.name for part in parts], "invalidated")
    small.clock.now += 11
    assert small.catalog.withdraw_due() == (0, False)


def test_what_a_silent_tier_has_keeps_its_priority_and_its_end_when_it_is_saved_anew(small):
    parts = kept(chain(1), 7, 60.0)
    small.save(parts)
    small.catalog.stored(parts[0], LMDB, PART_BYTES)
    small.catalog.lost(small.rows(parts)[0], DRAM)
    small.catalog.silent = lambda: 1 << LMDB
    assert small.save(kept(parts, -7, 10.0)) == 1
    assert small.catalog._index.level[small.rows(parts)[0]] == 7
    small.clock.now += 30
    assert small.catalog.withdraw_due() == (0, False)
    small.clock.now += 31
    assert small.catalog.withdraw_due() == (1, False)


def test_what_is_over_is_looked_at_in_lots(small):
    parts = chain(LOT + 1)
    for part in kept(parts, seconds=1):
        small.catalog._expiry.begin(part.name, small.clock.now + part.seconds)
        small.catalog.stored(part, LMDB, PART_BYTES)
    small.clock.now += 1
    assert small.catalog.withdraw_due() == (LOT, True)
    assert small.catalog.withdraw_due() == (1, False)
    assert small.found(parts) == []
