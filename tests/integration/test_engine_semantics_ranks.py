"""Two spawned ranks, one scheduler, one Cache: the same answers with it and without."""

from __future__ import annotations

import contextlib
import itertools
from unittest import mock

import pytest
import torch

import kvtier
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.cpu import CpuDevice
from kvtier.engine import (
    Engine,
    Kind,
    Sampling,
    Span,
    random_hybrid,
)
from kvtier.engine.ranks import RankModel
from kvtier.errors import ConfigError
from kvtier.identity.geometry import Needs
from kvtier.testing.ranked import KINDS, RANKS, SHAPE, Ranks, shared_arena
from kvtier.testing.serving import CHUNK, GatedStore, prompt
from kvtier.testing.torch_forks import TorchForks

SAMPLING = Sampling(max_tokens=8)
SEED = 1


class Tandem:
    """Two ranks of a model with every kind of layer, and a cache; engines come and go."""

    def __init__(self, forks: TorchForks) -> None:
        components = random_hybrid(SHAPE, SEED).components
        geometry = kvtier.Geometry(components, chunk_tokens=CHUNK)
        self.store = GatedStore()
        settings = kvtier.Config(16 << 20, (kvtier.TierConfig("m", "", None, store=self.store),))
        namespace = kvtier.Namespace("small", geometry)
        with mock.patch("kvtier.depot.Arena", shared_arena):
            self.cache = kvtier.open(settings, namespace=namespace, shards=RANKS)
        self.ranks = Ranks(SHAPE, SEED, self.cache, forks=forks, num_blocks=64, num_states=16)
        self.device = CpuDevice()

    def engine(self, *, cached: bool = True, **options) -> Engine:
        settings = {"num_blocks": 64, "num_states": 16, "prefix_cache": False}
        engine = Engine(self.ranks, chunk_tokens=CHUNK, **(settings | options))
        if cached:
            pages = self.ranks.pages
            engine.connect(
                ReferenceConnector(self.cache, None, self.device, pages=pages, always=True)
            )
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
def tandem(torch_forks):
    with contextlib.closing(Tandem(torch_forks)) as found:
        for seed in (97, 98, 99):  # so that all threads of the cache have started
            found.answer(found.engine(), prompt(70, seed))
        found.store.writes.clear()
        yield found


def test_ranks_answer_alike_with_and_without_a_cache(tandem):
    talks = [prompt(n, n) for n in (5, 64, 65, 200)]
    right = tandem.right(talks)
    assert len(set(right)) == len(right)
    one = tandem.engine(step_tokens=64)
    for hits in ([0, 0, 0, 0], [0, 0, 64, 192]):
        found = [tandem.answer(one, talk) for talk in talks]
        assert [each.tokens for each in found] == right
        assert [each.finish.stats.hit_tokens.get("dram", 0) for each in found] == hits
    tandem.cache.clear("dram", timeout=5)
    again = tandem.answer(one, talks[3])
    assert again.tokens == right[3]
    assert again.finish.stats.hit_tokens == {"m": 192}


def records(tandem, before) -> dict[tuple[Kind, int, int], bytes]:
    """Return the records that came since, by kind, chunk and shard."""
    fresh = [header for header in tandem.store.scan() if header.id not in before]
    return {(KINDS[each.part.component], each.depth, each.part.shard): each.id for each in fresh}


@pytest.mark.parametrize(
    ("lost", "hits"), [((Kind.FULL, 1, 1), 64), ((Kind.RECURRENT, 2, 0), 128), (None, 192)]
)
def test_a_lost_shard_gives_both_ranks_the_same_shorter_length(tandem, lost, hits):
    """H12: what one rank lacks, no rank is told of. H23: the latent is stored once."""
    before = {header.id for header in tandem.store.scan()}
    one, talk = tandem.engine(step_tokens=64), prompt(200, 1000 + hits)
    right = tandem.answer(one, talk).tokens
    found = records(tandem, before)
    assert sorted(found, key=str) == sorted(
        (
            (kind, chunk, shard)
            for kind in KINDS
            for chunk in range(3)
            for shard in range(1 if kind is Kind.LATENT else RANKS)
        ),
        key=str,
    )
    tandem.cache.clear("dram", timeout=5)
    if lost:
        tandem.store.delete_many([found[lost]])
    again = tandem.answer(one, talk)
    assert again.tokens == right
    assert sum(again.finish.stats.hit_tokens.values()) == hits


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


def test_a_rank_that_dies_fails_its_copies_and_holds_nothing(torch_forks):
    """P4: what it was to write or read is free again, since it cannot do so any more."""
    with contextlib.closing(Tandem(torch_forks)) as tandem:
        one = tandem.engine()
        tandem.answer(one, prompt(200))
        slots = tandem.cache._desk.depot.arena.slots_in_use
        one.submit(prompt(200), SAMPLING)
        one.submit(prompt(200, 1), SAMPLING)
        tandem.ranks.processes[1].kill()
        with pytest.raises(OSError, match=r"rank . does not answer"):
            drained(one)
        one.close()
        assert tandem.cache.flush(timeout=20)
        assert tandem.cache.figures()["kvtier_leased_parts"] == 0
        assert tandem.cache._desk.depot.arena.slots_in_use == slots


def pools(model, blocks=8):
    """Return zeroed pools for a model's components."""

    def shape(one):
        places = (2,) if one.needs is Needs.LAST else (blocks, 16)
        return (one.layers, one.planes, *places, one.heads, one.head_size)

    return [torch.zeros(shape(one), dtype=torch.bfloat16) for one in model.components]


class Swap:
    """Hand partial sums between ranks that run one after the other, again and again.

    Each run gets one exchange further, with what the other rank found in the run before.
    """

    def __init__(self) -> None:
        self.found: list[list[torch.Tensor]] = [[] for _ in range(RANKS)]

    def __call__(self, rank: int, at: int, partial: torch.Tensor) -> list[torch.Tensor]:
        self.found[rank][at:] = [partial]
        if any(len(each) <= at for each in self.found):
            raise BlockingIOError
        return [each[at] for each in self.found]


def test_shards_put_together_are_the_model():
    torch.set_num_threads(1)
    whole = random_hybrid(SHAPE, SEED)
    kv = pools(whole)
    tables = [[1] if one.needs is Needs.LAST else [*range(5)] for one in whole.components]
    spans = [Span(prompt(70), 0, tables, logits=70)]
    right = whole.forward(spans, kv)
    swap, logits, kept = Swap(), [None] * RANKS, [None] * RANKS
    while logits[RANKS - 1] is None:
        for rank in range(RANKS):
            count = itertools.count()
            model = RankModel(
                whole, rank, RANKS, lambda part, r=rank, c=count: swap(r, next(c), part)
            )
            kept[rank] = pools(model)
            with contextlib.suppress(BlockingIOError):
                logits[rank] = model.forward(spans, kept[rank])
    assert torch.equal(logits[0], logits[1])
    torch.testing.assert_close(logits[0], right, rtol=1e-2, atol=2e-2 * float(right.std()))
    latent = KINDS.index(Kind.LATENT)
    assert torch.equal(kept[0][latent], kept[1][latent])
    assert kept[0][latent].shape == kv[latent].shape


@pytest.mark.parametrize("ranks", [3, 4])
def test_heads_that_cannot_be_shared_are_refused(ranks):
    with pytest.raises(ConfigError, match="cannot be shared"):
        RankModel(random_hybrid(SHAPE, SEED), 0, ranks, lambda partial: [partial])
