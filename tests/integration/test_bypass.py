"""Bypass: one namespace goes without its cache, at once, and comes back to all it had."""

from __future__ import annotations

import pytest

from kvtier import Namespace
from kvtier.testing.toy import BLOCK, CHUNK, GEOMETRY, Toy, dram, opened, prompt

pytestmark = pytest.mark.everywhere

TOKENS = prompt(4 * CHUNK + 1)


@pytest.fixture
def pair():
    """Two namespaces on one cache with a tier below, each with the prompt stored."""
    first = opened(dram(32), "memory:below?capacity=unbounded")
    other = Toy(first.cache.share(Namespace("other", GEOMETRY)))
    for toy in (first, other):
        toy.save("a", TOKENS)
    yield first, other
    other.close()
    first.close()


def test_while_it_is_on_nothing_matches_and_nothing_is_saved(pair):
    toy, _ = pair
    toy.cache.bypass = True
    assert toy.cache.bypass
    match = toy.cache.match(TOKENS)
    assert (match.tokens, match.tiers, match.unknown) == (0, (), False)
    toy.save("b", prompt(4 * CHUNK + 1, seed=1))
    assert toy.load("a", TOKENS)[:2] == (0, None)
    assert toy.cache.metrics.get("saved_chunks") == 8
    assert toy.cache.metrics.get("bypassed_matches") == 2
    assert toy.cache.metrics.get("dropped_saves") == 0


def test_off_again_all_that_is_stored_hits(pair):
    toy, _ = pair
    toy.cache.bypass = True
    toy.cache.bypass = True  # twice is once
    toy.cache.bypass = False
    assert toy.load("a", TOKENS)[0] == 4 * CHUNK
    assert toy.load("a", TOKENS)[2]
    toy.save("b", prompt(4 * CHUNK + 1, seed=1))
    assert toy.cache.metrics.get("saved_chunks") == 12


def test_other_namespaces_do_not_notice(pair):
    """And all caches of one namespace do."""
    toy, other = pair
    again = other.cache.share(toy.cache.namespace)
    toy.cache.bypass = True
    assert other.load("a", TOKENS)[0] == 4 * CHUNK
    assert not other.cache.bypass
    assert again.bypass
    again.close()


def test_a_match_from_before_starts_nothing(pair):
    toy, _ = pair
    match = toy.cache.match(TOKENS)
    toy.cache.clear("dram")
    toy.cache.bypass = True
    assert toy.cache.fetch(match, timeout=5, deadline=5).result(20) is None
    assert toy.cache.lease(match, deadline=5) is None
    assert toy.cache.metrics.get("fetched_bytes") == 0


def test_leases_and_plans_that_are_out_go_on(pair):
    toy, _ = pair
    lease = toy.cache.lease(toy.cache.match(TOKENS), deadline=30)
    computed = toy.cache.prefix(prompt(2 * CHUNK, seed=2))
    blocks = range(2 * CHUNK // BLOCK)
    toy.compute(computed.tokens, blocks)
    save = toy.cache.plan_save(computed, blocks)
    toy.cache.bypass = True
    load = toy.cache.plan_load(lease, range(128, 128 + 4 * CHUNK // BLOCK))
    pages = toy.cache.bind(toy.kv, toy.device)
    for plan in (save, load):
        toy.cache.settle(plan, pages.execute(plan, after=()).result(20))
    lease.release()
    toy.cache.flush(timeout=5)
    toy.cache.bypass = False
    assert toy.cache.match(computed).chunks == 2
