"""H12: all ranks are told one length, whatever one of them has lost."""

from __future__ import annotations

import numpy as np
import pytest

import kvtier
from kvtier.config import Config, TierConfig
from kvtier.device.cpu import CpuDevice
from kvtier.identity.record import Part, record_id
from kvtier.testing.toy import BLOCK, CHUNK, prompt
from kvtier.transfer import CopyStatus

CHUNKS, TP = 8, 4
TOKENS = CHUNKS * CHUNK
PROMPT = prompt(TOKENS + 1)
COUNT = TOKENS // BLOCK
GEOMETRY = kvtier.Geometry(
    (kvtier.Component(layers=2, heads=TP, head_size=8),), block_tokens=(BLOCK,), chunk_tokens=CHUNK
)
RANKS = list(range(TP))


class Ranks:
    """An engine of several ranks: each has tensors of its own and copies its own shard."""

    def __init__(self, store=None, chunks: int = 16) -> None:
        tiers = () if store is None else (TierConfig("disk", "", None, store=store),)
        namespace = kvtier.Namespace("ranks", GEOMETRY)
        config = Config(TP * 4096 * chunks, tiers)  # a part is a page
        self.cache = kvtier.Cache(config, namespace, shards=TP)
        self.devices = [CpuDevice() for _ in RANKS]
        self.kv = [np.zeros((2, 2, 2 * COUNT, BLOCK, 1, 8), np.uint16) for _ in RANKS]
        self.pages = [
            self.cache.bind(self.kv[rank], self.devices[rank], shard=rank) for rank in RANKS
        ]

    def compute(self) -> None:
        for rank in RANKS:
            for block in range(COUNT):
                self.kv[rank][:, :, block] = 1 + rank * COUNT + block

    def save(self, without: int | None = None) -> list[int]:
        """Save from all ranks; return the parts that each was asked for. without: it fails."""
        self.compute()
        plan = self.cache.plan_save(self.cache.prefix(PROMPT[:TOKENS]), list(range(COUNT)))
        if plan is None:
            return [0] * TP
        results = [pages.execute(plan, ()).result(10) for pages in self.pages]
        assert all(result.status is CopyStatus.OK for result in results)
        self.cache.settle(plan, results[0])
        assert self.cache.flush(timeout=20)
        return [sum(part.shard == rank for part in plan.parts) for rank in RANKS]

    def load(self) -> int:
        """Load what there is into all ranks; return the tokens, the same on each, all exact."""
        match = self.cache.match(PROMPT)
        if not match.tokens:
            return 0
        lease = self.cache.fetch(match, timeout=10, deadline=60).result(20)
        if lease is None:
            return 0
        with lease:
            tokens = lease.chunks * CHUNK
            blocks = list(range(COUNT, COUNT + tokens // BLOCK))
            plan = self.cache.plan_load(lease, blocks)
        for rank in RANKS:
            self.kv[rank][:, :, COUNT:] = 0xABAB
        results = [pages.execute(plan, ()).result(10) for pages in self.pages]
        self.cache.settle(plan, results[0])
        assert {result.tokens for result in results} == {tokens}
        for rank in RANKS:
            for at in range(COUNT):
                found = np.unique(self.kv[rank][:, :, COUNT + at]).tolist()
                right = 1 + rank * COUNT + at if at < tokens // BLOCK else 0xABAB
                assert found == [right]
        return tokens

    def lose(self, store, rank: int, chunks) -> None:
        """Delete one rank's parts of some chunks behind the cache's back."""
        keys = self.cache.prefix(PROMPT).keys
        store.delete_many([record_id(keys[chunk], Part(0, rank, TP)) for chunk in chunks])

    def close(self) -> None:
        assert self.cache.flush(timeout=20)
        assert self.cache.figures()["kvtier_leased_parts"] == 0
        self.cache.close()
        for device in self.devices:
            device.close()


@pytest.fixture
def ranks(disk):
    found = Ranks(disk)
    yield found
    found.close()


def test_each_rank_stores_each_chunk_once(ranks):
    assert ranks.save() == [CHUNKS] * TP
    assert ranks.save() == [0] * TP
    assert ranks.load() == TOKENS


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("chunk", [0, 1, 5, CHUNKS - 1])
def test_one_part_of_one_rank_shortens_all(ranks, disk, rank, chunk):
    """Nobody was told that the tier lost it: the read finds out, and all ranks learn the same."""
    ranks.save()
    ranks.cache.clear("dram")
    ranks.lose(disk, rank, [chunk])
    assert ranks.cache.match(PROMPT).tokens == TOKENS, "not known yet"
    assert ranks.load() == chunk * CHUNK
    assert ranks.cache.match(PROMPT).tokens == chunk * CHUNK
    saved = ranks.save()
    assert sum(saved) == 1, "what the others have is not stored again"
    assert saved[rank] == 1
    assert ranks.load() == TOKENS


@pytest.mark.parametrize("rank", RANKS)
def test_without_one_rank_there_is_nothing(ranks, disk, rank):
    ranks.save()
    ranks.cache.clear("dram")
    ranks.lose(disk, rank, range(CHUNKS))
    assert ranks.load() == 0
    assert ranks.cache.match(PROMPT).tokens == 0
    ranks.save()
    assert ranks.load() == TOKENS


def test_different_losses_of_different_ranks_give_the_shortest(ranks, disk):
    ranks.save()
    ranks.cache.clear("dram")
    for rank, chunk in enumerate((7, 5, 6, 3)):
        ranks.lose(disk, rank, [chunk])
    assert ranks.load() == 3 * CHUNK
    assert ranks.load() == 3 * CHUNK


@pytest.mark.parametrize("room", [1, 3, 7])
def test_room_for_a_part_of_a_prompt_is_for_whole_chunks_of_all_ranks(disk, room):
    """Of parts that leave one by one, what can be loaded is the same on every rank."""
    small = Ranks(disk, chunks=room)
    try:
        small.save()
        assert small.load() == room * CHUNK
        small.cache.clear("dram")
        assert small.load() == room * CHUNK
    finally:
        small.close()


def test_a_rank_with_a_plan_of_another_number_of_ranks_is_refused(ranks):
    """Two engines of one model and other sizes: no rank copies a part of another cut."""
    plan = ranks.cache.plan_save(ranks.cache.prefix(PROMPT[:CHUNK]), list(range(CHUNK // BLOCK)))
    other = ranks.cache.bind(np.zeros((2, 2, 8, BLOCK, 1, 8), np.uint16), ranks.devices[0], shard=1)
    (kind,) = other._kinds
    kind.shards = 2
    with pytest.raises(kvtier.ProtocolError, match="shard 0 of 4.* here are 2 shards"):
        other.execute(plan, ())
    results = [pages.execute(plan, ()).result(10) for pages in ranks.pages]
    ranks.cache.settle(plan, results[0])
