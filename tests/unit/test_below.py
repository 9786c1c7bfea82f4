"""What fetch and spill ask of the Catalog: holds, descriptions, and room in lots."""

from __future__ import annotations

import pytest

from kvtier.catalog import below
from kvtier.catalog.catalog import Part
from kvtier.catalog.index import NO_ROW
from kvtier.catalog.owners import Quota
from kvtier.identity.geometry import Component, Geometry
from kvtier.identity.record import PartName, record_id
from kvtier.identity.shape import chunk_shape
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SUM, SmallCatalog, chain

TWO = chunk_shape(
    Geometry((Component(1, 2, 256),), dtype="int8", block_tokens=(16,), chunk_tokens=16), 2
)
LOT = 4


@pytest.fixture
def small():
    """Room for sixteen parts."""
    fixture = SmallCatalog(16)
    yield fixture
    fixture.close()


def of_two(depths: int) -> list[list[Part]]:
    """Return a prefix of chunks of two parts."""
    chunks: list[list[Part]] = []
    for depth in range(depths):
        ids = [record_id(bytes([depth]) * 32, PartName(0, shard, 2)) for shard in range(2)]
        above = [part.name for part in chunks[-1]] if chunks else [None, None]
        chunks.append([Part(*both, depth, PART_BYTES) for both in zip(ids, above, strict=True)])
    return chunks


def begin(small, chunks, *, ahead=False):
    """Hold chunks of two parts for a fetch, or a prefetch."""
    names = [[part.name for part in chunk] for chunk in chunks]
    tokens = len(chunks) * TWO.chunk_tokens
    return small.catalog.hold_for_fetch(names, TWO, 0, tokens, 0, ahead=ahead)


def end(small, chunks, fresh, raw_sum=None):
    """End the reads of a fetch, and give its holds back."""
    for row in fresh:
        small.catalog.fetched(row, raw_sum)
    small.catalog.release_rows([row for rows in chunks for row in rows])


def keep(small, parts):
    """Let the slower tier have parts."""
    for part in parts:
        small.catalog.stored(part, LMDB, 0)


# ----------------------------------------------------------------------------------------- fetch


def test_a_prefetch_begins_no_chunk_once_its_reads_fill_a_quarter_of_dram(small):
    chunks = of_two(8)
    keep(small, [part for chunk in chunks for part in chunk])
    held, fresh = begin(small, chunks, ahead=True)
    assert (len(held), len(fresh)) == (2, 4)
    assert begin(small, chunks[2:], ahead=True) == ([], [])
    assert small.metrics.get("refused_prefetches") == 1
    assert small.metrics.get("refused_fetches") == 0
    end(small, held, fresh)


def test_what_a_prefetch_has_read_counts_no_more(small):
    chunks = of_two(1)
    keep(small, chunks[0])
    end(small, *begin(small, chunks, ahead=True))
    held, fresh = begin(small, chunks)
    assert small.catalog._fetching_bytes == 2 * PART_BYTES
    end(small, held, fresh)
    assert small.catalog._fetching_bytes == small.catalog._ahead_bytes == 0
    assert not small.catalog._ahead


def test_of_a_chunk_that_cannot_be_whole_no_more_is_read(small):
    chunks = of_two(1)
    keep(small, chunks[0][1:])
    assert begin(small, chunks) == ([], [])
    assert small.arena.slots_in_use == 0


def test_a_part_is_as_large_as_the_geometry_says_whatever_its_record_said(small):
    chunks = of_two(1)
    keep(small, [part._replace(nbytes=10 * PART_BYTES) for part in chunks[0]])
    held, fresh = begin(small, chunks)
    assert [small.catalog.describe(row).part.nbytes for row in fresh] == [PART_BYTES] * 2
    assert [small.catalog.describe(row).slot.nbytes for row in fresh] == [PART_BYTES] * 2
    end(small, held, fresh)


# ----------------------------------------------------------------------------------------- spill


def test_what_is_held_is_described_as_it_was_saved(small):
    owner = small.catalog.owner(b"namespace")
    parts = [part._replace(owner=owner, level=3) for part in chain(2)]
    small.save(parts)
    rows = [small.catalog.hold_for_spill(part.name, LMDB) for part in parts]
    described = [small.catalog.describe(row) for row in rows]
    assert [one.part for one in described] == parts
    assert [one.namespace for one in described] == [b"namespace"] * 2
    assert [one.raw_sum for one in described] == [SUM] * 2
    small.catalog.release_rows(rows)


def test_what_a_tier_has_is_not_held_for_it(small):
    parts = chain(2)
    small.save(parts)
    keep(small, parts[:1])
    rows = [small.catalog.hold_for_spill(part.name, LMDB) for part in parts]
    assert rows == [NO_ROW, small.rows(parts)[1]]
    small.catalog.release_rows(rows[1:])


# ------------------------------------------------------------------------------------------ room


@pytest.fixture
def shared(monkeypatch):
    """A slower tier of twelve bytes that is full; half of it at most is a tenant's, who has it."""
    monkeypatch.setattr(below, "LOT", LOT)
    fixture = SmallCatalog(4, 12, {"one": Quota(ceiling=0.5)})
    one = fixture.catalog.owner(b"one", "one")
    for seed, owner in enumerate((one, 0)):
        for part in chain(6, seed):
            fixture.catalog.stored(part._replace(owner=owner), LMDB, 1)
    yield fixture, one
    fixture.close()


def test_parts_of_a_share_at_its_ceiling_leave_in_lots_too(shared):
    small, one = shared
    assert len(small.catalog.evict(LMDB, {one: 6})) == LOT
    assert len(small.catalog.evict(LMDB, {one: 6})) == 2
    assert len(small.catalog.evict(LMDB, {one: 6})) == 0


def test_parts_leave_in_lots_for_whoever_has_no_ceiling(shared):
    small, _ = shared
    assert len(small.catalog.evict(LMDB, {0: 6})) == LOT
    assert len(small.catalog.evict(LMDB, {0: 6})) == 2


def test_parts_leave_in_lots_even_if_more_are_to_leave_at_least(shared):
    small, _ = shared
    assert len(small.catalog.evict(LMDB, {}, at_least=7)) == LOT
    assert len(small.catalog.evict(LMDB, {}, at_least=3)) == 3


def test_what_would_be_above_a_ceiling_takes_no_room_from_what_would_not(shared):
    small, one = shared
    small.catalog.evict(LMDB, {one: 3})
    sizes = [(one, 4), (one, 2), (0, 99), (one, 1), (one, 1)]
    assert small.catalog.over_ceilings(LMDB, sizes) == [True, False, False, False, True]


def test_what_is_known_of_a_tier_is_forgotten_beyond_a_bound_leaves_first():
    small, one = SmallCatalog(4), chain(10)
    for part in one:
        small.catalog.stored(part, LMDB, 1)
    gone = small.catalog.clear(LMDB, 4)
    assert [victim.name for victim in gone] == [part.name for part in reversed(one[4:])]
    assert small.catalog.clear(LMDB, 4) == []
    small.arena.close()
