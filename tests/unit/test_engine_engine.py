"""The engine without a cache below: batching, prefix hits, preemption, streams, refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kvtier.engine import Engine, Model, Sampling
from kvtier.engine.compute import CpuCompute
from kvtier.engine.sampler import Chosen, draw
from kvtier.errors import ConfigError, MisuseError
from kvtier.testing.serving import one_model, prompt

GREEDY = Sampling(max_tokens=12)


@pytest.fixture(scope="module")
def model() -> Model:
    return one_model()


def answers(engine: Engine, prompts: list[list[int]], sampling: Sampling) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in engine.generate(prompts, sampling)]


def drained(engine: Engine) -> list:
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
    return outputs


PROMPTS = [prompt(n, n) for n in (1, 15, 16, 17, 70, 130)]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_outputs_do_not_depend_on_budget_batch_or_cache(model, temperature):
    sampling = Sampling(12, temperature=temperature, seed=7)
    alone = [
        answers(Engine(model, num_blocks=64, prefix_cache=False), [p], sampling)[0] for p in PROMPTS
    ]
    assert len(set(alone)) == len(alone)
    for step_tokens, max_running in ((512, 32), (7, 2), (33, 6)):
        engine = Engine(model, num_blocks=64, step_tokens=step_tokens, max_running=max_running)
        assert answers(engine, PROMPTS, sampling) == alone
        assert answers(engine, PROMPTS[::-1], sampling) == alone[::-1]  # now from its own cache


def test_a_prefix_hit_is_counted_and_leaves_one_token_to_compute(model):
    engine = Engine(model, num_blocks=64)
    first, again = (engine.generate([prompt(64)], GREEDY)[0] for _ in range(2))
    assert first.tokens == again.tokens
    assert first.finish.stats.hit_tokens == {}
    assert first.finish.stats.recomputed_tokens == 64
    assert again.finish.stats.hit_tokens == {"hbm": 48}
    assert again.finish.stats.recomputed_tokens == 16


def test_reset_and_the_switch_leave_no_hits(model):
    engine = Engine(model, num_blocks=64)
    engine.generate([prompt(64)], GREEDY)
    engine.reset_prefix_cache()
    assert engine.generate([prompt(64)], GREEDY)[0].finish.stats.hit_tokens == {}
    engine = Engine(model, num_blocks=64, prefix_cache=False)
    engine.generate([prompt(64)], GREEDY)
    assert engine.generate([prompt(64)], GREEDY)[0].finish.stats.hit_tokens == {}


def test_a_reset_in_mid_flight_changes_no_output(model):
    expected = answers(Engine(model, num_blocks=64), [PROMPTS[5]], GREEDY)[0]
    engine = Engine(model, num_blocks=64, step_tokens=20)
    engine.submit(PROMPTS[5], GREEDY)
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
        engine.reset_prefix_cache()
    assert tuple(output.token for output in outputs) == expected


def test_requests_of_different_identity_share_nothing(model):
    engine = Engine(model, num_blocks=64)
    for identity, hits in ((None, 0), ("a", 0), ("b", 0), ("a", 48), (b"a", 0), (("a",), 0)):
        *_, last = engine.stream(prompt(64), GREEDY, identity)
        assert last.finish.stats.hit_tokens.get("hbm", 0) == hits
    with pytest.raises(ConfigError, match="identity cannot hold a object"):
        engine.submit([1], GREEDY, identity=object())


def test_preempted_requests_give_the_same_output(model):
    sampling = Sampling(60)
    prompts = [prompt(40, seed) for seed in range(5)]
    roomy = answers(Engine(model, num_blocks=64), prompts, sampling)
    completions = Engine(model, num_blocks=14, step_tokens=32).generate(prompts, sampling)
    assert [completion.tokens for completion in completions] == roomy
    assert sum(completion.finish.stats.preemptions for completion in completions)


def test_a_request_as_large_as_the_pool_is_served(model):
    engine = Engine(model, num_blocks=4)
    engine.generate([prompt(60, 9)], Sampling(2))
    completion = engine.generate([prompt(40)], Sampling(24))[0]
    assert len(completion.tokens) == 24


def test_stop_tokens_end_the_output(model):
    tokens = answers(Engine(model, num_blocks=8), [PROMPTS[2]], GREEDY)[0]
    stop = Sampling(12, stop=(tokens[3],))
    completion = Engine(model, num_blocks=8).generate([PROMPTS[2]], stop)[0]
    assert completion.tokens == tokens[: tokens.index(tokens[3]) + 1]
    assert completion.finish.reason == "stop"


def test_times_come_from_the_clock(model):
    ticks = itertools.count(100)
    engine = Engine(model, num_blocks=8, clock=lambda: float(next(ticks)))
    stats = engine.generate([prompt(5)], Sampling(3))[0].finish.stats
    assert (stats.submitted, stats.first_token, stats.last_token) == (100.0, 101.0, 103.0)


def test_streams_serve_each_other_and_step_keeps_the_rest(model):
    engine = Engine(model, num_blocks=64)
    expected = answers(Engine(model, num_blocks=64), PROMPTS[:3], GREEDY)
    engine.submit(PROMPTS[2], GREEDY)
    left, right = engine.stream(PROMPTS[0], GREEDY), engine.stream(PROMPTS[1], GREEDY)
    pairs = list(zip(left, right, strict=True))
    assert tuple(left.token for left, _ in pairs) == expected[0]
    assert tuple(right.token for _, right in pairs) == expected[1]
    outputs = engine.step()
    assert tuple(output.token for output in outputs + drained(engine)) == expected[2]


def test_closing_a_stream_aborts_its_request(model):
    engine = Engine(model, num_blocks=8)
    stream = engine.stream(prompt(5), GREEDY)
    next(stream)
    assert engine.unfinished == 1
    stream.close()
    assert engine.unfinished == 0
    assert engine._pools.pools[0].free == 8


def test_abort_frees_the_blocks_and_says_so(model):
    engine = Engine(model, num_blocks=8, step_tokens=16)
    running, waiting = engine.submit(prompt(60), GREEDY), engine.submit(prompt(60, 1), GREEDY)
    engine.step()
    for request_id in (running, waiting, "request-99"):
        engine.abort(request_id)
    outputs = engine.step()
    assert [(output.request_id, output.token) for output in outputs] == [
        (running, None),
        (waiting, None),
    ]
    assert {output.finish.reason for output in outputs} == {"abort"}
    assert engine._pools.pools[0].free == 8
    assert engine.step() == []


@pytest.mark.parametrize(
    ("tokens", "sampling", "cause"),
    [
        ([], GREEDY, "empty"),
        ([[1, 2]], GREEDY, "2-dimensional"),
        ([1.5], GREEDY, "integers"),
        ([97], GREEDY, "vocabulary, 0 to 96"),
        ([-1], GREEDY, "vocabulary"),
        ([1] * 1020, GREEDY, "context of 1024"),
        ([1] * 120, GREEDY, "pool of 128"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(model, tokens, sampling, cause):
    engine = Engine(model, num_blocks=8)
    for call in (
        lambda: engine.submit(tokens, sampling),
        lambda: engine.stream(tokens, sampling),
        lambda: engine.generate([[1], tokens], sampling),
    ):
        with pytest.raises(ConfigError, match=cause):
            call()
    assert engine.unfinished == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"seed": -1},
    ],
)
def test_sampling_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_blocks": 0},
        {"block_tokens": 0},
        {"step_tokens": 0},
        {"max_running": 0},
        {"kv_dtype": torch.int8},
    ],
)
def test_engine_options_out_of_range_are_refused(model, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Engine(model, **{"num_blocks": 8, **wrong})


def test_a_connector_cannot_come_late(model):
    engine = Engine(model, num_blocks=8)
    engine.submit([1], GREEDY)
    with pytest.raises(MisuseError, match="before the first request"):
        engine.connect(object())
    engine.close()
    engine.close()
    assert engine.unfinished == 0
    with pytest.raises(MisuseError, match="closed"):
        engine.submit([1], GREEDY)


def test_samples_follow_the_distribution():
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    sampling = Sampling(temperature=1.0, seed=3)
    drawn = np.bincount([draw(logits, sampling, index) for index in range(4000)], minlength=3)
    assert np.abs(drawn / 4000 - [0.1, 0.6, 0.3]).max() < 0.03
    assert draw(logits, Sampling(temperature=1e-9), 0) == 1


def test_the_likeliest_token_with_the_smallest_id_is_chosen_beside_one_that_is_drawn():
    rows = torch.tensor([[1.0, 2.0, 2.0], [9.0, 0.0, 0.0], [3.0, 1.0, 0.0]])
    greedy, warm = Sampling(), Sampling(temperature=1e-9)
    chosen = Chosen(rows, [(greedy, 1), (warm, 1), (greedy, 1)], CpuCompute())
    asked = [(0, greedy), (1, warm), (2, greedy)]
    assert [chosen.token(row, sampling, 0) for row, sampling in asked] == [1, 0, 0]
