"""The Catalog with chunks of several parts, of which some have left."""

from __future__ import annotations

import pytest

from kvtier.catalog.catalog import Catalog, Part
from kvtier.catalog.index import DRAM
from kvtier.identity.geometry import Component, Geometry
from kvtier.identity.record import PartName, record_id
from kvtier.identity.shape import chunk_shape
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SUM, SmallCatalog, chain


def shards(count: int, depths: int) -> list[list[Part]]:
    """Return the chunks of a prefix, each cut into `count` shards."""
    ranks = [PartName(0, shard, count) for shard in range(count)]
    chunks: list[list[Part]] = []
    for depth in range(depths):
        names = [record_id(bytes([depth]) * 32, rank) for rank in ranks]
        above = [part.name for part in chunks[-1]] if chunks else [None] * count
        chunks.append([Part(*both, depth, PART_BYTES) for both in zip(names, above, strict=True)])
    return chunks


def test_a_chunk_that_lost_a_part_gets_that_part_again():
    """Otherwise it is neither loadable nor savable, for as long as the other part stays."""
    fixture = SmallCatalog(6)
    chunks = shards(2, 3)
    for part, slot in fixture.catalog.reserve(chunks)[0]:
        fixture.catalog.commit(part.name, slot, SUM)
    fixture.save(chain(1, seed=9))  # room for it is made of one part of the last chunk
    assert len(fixture.found_chunks(chunks)) == 2
    taken, refused = fixture.catalog.reserve(chunks)
    assert refused == 0
    assert [part.depth for part, _ in taken] == [2]
    for part, slot in taken:
        assert fixture.catalog.commit(part.name, slot, SUM)
    assert len(fixture.found_chunks(chunks)) == 3
    fixture.close()


def test_a_chunk_that_does_not_fit_wholly_is_not_reserved_in_part():
    fixture = SmallCatalog(5)
    chunks = shards(2, 4)
    taken, refused = fixture.catalog.reserve(chunks)
    assert [part.depth for part, _ in taken] == [0, 0, 1, 1]
    assert refused == 2
    assert fixture.arena.slots_in_use == 4
    for part, slot in taken:
        fixture.catalog.abort(part.name, slot)
    assert len(fixture.catalog._index) == 0
    fixture.close()


def test_room_for_a_part_is_not_made_of_the_ancestors_of_its_siblings():
    """The last copy of one shard's head is no room for another shard's tail."""
    fixture = SmallCatalog(4)
    chunks = shards(2, 3)
    for part, slot in fixture.catalog.reserve(chunks[:2])[0]:
        fixture.catalog.commit(part.name, slot, SUM)
    fixture.catalog.stored(chunks[1][1], LMDB, 0)
    fixture.catalog.lost(fixture.rows(chunks[1])[1], DRAM)
    other = chain(1, seed=9)
    fixture.save(other)
    lease = fixture.lease(other, 9.0)
    assert fixture.catalog.reserve(chunks) == ([], 1)
    assert fixture.found_chunks(chunks) == [DRAM, LMDB]
    lease.release()
    fixture.close()


TWO = chunk_shape(
    Geometry((Component(1, 2, 256),), dtype="int8", block_tokens=(16,), chunk_tokens=16), 2
)


def read_ahead(slots: int, leased: int, depths: int) -> tuple[list[int], list[int]]:
    """Begin a prefetch of chunks of two parts below; return what it reads and what counts as it."""
    fixture = SmallCatalog(slots)
    chunks, others = shards(2, depths), chain(leased, seed=9)
    if others:
        fixture.save(others)
        fixture.lease(others, 9.0)
    for part in (part for chunk in chunks for part in chunk):
        fixture.catalog.stored(part, LMDB, 0)
    names = [[part.name for part in chunk] for chunk in chunks]
    tokens = depths * TWO.chunk_tokens
    held, fresh = fixture.catalog.hold_for_fetch(names, TWO, 0, tokens, 0, ahead=True)
    counted = [fixture.catalog._fetching_bytes, fixture.catalog._ahead_bytes]
    for row in fresh:
        fixture.catalog.fetched(row, None)
    fixture.catalog.release_rows(row for rows in held for row in rows)
    assert fixture.catalog._ahead_bytes == fixture.catalog._fetching_bytes == 0
    fixture.close()
    return fresh, counted


def test_all_that_a_prefetch_reads_counts_as_that():
    """A chunk that it cannot hold whole, too: fetches would be refused on its account."""
    fresh, counted = read_ahead(slots=16, leased=13, depths=2)
    assert len(fresh) == 3
    assert counted == [3 * PART_BYTES] * 2


def test_a_long_prefetch_counts_each_part_once(monkeypatch: pytest.MonkeyPatch):
    rows: list[int] = []
    count = Catalog._reading_ahead
    monkeypatch.setattr(
        Catalog,
        "_reading_ahead",
        lambda self, some: (rows.extend(some), count(self, some))[1],
    )
    fresh, _ = read_ahead(slots=256, leased=0, depths=30)
    assert sorted(rows) == sorted(fresh)
    assert len(fresh) == 60


@pytest.mark.parametrize("kept", [True, False])
def test_room_for_a_head_is_not_made_of_its_own_tail(monkeypatch, kept):
    """What is wanted and in DRAM leaves last; the twin is without that."""
    if not kept:
        monkeypatch.setattr("kvtier.catalog.shelf.Room.hold_names", lambda self, names: [])
    fixture = SmallCatalog(3)
    parts, other = chain(3), chain(2, seed=1)
    fixture.save(parts)
    for part, row in zip(parts[:2], fixture.rows(parts), strict=False):
        fixture.catalog.stored(part, LMDB, 0)
        fixture.catalog.lost(row, DRAM)
    fixture.save(other)
    fixture.found(other)
    chunks, fresh = fixture.hold_for_fetch(parts)
    assert len(chunks) == (3 if kept else 2)
    for row in fresh:
        fixture.catalog.fetched(row, None)
    for rows in chunks:
        fixture.catalog.release_rows(rows)
    assert fixture.catalog._index.held_rows == 0
    fixture.close()
