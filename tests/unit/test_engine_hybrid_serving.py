"""Serving hybrid models: the same answers whatever is cut, preempted, shared or kept."""

from __future__ import annotations

import functools

import pytest
import torch

from kvtier.connectors.base import Loaded, Match, Update
from kvtier.engine import (
    Engine,
    Kind,
    Sampling,
    prompt_lookup,
)
from kvtier.engine.tables import ABSENT, Hit, Pools
from kvtier.errors import ConfigError
from kvtier.identity.geometry import Needs
from kvtier.testing.serving import prompt, small_hybrid

CHUNK = 64
MIXES = [
    (Kind.WINDOW, Kind.WINDOW),
    (Kind.LATENT, Kind.WINDOW),
    (Kind.RECURRENT, Kind.FULL),
    (Kind.RECURRENT, Kind.RECURRENT),
    (Kind.LATENT, Kind.RECURRENT, Kind.WINDOW, Kind.FULL),
]
every_mix = pytest.mark.parametrize(
    "kinds", MIXES, ids=lambda kinds: "-".join(kind.value for kind in kinds)
)
SAMPLING = Sampling(20)


def model(kinds):
    torch.set_num_threads(1)
    return small_hybrid(tuple(kinds), 40)


PROMPTS = [prompt(n, n) for n in (1, 15, 64, 65, 130)] + [prompt(130, 130)[:100] + prompt(40, 5)]


def engine_of(kinds, **options) -> Engine:
    return Engine(model(kinds), **{"num_blocks": 64, "chunk_tokens": CHUNK, **options})


@functools.cache
def alone(kinds, sampling=SAMPLING):
    engine = engine_of(kinds, prefix_cache=False)
    return [engine.generate([each], sampling)[0].tokens for each in PROMPTS]


def drained(engine: Engine) -> None:
    while not engine.idle:
        engine.step()
    for pool in engine._pools.pools:
        assert pool.free == pool.num_blocks


@every_mix
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 13, "step_tokens": 37, "max_running": 3},
        {"num_states": 2, "step_tokens": 20},
        {"ahead": True, "num_blocks": 13, "num_states": 3, "step_tokens": 50},
    ],
    ids=str,
)
def test_nothing_but_the_prompt_decides_the_answer(kinds, options):
    engine = engine_of(kinds, **options)
    for _ in range(2):
        completions = engine.generate(PROMPTS, SAMPLING)
        assert [each.tokens for each in completions] == alone(kinds)
        drained(engine)


@every_mix
def test_preempted_requests_give_the_same_answer(kinds):
    sampling = Sampling(40)
    prompts = [prompt(40, seed) for seed in range(3)]
    roomy = [each.tokens for each in engine_of(kinds).generate(prompts, sampling)]
    for options in ({}, {"ahead": True}):
        engine = engine_of(kinds, num_blocks=9, num_states=4, step_tokens=48, **options)
        found = engine.generate(prompts, sampling)
        assert [each.tokens for each in found] == roomy
        grows = set(kinds) != {Kind.RECURRENT}  # a state does not
        assert grows == any(each.finish.stats.preemptions for each in found)
        drained(engine)


@every_mix
def test_a_prefix_hit_is_as_long_as_every_component_allows(kinds):
    engine = engine_of(kinds)
    engine.generate([prompt(200)], Sampling(1))
    (again,) = engine.generate([prompt(200)], SAMPLING)
    assert [again.tokens] == [engine_of(kinds).generate([prompt(200)], SAMPLING)[0].tokens]
    assert again.finish.stats.hit_tokens == {"hbm": 192}
    (branch,) = engine.generate([prompt(150) + prompt(50, 1)], SAMPLING)
    states = Kind.RECURRENT in kinds  # one is kept where a step ended on a chunk: only at 192
    assert branch.finish.stats.hit_tokens == ({} if states else {"hbm": 144})


def test_windows_let_go_of_whole_chunks_as_they_move_on():
    engine = engine_of((Kind.LATENT, Kind.WINDOW), prefix_cache=False)
    request_id = engine.submit(prompt(130), Sampling(200))
    request = engine._scheduler.find(request_id)
    latent, window = engine._pools.pools
    while request.count < 330:
        engine.step()
        if request.table is None:
            break
        passed = max(request.computed - 40, 0) // CHUNK * CHUNK // 16
        assert request.table.places[1][:passed] == [ABSENT] * passed
        assert ABSENT not in request.table.places[1][passed:]
        assert ABSENT not in request.table.places[0]
        assert latent.free == 64 - len(request.table.places[0])
        assert window.free == 64 - len(request.table.places[1]) + passed


@pytest.mark.parametrize(("step_tokens", "kept"), [(512, [192]), (64, [64, 128, 192]), (50, [192])])
def test_states_are_kept_where_steps_end_on_chunks(step_tokens, kept):
    """And always at the prompt's last whole chunk, where the next request will want one."""
    engine = engine_of((Kind.RECURRENT, Kind.FULL), step_tokens=step_tokens)
    request = engine._scheduler.find(engine.submit(prompt(200), Sampling(100)))
    while request.count < 201:
        engine.step()
    ends = [(at + 1) * CHUNK for at, slot in enumerate(request.table.places[0]) if slot != ABSENT]
    assert ends == kept
    while request.count < 256:
        engine.step()
    assert len(request.table.places[0]) == 3, "its last token is not computed yet"
    engine.step()
    assert request.table.places[0][3] != ABSENT


def test_without_a_free_slot_no_state_is_kept():
    engine = engine_of((Kind.RECURRENT, Kind.RECURRENT), num_states=1)
    for _ in range(2):
        (found,) = engine.generate([prompt(200)], Sampling(5))
        assert found.finish.stats.hit_tokens == {}


def test_twin_a_hit_that_looks_at_full_attention_alone_is_wrong(monkeypatch):
    """Why each component is asked: its window's blocks, or its state, may be gone."""
    kinds = (Kind.FULL, Kind.WINDOW)
    talk = prompt(100, 7)
    right = engine_of(kinds).generate([talk], SAMPLING)[0].tokens

    def served() -> tuple[int, ...]:
        engine = engine_of(kinds)
        engine.generate([talk], Sampling(1))
        engine._pools.pools[1].reset()
        for pool in engine.kv[1:]:
            pool.fill_(1.0)
        return engine.generate([talk], SAMPLING)[0].tokens

    def careless(self, keys):
        known = self.pools[0].match(keys)
        return Hit(len(known), (known, [ABSENT] * len(known)))

    assert served() == right
    monkeypatch.setattr(Pools, "find", careless)
    assert served() != right


def test_twin_a_hit_without_its_state_is_wrong(monkeypatch):
    kinds = (Kind.RECURRENT, Kind.FULL)
    engine = engine_of(kinds)
    right = engine.generate([prompt(130)], SAMPLING)[0].tokens
    assert engine.generate([prompt(130)], SAMPLING)[0].tokens == right
    monkeypatch.setattr(Pools, "restores", lambda self, table: [])
    assert engine.generate([prompt(1, 2), prompt(130)], SAMPLING)[1].tokens != right


def test_drafts_go_with_windows_and_not_with_states():
    kinds = (Kind.LATENT, Kind.WINDOW)
    engine = engine_of(kinds, drafter=prompt_lookup)
    completions = engine.generate(PROMPTS, SAMPLING)
    assert [each.tokens for each in completions] == alone(kinds)
    with pytest.raises(ConfigError, match="recurrent"):
        engine_of((Kind.RECURRENT, Kind.FULL), drafter=prompt_lookup)


@pytest.mark.parametrize("wrong", [{"chunk_tokens": 24}, {"chunk_tokens": 0}, {"num_states": 0}])
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        engine_of((Kind.RECURRENT, Kind.FULL), **wrong)


def test_kv_is_a_pool_for_each_component():
    engine = engine_of((Kind.LATENT, Kind.RECURRENT, Kind.WINDOW), num_states=5)
    assert [tuple(each.shape) for each in engine.kv] == [
        (1, 1, 64, 16, 1, 32),
        (1, 1, 5, 4, 256),
        (1, 2, 64, 16, 2, 16),
    ]
    assert [one.needs for one in engine.model.components] == [Needs.ALL, Needs.LAST, Needs.TRAILING]


# ----------------------------------------------------------------------------------- loads in part


class Halfway:
    """A connector that has every prompt's first 128 tokens, and claims `valid` of them loaded."""

    def __init__(self, engine: Engine, valid: int) -> None:
        self.kv, self.valid = engine.kv, valid
        self.kept = None
        self.loading = []

    def match(self, request_id, tokens, computed, identity=None) -> Match:
        return Match(128 if self.kept else 0)

    def load(self, request_id, places) -> None:
        for pool, kept, ids in zip(self.kv, self.kept, places, strict=True):
            pool.fill_(1.0)  # what is not loaded is another's
            here = [at for at, place in enumerate(ids) if place != ABSENT]
            pool[:, :, [ids[at] for at in here]] = kept[:, :, here]
        self.loading.append(Loaded(request_id, self.valid))

    def poll(self) -> Update:
        loaded, self.loading = tuple(self.loading), []
        return Update(loaded)

    def save(self, request_id, tokens, places, identity=None) -> None:
        if self.kept is None and len(tokens) == 128:
            states = [pool.dim() == 5 for pool in self.kv]
            ids = [each[-1:] if one else each for each, one in zip(places, states, strict=True)]
            self.kept = [pool[:, :, list(x)].clone() for pool, x in zip(self.kv, ids, strict=True)]

    def computed(self, spans, seconds) -> None:
        assert all(0 <= start < stop for start, stop in spans)
        assert seconds >= 0

    def landing(self, request_id) -> None:
        pass

    def leaving(self, *offer) -> None:
        pass

    def saving(self, request_id) -> bool:
        return False

    def wait(self, seconds) -> None:
        pass

    def finish(self, request_id) -> bool:
        return False

    def close(self) -> None:
        pass


@pytest.mark.parametrize("kinds", [(Kind.RECURRENT, Kind.FULL), (Kind.WINDOW, Kind.LATENT)])
def test_half_a_load_of_a_hybrid_model_is_nothing(kinds, monkeypatch):
    """And the twin: what a shorter prefix needs is not what was loaded."""
    (right,) = engine_of(kinds).generate([prompt(200)], SAMPLING)

    def served(valid: int):
        engine = engine_of(kinds, prefix_cache=False, step_tokens=64)
        engine.connect(Halfway(engine, valid))
        engine.generate([prompt(200)], Sampling(1))
        (found,) = engine.generate([prompt(200)], SAMPLING)
        return found.tokens, found.finish.stats.hit_tokens

    assert served(128) == (right.tokens, {"unknown": 128})
    assert served(32) == (right.tokens, {})
    monkeypatch.setattr(Pools, "whole", True)
    tokens, _ = served(32)
    assert tokens != right.tokens
