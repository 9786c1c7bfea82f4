"""Hybrid models over a real Cache: a hit is as long as every component allows, and exact."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import torch

from kvtier.connectors.base import MISS
from kvtier.engine import Engine, Kind, Sampling
from kvtier.engine.tables import Pools
from kvtier.identity.record import split_record_id
from kvtier.testing.serving import CHUNK, Serving, servings, small_hybrid

WINDOW = 48
SAMPLING, LONG = Sampling(8), Sampling(60)
MIXES = [
    (Kind.WINDOW, Kind.WINDOW),
    (Kind.LATENT, Kind.LATENT),
    (Kind.RECURRENT, Kind.RECURRENT),
    (Kind.FULL, Kind.WINDOW),
    (Kind.RECURRENT, Kind.FULL),
    (Kind.LATENT, Kind.RECURRENT, Kind.WINDOW, Kind.FULL),
]
every_mix = pytest.mark.parametrize(
    "kinds", MIXES, ids=lambda kinds: "-".join(kind.value for kind in kinds)
)
FOUR = MIXES[-1]


def model(kinds):
    torch.set_num_threads(1)
    return small_hybrid(tuple(kinds), WINDOW)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 97, length).tolist())


@functools.cache
def alone(kinds, tokens, sampling=SAMPLING) -> tuple[int, ...]:
    engine = Engine(model(kinds), num_blocks=64, prefix_cache=False, chunk_tokens=CHUNK)
    return engine.generate([tokens], sampling)[0].tokens


@pytest.fixture
def serving():
    """Open engines with caches, closed at the end of the test."""
    with servings() as open_one:
        yield lambda kinds, **options: open_one(model(kinds), **options)


def served(one: Serving, kinds, tokens, sampling=SAMPLING) -> dict[str, int]:
    """Answer a prompt, fail unless that is the right answer, and return the hits."""
    completion = one.answer(tokens, sampling)
    assert completion.tokens == alone(kinds, tuple(tokens), sampling)
    for pool in one.engine._pools.pools:
        assert pool.free == pool.num_blocks
    assert one.cache.figures()["kvtier_leased_parts"] == 0
    return dict(completion.finish.stats.hit_tokens)


@every_mix
def test_a_second_answer_comes_from_the_cache(serving, kinds):
    one = serving(kinds, step_tokens=50)
    talk = (*prompt(200), *alone(kinds, prompt(200), LONG), *prompt(30, 1))
    assert served(one, kinds, prompt(200), LONG) == {}
    assert served(one, kinds, prompt(200)) == {"dram": 192}
    assert served(one, kinds, talk) == {"dram": 256}
    one.cache.clear("dram", timeout=5)
    assert served(one, kinds, talk) == {"memory": 256}
    assert served(one, kinds, prompt(20)) == {}
    assert set(one.store.writes.values()) == {1}


@every_mix
def test_a_branch_hits_what_its_components_have(serving, kinds):
    one = serving(kinds)
    served(one, kinds, prompt(250))
    branch = (*prompt(250)[:150], *prompt(80, 1))
    # States were kept where a step ended on a chunk: at the prompt's last whole one, 192.
    assert served(one, kinds, branch) == ({} if Kind.RECURRENT in kinds else {"dram": 128})
    assert served(one, kinds, prompt(250)) == {"dram": 192}


@pytest.mark.parametrize("kinds", [MIXES[0], MIXES[4]], ids=["windows", "states"])
@pytest.mark.parametrize(
    ("length", "offered"), [(63, 0), (64, 48), (65, 64), (127, 64), (128, 112), (129, 128)]
)
def test_a_full_hit_leaves_a_token_to_compute(serving, kinds, length, offered):
    """H06; a state is only where a chunk ends."""
    one = serving(kinds, step_tokens=64)
    served(one, kinds, prompt(129))
    if Kind.RECURRENT in kinds:
        offered = offered // CHUNK * CHUNK
    assert served(one, kinds, prompt(129)[:length]) == ({"dram": offered} if offered else {})


def lost(one: Serving, component: int, chunk: int) -> None:
    """Forget one part everywhere."""
    one.cache.clear("dram", timeout=5)
    found = [
        header.id
        for header in one.store.scan()
        if (split_record_id(header.id)[1].component, header.depth) == (component, chunk)
    ]
    assert len(found) == 1
    one.store.delete_many(found)


@pytest.mark.parametrize(
    ("kind", "chunk", "hits"),
    [
        (Kind.LATENT, 0, 0),
        (Kind.FULL, 2, 128),
        (Kind.WINDOW, 0, 192),  # passed: nobody needs it
        (Kind.WINDOW, 2, 128),
        (Kind.RECURRENT, 1, 192),
        (Kind.RECURRENT, 2, 128),
    ],
)
def test_a_lost_part_costs_what_it_was_needed_for(serving, kind, chunk, hits):
    """H04: the hit is the longest at which every component has what it needs."""
    one = serving(FOUR, step_tokens=64)
    served(one, FOUR, prompt(200))
    lost(one, FOUR.index(kind), chunk)
    assert sum(served(one, FOUR, prompt(200)).values()) == hits
    assert served(one, FOUR, prompt(200)) == {"dram": 192}


@every_mix
@pytest.mark.parametrize("options", [{"ahead": True}, {"prefix_cache": True}], ids=str)
def test_crowds_that_preempt_each_other_are_answered_right(serving, kinds, options):
    one = serving(kinds, num_blocks=10, num_states=6, step_tokens=48, **options)
    crowd, sampling = [prompt(70, seed) for seed in range(3)], Sampling(30)
    for _ in range(2):
        found = one.engine.generate(crowd, sampling)
        assert [each.tokens for each in found] == [alone(kinds, each, sampling) for each in crowd]
        grows = set(kinds) != {Kind.RECURRENT}  # a state does not
        assert grows == any(each.finish.stats.preemptions for each in found)
        one.settle()
    assert set(one.store.writes.values()) <= {1}
    for pool in one.engine._pools.pools:
        assert pool.free == pool.num_blocks


def test_another_process_would_find_them_on_disk(tmp_path):
    """Windows, latents and states are records like others."""
    url = f"lmdb:{tmp_path}/kv?capacity=64MiB"
    with contextlib.closing(Serving(model(FOUR), below=url)) as first:
        served(first, FOUR, prompt(200))
    with contextlib.closing(Serving(model(FOUR), below=url)) as second:
        assert served(second, FOUR, prompt(200)) == {"lmdb": 192}


def begun(one: Serving, monkeypatch) -> None:
    """Leave 256 tokens in the cache, of which the engine's own prefix cache has 128."""
    served(one, FOUR, prompt(257))
    one.engine.reset_prefix_cache()
    with monkeypatch.context() as patch:
        patch.setattr(one.connector, "match", lambda *_: MISS)
        served(one, FOUR, prompt(129))


def test_a_load_continues_where_the_engines_own_prefix_ends(serving, monkeypatch):
    one = serving(FOUR, prefix_cache=True, step_tokens=64)
    begun(one, monkeypatch)
    assert served(one, FOUR, prompt(257)) == {"hbm": 128, "dram": 128}


def half(one: Serving, monkeypatch) -> tuple[int, ...]:
    """Break a load off after it has written something; return the answer all the same."""
    state = one.engine.kv[FOUR.index(Kind.RECURRENT)]
    nbytes = state[0, 0, 0].numel() * state.element_size()

    def broken(copy, *, into_slot):
        if not into_slot and copy.pages.shape[2] == nbytes:
            copy.pages[:, list(copy.blocks)] = 0x42
            raise OSError("the link is down")

    begun(one, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("kvtier.device.cpu._copy", broken)
        completion = one.answer(prompt(257), SAMPLING)
    assert completion.finish.stats.hit_tokens == {"hbm": 128}
    return completion.tokens


def test_a_load_that_fails_begins_where_the_engines_own_prefix_ends(serving, monkeypatch):
    one = serving(FOUR, prefix_cache=True, step_tokens=64)
    assert half(one, monkeypatch) == alone(FOUR, prompt(257))
    assert served(one, FOUR, prompt(257)) == {"hbm": 256}


def test_twin_a_state_that_a_failed_load_spoilt_gives_a_wrong_answer(serving, monkeypatch):
    one = serving(FOUR, prefix_cache=True, step_tokens=64)
    loaded = one.engine._scheduler._loaded

    def unrestored(request, settled):
        loaded(request, settled)
        one.engine._scheduler._admitted.clear()

    monkeypatch.setattr(one.engine._scheduler, "_loaded", unrestored)
    assert half(one, monkeypatch) != alone(FOUR, prompt(257))


def test_windows_keep_their_blocks_while_a_save_reads_them(serving):
    kinds = (Kind.FULL, Kind.WINDOW)
    one = serving(kinds, step_tokens=64)
    with one.held("store"):
        request = one.engine._scheduler.find(one.engine.submit(prompt(300), LONG))
        while request.count < 310:
            one.engine.step()
        assert request.table.trimmed[1] == 0
    while request.count < 330:
        one.engine.step()
    assert request.table.trimmed[1]
    one.settle()
    assert served(one, kinds, prompt(300)) == {"dram": 256}


def test_twin_a_window_that_lets_go_in_mid_save_spoils_what_is_saved(serving, monkeypatch):
    kinds = (Kind.WINDOW, Kind.WINDOW)
    one = serving(kinds, step_tokens=64, num_blocks=24)
    monkeypatch.setattr(one.connector, "saving", lambda request_id: False)
    with one.held("store"):
        one.engine.submit(prompt(300), LONG)
        for _ in range(8):
            one.engine.step()
        one.engine.submit(prompt(60, 1), LONG)
        for _ in range(4):
            one.engine.step()
    one.settle()
    lengths = (129, 193, 257)
    answers = [one.answer(prompt(300)[:length], SAMPLING).tokens for length in lengths]
    assert answers != [alone(kinds, prompt(300)[:length]) for length in lengths]


def saved_again(one: Serving, monkeypatch) -> tuple[int, ...]:
    """Save what a load brought, after it was lost everywhere; return an answer that rests on it."""
    kinds = (Kind.WINDOW, Kind.FULL)
    served(one, kinds, prompt(200))
    for pool in one.engine.kv:
        pool.fill_(30.0)
    loaded = one.engine._scheduler._loaded

    def lose_all(request, settled):
        for tier in ("dram", "memory"):
            one.cache.clear(tier, timeout=5)
        loaded(request, settled)

    with monkeypatch.context() as patch:
        patch.setattr(one.engine._scheduler, "_loaded", lose_all)
        assert served(one, kinds, prompt(200)) == {"dram": 192}
    completion = one.answer(prompt(200)[:192], SAMPLING)
    assert completion.finish.stats.hit_tokens == {"dram": 176}
    return completion.tokens


def test_a_window_is_loaded_in_whole_chunks(serving, monkeypatch):
    """Though only its last tokens are looked at: the chunk may have to be saved again."""
    kinds = (Kind.WINDOW, Kind.FULL)
    assert saved_again(serving(kinds), monkeypatch) == alone(kinds, prompt(200)[:192])


def test_twin_a_chunk_that_was_loaded_in_part_is_saved_with_what_lay_there(serving, monkeypatch):
    kinds = (Kind.WINDOW, Kind.FULL)
    monkeypatch.setattr(
        Pools,
        "_reached",
        lambda self, one, computed: max(computed - one.window, 0) // self.block_tokens,
    )
    monkeypatch.setattr(Pools, "trim", lambda self, table, computed: None)
    assert saved_again(serving(kinds), monkeypatch) != alone(kinds, prompt(200)[:192])
