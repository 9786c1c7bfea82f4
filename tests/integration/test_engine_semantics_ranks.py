"""Two spawned ranks, one scheduler, one Cache: the same answers with it and without."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import kvtier
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.cpu import CpuDevice
from kvtier.engine import Engine, Model, Sampling, Span, random_weights
from kvtier.engine.ranks import RankModel, shard_weights
from kvtier.errors import ConfigError
from kvtier.testing.ranked import RANKS, Ranks
from kvtier.testing.serving import CHUNK, GatedStore, small_model

SAMPLING = Sampling(max_tokens=8)
SEED = 1


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


class Tandem:
    """Two ranks and a cache for them; engines come and go."""

    def __init__(self) -> None:
        model = small_model()
        geometry = kvtier.Geometry(model.components, chunk_tokens=CHUNK)
        self.store = GatedStore()
        settings = kvtier.Config(16 << 20, (kvtier.TierConfig("m", "", None, store=self.store),))
        namespace = kvtier.Namespace("small", geometry)
        self.cache = kvtier.open(settings, namespace=namespace, shards=RANKS)
        self.ranks = Ranks(model.config, SEED, self.cache, num_blocks=64)
        self.device = CpuDevice()

    def engine(self, *, cached: bool = True, **options) -> Engine:
        settings = {"num_blocks": 64, "prefix_cache": False, "chunk_tokens": CHUNK}
        engine = Engine(self.ranks, **(settings | options))
        if cached:
            pages = self.ranks.pages
            engine.connect(ReferenceConnector(self.cache, None, self.device, pages=pages))
        return engine

    def settle(self, engine: Engine) -> None:
        while not engine.idle:
            engine.step()
        assert self.cache.flush(timeout=20)

    def answer(self, engine: Engine, tokens: list[int]):
        (completion,) = engine.generate([tokens], SAMPLING)
        self.settle(engine)
        return completion

    def right(self, prompts, sampling=SAMPLING) -> list[tuple[int, ...]]:
        """Return what the same ranks answer without a cache."""
        completions = self.engine(cached=False).generate(prompts, sampling)
        return [completion.tokens for completion in completions]

    def close(self) -> None:
        self.ranks.close()
        self.cache.close()
        self.device.close()


@pytest.fixture(scope="module")
def tandem():
    with contextlib.closing(Tandem()) as found:
        for seed in (97, 98, 99):  # so that all threads of the cache have started
            found.answer(found.engine(), prompt(70, seed))
        found.store.writes.clear()
        yield found


def test_ranks_answer_alike_with_and_without_a_cache(tandem):
    talks = [prompt(n, n) for n in (5, 64, 65, 200)]
    right = tandem.right(talks)
    assert len(set(right)) == len(right)
    one = tandem.engine(step_tokens=50)
    for hits in ([0, 0, 0, 0], [0, 48, 64, 192]):
        found = [tandem.answer(one, talk) for talk in talks]
        assert [each.tokens for each in found] == right
        assert [each.finish.stats.hit_tokens.get("dram", 0) for each in found] == hits
    assert len(tandem.store.writes) == RANKS * (1 + 1 + 3)
    assert set(tandem.store.writes.values()) == {1}
    tandem.cache.clear("dram", timeout=5)
    again = tandem.answer(one, talks[3])
    assert again.tokens == right[3]
    assert again.finish.stats.hit_tokens == {"m": 192}


def test_a_lost_shard_gives_both_ranks_the_same_shorter_length(tandem):
    """H12: what one rank lacks, no rank is told of."""
    before = {header.id for header in tandem.store.scan()}
    one = tandem.engine()
    right = tandem.answer(one, prompt(200, 7)).tokens
    tandem.cache.clear("dram", timeout=5)
    fresh = [header for header in tandem.store.scan() if header.id not in before]
    places = {(header.depth, header.part.shard): header.id for header in fresh}
    assert len(places) == RANKS * 3
    tandem.store.delete_many([places[1, 1]])
    again = tandem.answer(one, prompt(200, 7))
    assert again.tokens == right
    assert again.finish.stats.hit_tokens == {"m": CHUNK}


def test_preemption_and_steps_ahead_over_ranks(tandem):
    crowd, sampling = [prompt(40, seed) for seed in range(20, 24)], Sampling(40)
    one = tandem.engine(num_blocks=13, step_tokens=48, ahead=True)
    found = one.generate(crowd, sampling)
    assert [each.tokens for each in found] == tandem.right(crowd, sampling)
    assert any(each.finish.stats.preemptions for each in found)
    tandem.settle(one)
    assert tandem.cache.figures()["kvtier_leased_parts"] == 0


def drained(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def test_a_rank_that_dies_fails_its_copies_and_holds_nothing():
    """P4: what it was to write or read is free again, since it cannot do so any more."""
    with contextlib.closing(Tandem()) as tandem:
        one = tandem.engine()
        tandem.answer(one, prompt(200))
        slots = tandem.cache._depot.arena.slots_in_use
        one.submit(prompt(200), SAMPLING)
        one.submit(prompt(200, 1), SAMPLING)
        tandem.ranks.processes[1].kill()
        with pytest.raises(OSError, match=r"rank . does not answer"):
            drained(one)
        one.close()
        assert tandem.cache.flush(timeout=20)
        assert tandem.cache.figures()["kvtier_leased_parts"] == 0
        assert tandem.cache._depot.arena.slots_in_use == slots


def test_shards_put_together_are_the_model():
    weights = random_weights(small_model().config, SEED)
    kv = [torch.zeros(2, 2, 8, 16, 2, 16, dtype=torch.bfloat16)]
    spans = [Span(prompt(70), 0, [[*range(5)]], logits=70)]
    right = Model(weights).forward(spans, kv)
    parts = [shard_weights(weights, rank, RANKS) for rank in range(RANKS)]
    pools = [torch.zeros(2, 2, 8, 16, 1, 16, dtype=torch.bfloat16) for _ in parts]

    def run(rank, given):
        """Run a rank with what others found before, and return what it found."""
        found = []

        def exchange(partial):
            found.append(partial)
            others = given[len(found) - 1] if len(found) <= len(given) else None
            if others is None:
                raise StopIteration
            return [others, partial] if rank else [partial, others]

        model = RankModel(parts[rank], exchange)
        with contextlib.suppress(StopIteration):
            return found, model.forward(spans, [pools[rank]])
        return found, None

    exchanged = [[], []]
    logits = [None, None]
    while logits[0] is None:
        for rank in range(RANKS):
            exchanged[rank], logits[rank] = run(rank, exchanged[1 - rank])
    torch.testing.assert_close(logits[0], right, rtol=1e-2, atol=1e-2 * float(right.std()))
    for rank in range(RANKS):
        torch.testing.assert_close(
            pools[rank], kv[0][..., rank : rank + 1, :], rtol=0.05, atol=0.05
        )


@pytest.mark.parametrize("ranks", [3, 4])
def test_heads_that_cannot_be_shared_are_refused(ranks):
    with pytest.raises(ConfigError, match="cannot be shared"):
        shard_weights(small_model().weights, 0, ranks)
