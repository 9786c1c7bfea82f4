"""Pins: what they may hold of DRAM together, and how they end."""

from __future__ import annotations

import pytest

from kvtier.catalog.index import NO_ROW
from kvtier.catalog.lease import LeaseState
from kvtier.testing.small_catalog import PART_BYTES, SHAPE, SmallCatalog, chain
from kvtier.testing.small_catalog import names as names_of

MINE, ANOTHERS = 1, 2


@pytest.fixture
def small():
    """Room for six parts, of which three may be pinned."""
    fixture = SmallCatalog(6)
    yield fixture
    fixture.close()


def pin(small, parts, cache=MINE, seconds=9.0):
    tokens = len(parts) * SHAPE.chunk_tokens
    names = names_of(parts)
    return small.catalog.lease(names, SHAPE, 0, tokens, seconds, whole=True, pin=cache)


def may_pin(small, parts) -> bool:
    return small.catalog.may_pin(names_of(parts), SHAPE, 0, len(parts) * SHAPE.chunk_tokens)


def refused(small) -> float:
    return small.metrics.get("refused_pins")


def test_half_of_dram_may_be_pinned_and_no_more(small):
    parts = chain(4)
    small.save(parts)
    assert may_pin(small, parts[:3])
    assert not may_pin(small, parts)
    assert refused(small) == 1
    assert pin(small, parts) is None
    assert refused(small) == 2
    assert small.catalog._index.held_rows == 0
    lease = pin(small, parts[:3])
    assert lease.held
    assert refused(small) == 2
    lease.release()


def test_what_is_not_in_dram_yet_would_be_pinned_too(small):
    assert may_pin(small, chain(3))
    assert not may_pin(small, chain(4))


def test_each_part_counts_once_however_often_it_is_pinned(small):
    parts = chain(3)
    small.save(parts)
    pins = small.catalog._leases.pins
    leases = [pin(small, parts[:2]), pin(small, parts)]
    assert (len(pins), pins.nbytes) == (3, 3 * PART_BYTES)
    assert may_pin(small, parts)
    assert not may_pin(small, chain(1, seed=1))
    leases[1].release()
    assert (len(pins), pins.nbytes) == (2, 2 * PART_BYTES)
    assert small.rows(parts)[1] in pins
    leases[0].release()
    assert (len(pins), pins.nbytes) == (0, 0)
    assert NO_ROW not in pins


def test_with_a_cache_its_pins_end_and_no_others(small):
    parts = chain(1)
    small.save(parts)
    mine, anothers, plain = pin(small, parts), pin(small, parts, ANOTHERS), small.lease(parts, 9.0)
    small.catalog.unpin(MINE)
    assert [one.state for one in (mine, anothers, plain)] == [
        LeaseState.EXPIRED,
        LeaseState.HELD,
        LeaseState.HELD,
    ]
    small.catalog.unpin(ANOTHERS)
    plain.release()
    assert small.catalog._index.held_rows == 0


def test_a_pin_that_ends_in_time_is_no_lease_that_was_forgotten(small):
    parts = chain(1)
    small.save(parts)
    pin(small, parts, seconds=2.0)
    small.lease(parts, 2.0)
    small.clock.now += 3
    assert small.catalog.expire() == 0
    assert small.metrics.get("expired_leases") == 1
