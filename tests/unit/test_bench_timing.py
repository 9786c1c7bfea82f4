"""An engine that is a clock: time passes as told, and its answers depend on all KV before them."""

from __future__ import annotations

import pytest

from kvtier.bench.timing import TimingClock, TimingModel
from kvtier.engine import Engine, Sampling

SECONDS = 0.5  # a token


@pytest.fixture
def served():
    """Return an engine on a clock, and a function that serves one prompt."""
    clock = TimingClock()
    engine = Engine(TimingModel(SECONDS, clock), num_blocks=64, clock=clock)

    def serve(tokens, count=3):
        [answer] = engine.generate([tokens], Sampling(max_tokens=count))
        return answer

    yield engine, serve
    engine.close()


def test_a_prompt_takes_the_time_that_was_told(served):
    _, serve = served
    stats = serve(list(range(40))).finish.stats
    assert stats.first_token - stats.submitted == pytest.approx(40 * SECONDS, rel=0.2)
    again = serve(list(range(40))).finish.stats
    assert again.hit_tokens == {"hbm": 32}
    assert again.first_token - again.submitted == pytest.approx(8 * SECONDS, rel=0.2)


def test_waiting_takes_no_time_of_ours():
    clock = TimingClock()
    before = clock()
    clock.skip(1000.0)
    clock.skip(-5.0)
    assert 1000.0 <= clock() - before < 1100.0


def test_answers_are_the_same_with_the_pool_and_without(served):
    engine, serve = served
    first = serve(list(range(40))).tokens
    assert serve(list(range(40))).tokens == first
    engine.reset_prefix_cache()
    assert serve(list(range(40))).tokens == first


@pytest.mark.parametrize("token", [0, 15, 31])
def test_another_kv_is_another_answer(served, token):
    engine, serve = served
    first = serve(list(range(40))).tokens
    blocks = engine.kv[0][0, 0].flatten(0, 1)
    where = (blocks == (token * 31 + token * 17) % 251)[:, 0].nonzero().flatten()
    assert len(where)
    blocks[where[0]] += 1  # as if another's bytes had been loaded there
    assert serve(list(range(40))).tokens != first


def test_another_order_is_another_answer(served):
    _, serve = served
    ahead, back = list(range(16)), list(range(16, 32))
    assert serve([*ahead, *back, 1]).tokens != serve([*back, *ahead, 1]).tokens
