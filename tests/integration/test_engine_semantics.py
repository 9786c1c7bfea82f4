"""What engines do to a cache: full hits, cut prompts, preemption and aborts in mid-copy.

A real engine over a real Cache. Every answer is compared with that of the engine alone.
"""

from __future__ import annotations

import functools
import time

import pytest
import torch

from kvtier.engine import Sampling
from kvtier.engine.request import Phase
from kvtier.testing.serving import Serving, alone, one_model, prompt, servings

SAMPLING = Sampling(max_tokens=8)
LONG = Sampling(max_tokens=60)


@pytest.fixture
def serving():
    """Open engines with caches, closed at the end of the test."""
    with servings() as open_one:
        yield functools.partial(open_one, one_model())


def run(one: Serving, prompts: list[list[int]], sampling: Sampling) -> list[tuple[int, ...]]:
    """Serve prompts together, to their end, without waiting for their copies."""
    answers = [completion.tokens for completion in one.engine.generate(prompts, sampling)]
    assert answers == [alone(tokens, sampling) for tokens in prompts]
    return answers


def free(one: Serving) -> int:
    return one.engine._pools.pools[0].free


def steps(one: Serving, until) -> None:
    """Run steps until `until()` holds; fail if that takes too many."""
    for _ in range(1000):
        if until():
            return
        one.engine.step()
    pytest.fail("it never came")


# ----------------------------------------------------------------------------- lengths of a hit


@pytest.mark.parametrize(
    ("length", "offered"), [(63, 0), (64, 48), (65, 64), (127, 64), (128, 112), (129, 128)]
)
def test_a_full_hit_leaves_a_token_to_compute(serving, length, offered):
    """H06: whole blocks, never the last token of the prompt, never more than whole chunks."""
    one = serving()
    one.answer(prompt(129), Sampling(1))
    again = one.answer(prompt(129)[:length], SAMPLING)
    assert again.finish.stats.hit_tokens.get("dram", 0) == offered
    assert again.finish.stats.recomputed_tokens == length - offered
    assert again.tokens == alone(prompt(129)[:length])


def test_a_partial_last_block_is_computed_again(serving):
    one = serving()
    for _ in range(2):
        completion = one.answer(prompt(135), SAMPLING)
        assert completion.tokens == alone(prompt(135))
    assert completion.finish.stats.hit_tokens == {"dram": 128}
    assert completion.finish.stats.recomputed_tokens == 7
    assert one.saved_chunks == 2


@pytest.mark.parametrize("length", [5, 63, 64])
def test_a_match_of_nothing_loads_nothing(serving, length):
    one = serving()
    for seed in range(2):
        completion = one.answer(prompt(length, seed), Sampling(1))
        assert completion.finish.stats.hit_tokens == {}
        assert completion.tokens == alone(prompt(length, seed), Sampling(1))
    assert one.cache.figures()["kvtier_leased_parts"] == 0


def test_what_the_engine_has_itself_is_not_loaded(serving):
    one = serving(prefix_cache=True)
    one.answer(prompt(129), SAMPLING)
    again = one.answer(prompt(129), SAMPLING)
    assert again.finish.stats.hit_tokens == {"hbm": 128}
    assert again.tokens == alone(prompt(129))
    assert one.cache.figures()["kvtier_leased_parts"] == 0


def test_a_load_continues_where_the_engines_own_blocks_end(serving):
    one = serving(prefix_cache=True)
    one.answer(prompt(200), Sampling(1))
    one.engine.reset_prefix_cache()
    one.answer(prompt(200)[:40], Sampling(1))  # two blocks of its first chunk are in HBM again
    again = one.answer(prompt(200), SAMPLING)
    assert again.finish.stats.hit_tokens == {"hbm": 32, "dram": 160}
    assert again.tokens == alone(prompt(200))


# -------------------------------------------------------------------------------- what is saved


@pytest.mark.parametrize("step_tokens", [7, 24, 64, 512])
def test_chunked_prefill_saves_each_chunk_once(serving, step_tokens):
    one = serving(step_tokens=step_tokens)
    for _ in range(3):
        assert one.answer(prompt(250), SAMPLING).tokens == alone(prompt(250))
    assert one.saved_chunks == 4  # three of the prompt, and one that the output completed
    assert sorted(one.store.writes.values()) == [1] * 4


def test_a_chunk_of_output_is_found_by_the_next_turn(serving):
    one = serving()
    first = one.answer(prompt(40), LONG)
    talk = [*prompt(40), *first.tokens, *prompt(20, 1)]
    second = one.answer(talk, SAMPLING)
    assert second.finish.stats.hit_tokens == {"dram": 64}
    assert second.tokens == alone(talk)


# ---------------------------------------------------------------------------------- preemption

CROWD = [prompt(70, seed) for seed in range(5)]


def test_preempted_requests_come_back_from_the_cache(serving):
    one = serving(num_blocks=18, step_tokens=48)
    completions = one.engine.generate(CROWD, LONG)
    assert [each.tokens for each in completions] == [alone(each, LONG) for each in CROWD]
    assert sum(each.finish.stats.preemptions for each in completions)
    one.settle()
    assert free(one) == 18
    assert one.cache.figures()["kvtier_leased_parts"] == 0
    assert set(one.store.writes.values()) == {1}
    for each in CROWD:
        assert one.answer(each, LONG).tokens == alone(each, LONG)


def test_a_request_is_preempted_while_its_save_is_in_flight(serving):
    """H15: the key has the request's own bytes or none, never those of who got its blocks."""
    one = serving(num_blocks=18, step_tokens=48)
    with one.held("store"):
        for each in CROWD:
            one.engine.submit(each, LONG)
        steps(one, lambda: one.engine._scheduler.held)
        preempted = list(one.engine._scheduler._held)
        for _ in range(20):
            one.engine.step()
        for request_id in preempted:
            victim = one.engine._scheduler.find(request_id)
            assert victim.preemptions == 1
            assert victim.table is None, "admitted again while its save is in flight"
    one.settle()
    for each in CROWD:
        assert one.answer(each, LONG).tokens == alone(each, LONG)


def test_twin_blocks_given_away_in_mid_save_are_stored_under_the_wrong_key(serving, monkeypatch):
    one = serving(num_blocks=18, step_tokens=48)
    finish = one.connector.finish
    monkeypatch.setattr(one.connector, "finish", lambda request_id: finish(request_id) and False)
    with one.held("store"):
        for each in CROWD:
            one.engine.submit(each, LONG)
        steps(one, lambda: not one.engine.unfinished)
    one.settle()
    answers = [one.answer(each, LONG).tokens for each in CROWD]
    assert answers != [alone(each, LONG) for each in CROWD]


def test_blocks_run_out_while_a_load_is_in_flight(serving):
    """Others are preempted, and wait for their own loads; blocks being filled are nobody else's."""
    one = serving(num_blocks=22, step_tokens=48)
    one.answer(prompt(129, 9), SAMPLING)
    asked = [(prompt(129, 9), SAMPLING), *((each, LONG) for each in CROWD)]
    with one.held("load"):
        ids = [one.engine.submit(*each) for each in asked]
        requests = [one.engine._scheduler.find(each) for each in ids]
        steps(one, lambda: any(each.preemptions for each in requests))
        for _ in range(10):
            one.engine.step()
        assert requests[0].phase is Phase.LOADING
        assert requests[0].preemptions == 0
    one.settle()
    for request, each in zip(requests, asked, strict=True):
        assert tuple(request.tokens[request.prompt_tokens :]) == alone(*each)
    assert free(one) == 22


# -------------------------------------------------------------------------- aborts and deferrals


def test_blocks_are_freed_when_the_last_copy_has_read_them(serving):
    one = serving()
    with one.held("store"):
        run(one, [prompt(129)], SAMPLING)
        assert free(one) == 64 - 9
        assert not one.engine.idle
        run(one, [prompt(129, 1)], SAMPLING)
    one.settle()
    assert free(one) == 64
    for seed in range(2):
        assert one.answer(prompt(129, seed), SAMPLING).tokens == alone(prompt(129, seed))


def aborted_in_mid_load(one: Serving) -> int:
    """Abort a load in flight, then fill the pool; return how many blocks that request got."""
    one.answer(prompt(129), SAMPLING)
    with one.held("load"):
        request_id = one.engine.submit(prompt(129), SAMPLING)
        one.engine.step()
        one.engine.abort(request_id)
        kept = one.engine._pools.pools[0].num_blocks - free(one)
        one.engine.submit(prompt(129, 5), SAMPLING)
        for _ in range(4):  # it computes at once where it can have blocks
            one.engine.step()
    return kept


def test_an_aborted_load_keeps_its_blocks_until_it_has_settled(serving):
    """H16 (a): reported once, and nothing is written into blocks that were handed back."""
    one = serving(num_blocks=12)
    assert aborted_in_mid_load(one) == 9
    released = []
    poll = one.connector.poll
    one.connector.poll = lambda: released.append(poll()) or released[-1]
    outputs = []
    while one.engine.unfinished:
        outputs += one.engine.step()
    one.settle()
    assert tuple(o.token for o in outputs if o.token is not None) == alone(prompt(129, 5))
    assert sum(update.released.count("request-1") for update in released) == 1
    assert not any(update.loaded for update in released)
    assert free(one) == 12


def test_twin_a_late_write_reaches_the_next_owner(serving, monkeypatch):
    one = serving(num_blocks=12)
    finish = one.connector.finish
    monkeypatch.setattr(one.connector, "finish", lambda request_id: finish(request_id) and False)
    aborted_in_mid_load(one)
    outputs = []
    while one.engine.unfinished:
        outputs += one.engine.step()
    assert tuple(o.token for o in outputs if o.token is not None) != alone(prompt(129, 5))


def test_a_read_that_never_returns_costs_a_miss_and_no_block(serving, monkeypatch):
    """H16 (b): given up at the deadline; when it returns at last, it reaches no block."""
    monkeypatch.setattr("kvtier.connectors.reference._FETCH_SECONDS", 0.05)
    one = serving()
    one.answer(prompt(129), SAMPLING)
    one.cache.clear("dram", timeout=5)
    one.store.open_gate.clear()
    request_id = one.engine.submit(prompt(129), SAMPLING)
    one.engine.step()
    assert one.store.reading.wait(20)
    one.engine.abort(request_id)
    assert free(one) == 64
    again = list(one.engine.stream(prompt(129), SAMPLING))
    assert tuple(output.token for output in again) == alone(prompt(129))
    assert again[-1].finish.stats.hit_tokens == {}
    before = one.engine.kv[0].clone()
    one.store.open_gate.set()
    one.settle()
    assert torch.equal(one.engine.kv[0], before)
    assert one.answer(prompt(129), SAMPLING).finish.stats.hit_tokens
    deadline = time.monotonic() + 10
    while one.cache.figures()["kvtier_leased_parts"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert one.cache.figures()["kvtier_leased_parts"] == 0
