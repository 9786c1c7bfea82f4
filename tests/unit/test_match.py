"""Match: what is found where, for models of one kind of layer and of several."""

from __future__ import annotations

import sys

import pytest

from kvtier.catalog.catalog import Catalog, Found, Part, Shelf
from kvtier.catalog.index import DRAM, NO_ROW
from kvtier.catalog.owners import Quota
from kvtier.errors import MisuseError
from kvtier.identity.geometry import Component, Geometry, Needs
from kvtier.identity.record import PartName, record_id
from kvtier.identity.shape import chunk_shape
from kvtier.memory.arena import Arena
from kvtier.metrics import Metrics
from kvtier.policies.lru import Lru
from kvtier.testing.hands import Hands
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SHAPE, SUM, SmallCatalog, chain
from kvtier.testing.small_catalog import names as names_of

SLOW = 2
FULL = Component(1, 1, 256)
WINDOW = Component(1, 1, 256, name="window", needs=Needs.TRAILING, window=16)
BOTH = chunk_shape(Geometry((FULL, WINDOW), dtype="int8", block_tokens=(16,), chunk_tokens=16))


@pytest.fixture
def small():
    """Room for three parts."""
    fixture = SmallCatalog(3)
    yield fixture
    fixture.close()


def python_calls(do) -> int:
    """Return how often Python calls a function, or goes on with a generator, while it does this."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        do()
    finally:
        sys.setprofile(before)
    return count


# ---------------------------------------------------------------------------- one kind of layer


def test_of_no_prompt_nothing_is_found(small):
    assert small.catalog.match([], SHAPE, 0) == Found(0, [], 0)


def test_what_lies_behind_a_tier_that_does_not_answer_does_not_count_as_used(small):
    parts, other = chain(3), chain(1, seed=1)
    small.save(parts)
    small.catalog.stored(parts[1], LMDB, 0)
    small.catalog.lost(small.rows(parts)[1], DRAM)
    small.save(other)
    small.catalog.silent = lambda: 1 << LMDB
    assert small.found(parts) == [DRAM]
    small.save(chain(1, seed=2))
    assert small.found(other) == [DRAM]
    assert not small.catalog.tiers_of(small.rows(parts)[2])
    assert not small.catalog._room.in_dram(small.rows(parts)[2])


def test_a_long_prompt_is_found_without_a_step_of_python_for_each_part():
    """Memory only, under the lock, for microseconds: a step in Python is a hundred times one in C.

    A lease of it holds its rows and takes their slots without one, too.
    """
    small, counts = SmallCatalog(64), []
    for seed, count in enumerate((4, 12, 36)):  # the first call of all takes steps of its own
        parts = chain(count, seed=seed)
        assert small.save(parts) == count
        names, tokens = names_of(parts), count * SHAPE.chunk_tokens
        matching = python_calls(lambda: small.catalog.match(names, SHAPE, tokens))  # noqa: B023
        leasing = python_calls(lambda: small.lease(parts, 1.0).slots)  # noqa: B023
        counts.append((matching, leasing))
    small.close()
    assert counts[1] == counts[2]


# ------------------------------------------------------------------------ several kinds of layers


class Hybrid:
    """Chunks of a part that is always needed and one of a window, over two slower tiers."""

    def __init__(self, slots: int, depths: int) -> None:
        self.arena = Arena(slots * PART_BYTES, [PART_BYTES])
        shelves = [Shelf(name, Lru.together(), None) for name in ("dram", "fast", "slow")]
        self.catalog = Catalog(self.arena, shelves, Hands(), Metrics())
        self.chunks: list[list[Part]] = []
        for depth in range(depths):
            key, above = bytes([depth]) * 32, self.chunks[-1][0].name if depth else None
            ids = [record_id(key, PartName(number)) for number in range(2)]
            self.chunks.append([Part(name, above, depth, PART_BYTES) for name in ids])

    def save(self, chunks) -> int:
        taken, _ = self.catalog.reserve(chunks)
        return sum(self.catalog.commit(part.name, slot, SUM) for part, slot in taken)

    def found(self, chunks) -> Found:
        names = [[part.name for part in chunk] for chunk in chunks]
        return self.catalog.match(names, BOTH, len(chunks) * BOTH.chunk_tokens)

    def leased(self, first: int) -> list[int]:
        """Return the rows that a lease from a chunk on has, of as much as there is."""
        names = [[part.name for part in chunk] for chunk in self.chunks]
        tokens = len(names) * BOTH.chunk_tokens
        lease = self.catalog.lease(names, BOTH, first, tokens, 1.0, whole=False)
        return lease.rows if lease else []


def test_of_each_chunk_the_slowest_tier_that_a_needed_part_comes_from_is_told():
    hybrid = Hybrid(8, 3)
    top, middle, last = hybrid.chunks
    tiers = {top[0]: (SLOW,), middle[0]: (DRAM, SLOW), last[0]: (SLOW,), last[1]: (LMDB,)}
    hybrid.save([[middle[0]._replace(parent=None)]])
    for part, where in tiers.items():
        for tier in filter(None, where):
            hybrid.catalog.stored(part, tier, 0)
    assert hybrid.found(hybrid.chunks) == Found(48, [SLOW, DRAM, SLOW], 3)
    swapped = {last[0]: SLOW, last[1]: LMDB}
    for part, tier in swapped.items():
        hybrid.catalog.lost(hybrid.catalog._index.find(part.name), tier)
        hybrid.catalog.stored(part, SLOW + LMDB - tier, 0)
    assert hybrid.found(hybrid.chunks) == Found(48, [SLOW, DRAM, SLOW], 3)
    hybrid.arena.close()


def test_what_a_prefix_needs_of_several_kinds_counts_as_used():
    hybrid = Hybrid(4, 1)
    other = [[part._replace(name=part.name[:-1] + b"\xff") for part in hybrid.chunks[0]]]
    assert hybrid.save(hybrid.chunks) == 2
    assert hybrid.save(other) == 2
    assert hybrid.found(hybrid.chunks).tokens == 16
    third = Part(record_id(bytes([9]) * 32, PartName()), None, 0, PART_BYTES)
    assert hybrid.save([[third]]) == 1
    assert hybrid.found(hybrid.chunks).tokens == 16
    assert hybrid.found(other).tokens == 0
    hybrid.arena.close()


# ------------------------------------------------------------------------------------- and leases


def test_what_the_engine_has_need_not_be_in_dram(small):
    parts = chain(2)
    small.save(parts)
    small.catalog.stored(parts[0], LMDB, 0)
    small.catalog.lost(small.rows(parts)[0], DRAM)
    lease = small.catalog.lease(names_of(parts), SHAPE, 1, 32, 1.0, whole=True)
    assert lease.rows == [small.rows(parts)[1]]
    assert small.lease(parts, 1.0) is None
    lease.release()


@pytest.mark.parametrize("count", [1, 7, 8, 40])
def test_a_lease_of_few_parts_holds_what_one_of_many_does(count):
    small = SmallCatalog(40)
    parts, index = chain(count), small.catalog._index
    small.save(parts)
    with small.lease(parts, 9.0), small.lease(parts[:1], 9.0) as lease:
        rows = small.rows(parts)
        assert [index.holds[row] for row in rows] == [2] + [1] * (count - 1)
        assert index.held_rows == count
        assert [slot for (slot,) in lease.slots] == [index.slot(rows[0])]
    with small.lease(parts, 9.0) as lease:
        assert [slot for (slot,) in lease.slots] == [index.slot(row) for row in rows]
    assert not any(index.holds[row] for row in rows)
    assert not index.held_rows
    small.close()


def test_a_lease_has_whole_blocks(small):
    parts = chain(2)
    small.save(parts)
    lease = small.catalog.lease(names_of(parts), SHAPE, 0, 20, 1.0, whole=False)
    assert (lease.tokens, lease.chunks, lease.rows) == (16, 1, small.rows(parts)[:1])
    lease.release()


def test_a_lease_of_several_kinds_has_what_each_needs_beyond_what_the_engine_has():
    hybrid = Hybrid(8, 4)
    assert hybrid.save(hybrid.chunks[:3]) == 6
    index = hybrid.catalog._index
    (top, _), (middle, behind), (last, window) = (
        [index.find(part.name) for part in chunk] for chunk in hybrid.chunks[:3]
    )
    assert hybrid.leased(0) == [top, middle, last, window]
    assert hybrid.leased(1) == [middle, last, window]
    hybrid.catalog.stored(hybrid.chunks[0][0], LMDB, 0)
    hybrid.catalog.lost(top, DRAM)
    assert hybrid.leased(0) == []
    assert hybrid.leased(1) == [middle, last, window]
    hybrid.catalog.lost(window, DRAM)
    assert hybrid.leased(1) == [middle, behind]
    hybrid.catalog.lost(behind, DRAM)
    assert hybrid.leased(1) == []
    hybrid.arena.close()


def test_a_lease_of_another_catalog_is_refused_whatever_that_has(small):
    parts, nothing = chain(1), SmallCatalog(1)
    small.save(parts)
    lease = small.lease(parts, 1.0)
    with pytest.raises(MisuseError, match="another cache"):
        nothing.catalog.issue(lease, 0)
    lease.release()
    nothing.close()


def test_a_namespace_keeps_its_tenant_where_none_is_named():
    small = SmallCatalog(1, quotas={"one": Quota(floor=0.5)})
    owner = small.catalog.owner(b"digest", "one")
    assert small.catalog.owner(b"digest") == owner
    assert small.catalog._owners.shares[owner] == 1
    small.close()


def test_what_was_put_off_is_marked_while_nothing_else_is_done(small):
    """Or the next save would have all of it to do first."""
    small.save(chain(1))
    put_off = small.catalog._room._touched
    small.catalog._room.settle_touches()
    for _ in range(3):
        small.found(chain(1))
    for left in (2, 1, 0):
        small.catalog.expire()
        assert len(put_off) == left


def test_what_was_put_off_is_marked_while_nobody_asks(small):
    small.save(chain(1))
    small.catalog._room.settle_touches()
    for _ in range(3):
        small.found(chain(1))
    assert [small.catalog.rest() for _ in range(3)] == [True, True, False]
    assert not small.catalog._room._touched


def test_what_a_save_goes_on_from_counts_as_used(small):
    """Or what is added to a long answer would leave as if it were as old as its beginning."""
    parts, other = chain(2), chain(1, seed=1)
    small.save(parts[:1])
    small.save(other)
    for _ in range(2):
        small.catalog.expire()
    assert small.save(parts) == 1
    assert small.save(chain(1, seed=2)) == 1
    assert small.found(parts) == [DRAM] * 2
    assert small.found(other) == []


def test_a_save_asks_for_the_time_once_however_long_it_is(small):
    asked = []

    class Counting(Hands):
        def __call__(self) -> float:
            asked.append(None)
            return self.now

    small.save(chain(3))
    small.catalog._clock = small.catalog._leases._clock = Counting()
    assert small.reserve(chain(3)) == []
    assert len(asked) == 1
    assert NO_ROW not in small.rows(chain(3))
