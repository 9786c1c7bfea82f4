"""H12: all ranks, of tensors and of layers, are told one length, whatever one of them has lost."""

from __future__ import annotations

import numpy as np
import pytest

import kvtier
from kvtier.testing.toy import BLOCK, CHUNK, prompt

CHUNKS, TP, PP = 8, 2, 2
TOKENS = CHUNKS * CHUNK
PROMPT = prompt(TOKENS + 1)
GEOMETRY = kvtier.Geometry(
    (kvtier.Component(layers=4, heads=TP, head_size=8),), block_tokens=(BLOCK,), chunk_tokens=CHUNK
)
RANKS = range(TP * PP)


@pytest.fixture
def ranks(new_ranks, disk):
    return new_ranks(GEOMETRY, shards=TP, stages=PP, store=disk)


def lose(ranks, disk, rank, chunks):
    """Delete one rank's parts of some chunks behind the cache's back."""
    shard, stage = ranks.ranks[rank]
    for chunk in chunks:
        disk.delete_many(ranks.names(PROMPT, chunk, shard=shard, stage=stage))


def test_each_rank_stores_each_chunk_once(ranks):
    assert ranks.save(PROMPT) == [CHUNKS] * len(RANKS)
    assert ranks.save(PROMPT) == [0] * len(RANKS)
    assert ranks.load(PROMPT) == TOKENS


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("chunk", [0, 1, 5, CHUNKS - 1])
def test_one_part_of_one_rank_shortens_all(ranks, disk, rank, chunk):
    """Nobody was told that the tier lost it: the read finds out, and all ranks learn the same."""
    ranks.save(PROMPT)
    ranks.cache.clear("dram")
    lose(ranks, disk, rank, [chunk])
    assert ranks.cache.match(PROMPT).tokens == TOKENS, "not known yet"
    assert ranks.load(PROMPT) == chunk * CHUNK
    assert ranks.cache.match(PROMPT).tokens == chunk * CHUNK
    assert ranks.save(PROMPT) == [int(each == rank) for each in RANKS], "no other stores again"
    assert ranks.load(PROMPT) == TOKENS


@pytest.mark.parametrize("rank", RANKS)
def test_without_one_rank_there_is_nothing(ranks, disk, rank):
    ranks.save(PROMPT)
    ranks.cache.clear("dram")
    lose(ranks, disk, rank, range(CHUNKS))
    assert ranks.load(PROMPT) == 0
    assert ranks.cache.match(PROMPT).tokens == 0
    ranks.save(PROMPT)
    assert ranks.load(PROMPT) == TOKENS


def test_different_losses_of_different_ranks_give_the_shortest(ranks, disk):
    ranks.save(PROMPT)
    ranks.cache.clear("dram")
    for rank, chunk in enumerate((7, 5, 6, 3)):
        lose(ranks, disk, rank, [chunk])
    assert ranks.load(PROMPT) == 3 * CHUNK
    assert ranks.load(PROMPT) == 3 * CHUNK


@pytest.mark.parametrize("room", [1, 3, 7])
def test_room_for_some_of_a_prompt_is_for_whole_chunks_of_all_ranks(new_ranks, disk, room):
    small = new_ranks(GEOMETRY, shards=TP, stages=PP, store=disk, chunks=room)
    small.save(PROMPT)
    assert small.load(PROMPT) == room * CHUNK
    small.cache.clear("dram")
    assert small.load(PROMPT) == room * CHUNK


def test_a_rank_that_failed_to_copy_stores_no_chunk_for_all(ranks, monkeypatch):
    """One rank's gather fails, the others' do not: the plan has failed, and nothing is there."""
    plan = ranks.cache.plan_save(ranks.cache.prefix(PROMPT), list(range(TOKENS // BLOCK)))
    results = [pages.execute(plan, ()).result(10) for pages in ranks.pages[:-1]]
    failed = ranks.devices[-1].stream("store")
    failed.enqueue(lambda: 1 // 0)
    results.append(ranks.pages[-1].execute(plan, (failed.record(),)).result(10))
    worst = [result for result in results if result.tokens < TOKENS]
    assert len(worst) == 1
    ranks.cache.settle(plan, worst[0])
    assert ranks.cache.flush(timeout=20)
    assert ranks.cache.match(PROMPT).tokens == 0
    ranks.save(PROMPT)
    assert ranks.load(PROMPT) == TOKENS


@pytest.mark.parametrize(("shards", "stages"), [(1, 1), (2, 1), (1, 2), (1, 4)])
def test_ranks_of_another_number_never_meet_these(new_ranks, new_disk, shards, stages):
    """Engines of one model on other ranks share a store: each hits only what is cut alike."""
    store = new_disk(shared=True)
    ranks = new_ranks(GEOMETRY, shards=TP, stages=PP, store=store)
    ranks.save(PROMPT)
    other = new_ranks(GEOMETRY, shards=shards, stages=stages, store=store)
    assert other.load(PROMPT) == 0
    other.save(PROMPT)
    assert other.load(PROMPT) == TOKENS
    ranks.cache.clear("dram")
    assert ranks.load(PROMPT) == TOKENS


def test_a_plan_for_other_ranks_is_refused(ranks, new_ranks):
    """Two engines of one model and other sizes: no rank copies a part of another cut."""
    plan = ranks.cache.plan_save(ranks.cache.prefix(PROMPT[:CHUNK]), list(range(CHUNK // BLOCK)))
    kv = np.zeros((4, 2, 8, BLOCK, 2, 8), np.uint16)
    desk = ranks.cache._desk
    other = type(ranks.pages[0])(GEOMETRY, desk.arena, [kv], ranks.devices[0])
    with pytest.raises(kvtier.ProtocolError, match="here are 1 shards and 1 stages"):
        other.execute(plan, ())
    results = [pages.execute(plan, ()).result(10) for pages in ranks.pages]
    ranks.cache.settle(plan, results[0])
