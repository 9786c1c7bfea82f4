"""H23: what all ranks hold alike is stored once, and every rank, of any number, loads it."""

from __future__ import annotations

import pytest

import kvtier
from kvtier.testing.toy import BLOCK, prompt

CHUNKS = 25
TOKENS = CHUNKS * BLOCK
PROMPT = prompt(TOKENS + 1)
LATENT = kvtier.Component(layers=2, heads=1, head_size=32, planes=1, name="latent", replicated=True)
HEADS = kvtier.Component(layers=2, heads=8, head_size=8)
GROUPED = kvtier.Component(layers=2, heads=2, head_size=8, name="grouped")


def geometry(*components):
    return kvtier.Geometry(components, block_tokens=(BLOCK,), chunk_tokens=BLOCK)


@pytest.fixture
def opened(new_ranks, new_disk):
    """Return what opens engines on one store that all of them share."""
    store = new_disk(shared=True)

    def of(components, shards, stages=1):
        shape = geometry(*components)
        one = new_ranks(
            shape, shards=shards, stages=stages, store=store, chunks=CHUNKS, most=CHUNKS
        )
        one.store = store
        return one

    return of


def stored_bytes(ranks):
    return sum(header.stored_bytes for header in ranks.store.scan())


def chunk_bytes(ranks):
    return ranks.geometry.bytes_per_token * BLOCK


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_a_latent_is_stored_once_by_one_rank_and_loaded_by_all(opened, shards):
    ranks = opened([LATENT], shards)
    assert ranks.save(PROMPT) == [CHUNKS] + [0] * (shards - 1)
    assert stored_bytes(ranks) == CHUNKS * chunk_bytes(ranks)
    ranks.cache.clear("dram")
    assert ranks.load(PROMPT) == TOKENS, "each rank has loaded all of it, exactly"
    assert ranks.cache.metrics.get("fetched_bytes") == CHUNKS * chunk_bytes(ranks)


@pytest.mark.parametrize("other", [1, 2, 4])
def test_an_engine_on_other_ranks_hits_the_same_entries(opened, other):
    eight, less = opened([LATENT], 8), opened([LATENT], other)
    eight.save(PROMPT)
    assert less.load(PROMPT) == TOKENS
    assert less.save(PROMPT) == [0] * other
    assert stored_bytes(less) == CHUNKS * chunk_bytes(less)


@pytest.mark.parametrize("other", [1, 2, 4])
def test_heads_of_their_own_are_stored_by_each_rank_and_never_cross(opened, other):
    eight, less = opened([HEADS], 8), opened([HEADS], other)
    assert eight.save(PROMPT) == [CHUNKS] * 8
    assert stored_bytes(eight) == CHUNKS * chunk_bytes(eight)
    assert less.load(PROMPT) == 0
    less.save(PROMPT)
    assert stored_bytes(eight) == 2 * CHUNKS * chunk_bytes(eight)
    assert less.load(PROMPT) == TOKENS
    eight.cache.clear("dram")
    assert eight.load(PROMPT) == TOKENS


def test_ranks_that_share_a_head_store_it_once(opened):
    """Grouped queries on more ranks than heads: four ranks hold the same bytes."""
    ranks = opened([GROUPED], 8)
    assert ranks.save(PROMPT) == [CHUNKS, 0, 0, 0] * 2
    assert stored_bytes(ranks) == CHUNKS * chunk_bytes(ranks)
    ranks.cache.clear("dram")
    assert ranks.load(PROMPT) == TOKENS
    two = opened([GROUPED], 2)
    assert two.load(PROMPT) == TOKENS, "two ranks, each with one of the heads"


@pytest.mark.parametrize("stages", [1, 2])
def test_a_model_of_both_kinds_stores_each_as_it_is(opened, stages):
    ranks = opened([LATENT, HEADS], 4, stages)
    assert ranks.save(PROMPT) == ([2 * CHUNKS] + [CHUNKS] * 3) * stages
    assert stored_bytes(ranks) == CHUNKS * chunk_bytes(ranks)
    ranks.cache.clear("dram")
    assert ranks.load(PROMPT) == TOKENS
    other = opened([LATENT, HEADS], 2, stages)
    assert other.load(PROMPT) == 0, "half of it is not a hit"


def test_declared_as_heads_a_latent_would_be_cut_and_shared_with_nobody(opened):
    """The twin: the same bytes without the word."""
    plain = kvtier.Component(layers=2, heads=8, head_size=4, planes=1, name="latent")
    eight = opened([plain], 8)
    assert eight.save(PROMPT) == [CHUNKS] * 8
    assert opened([plain], 4).load(PROMPT) == 0


@pytest.mark.parametrize("shards", [4, 5, 16])
def test_ranks_that_heads_cannot_be_spread_over_are_refused(shards):
    namespace = kvtier.Namespace("ranks", geometry(kvtier.Component(2, 6, 8)))
    with pytest.raises(kvtier.ConfigError, match="6 heads"):
        kvtier.open("dram:1MiB", namespace=namespace, shards=shards)
