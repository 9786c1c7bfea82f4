"""Steps scheduled before the outputs of the one before are known: the same answers."""

from __future__ import annotations

import pytest

from kvtier.engine import Engine, Sampling
from kvtier.engine.scheduler import PENDING_TOKEN, Work
from kvtier.testing.serving import one_model, prompt

PROMPTS = [prompt(n, n) for n in (1, 15, 16, 17, 40, 90)]


def answers_of(sampling: Sampling, prompts=PROMPTS, **options):
    engine = Engine(one_model(), **{"num_blocks": 64, **options})
    completions = engine.generate(prompts, sampling)
    while not engine.idle:
        engine.step()
    assert engine._pools.pools[0].free == engine._pools.pools[0].num_blocks
    return completions


def tokens_of(completions) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in completions]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step_tokens": 7, "max_running": 2},
        {"num_blocks": 10, "step_tokens": 33},
        {"num_blocks": 9, "prefix_cache": False},
    ],
    ids=str,
)
def test_answers_are_those_of_plain_scheduling(temperature, options):
    sampling = Sampling(40, temperature=temperature, seed=5)
    found = answers_of(sampling, ahead=True, **options)
    assert tokens_of(found) == tokens_of(answers_of(sampling))
    if options.get("num_blocks", 64) < 64:
        assert sum(each.finish.stats.preemptions for each in found)


def test_the_scheduler_is_a_step_ahead(monkeypatch):
    """Every step but the first is scheduled with the token before it unknown."""
    engine = Engine(one_model(), num_blocks=8, ahead=True)
    schedule, spans = engine._scheduler.schedule, []

    def noted():
        work = schedule()
        spans.extend(item.span.tokens for item in work)
        return work

    monkeypatch.setattr(engine._scheduler, "schedule", noted)
    engine.submit([1, 2, 3], Sampling(4))
    outputs = []
    while not engine.idle:
        outputs.append(len(engine.step()))
    assert spans == [(1, 2, 3)] + [(PENDING_TOKEN,)] * 3
    assert outputs == [0, 1, 1, 1, 1]


def test_a_stop_that_the_next_step_did_not_know_of_wastes_that_step_only():
    plain = tokens_of(answers_of(Sampling(12), [PROMPTS[2]]))[0]
    sampling = Sampling(12, stop=(plain[3],))
    (found,) = answers_of(sampling, [PROMPTS[2]], ahead=True)
    assert found.tokens == plain[: plain.index(plain[3]) + 1]
    assert found.finish.reason == "stop"


def test_an_abort_while_a_step_is_under_way_reaches_nobody_else():
    engine = Engine(one_model(), num_blocks=8, ahead=True)
    first = engine.submit(prompt(100), Sampling(20))
    for _ in range(3):
        engine.step()
    engine.abort(first)
    engine.step()
    (found,) = engine.generate([prompt(100, 1)], Sampling(20))
    assert [found.tokens] == tokens_of(answers_of(Sampling(20), [prompt(100, 1)]))


CROWD = [prompt(40, seed) for seed in range(5)]


def test_twin_what_a_step_says_of_a_preempted_request_must_not_count(monkeypatch):
    """Its blocks are another's, and the token it gave will be given again."""
    expected = tokens_of(answers_of(Sampling(60), CROWD))
    found = answers_of(Sampling(60), CROWD, ahead=True, num_blocks=14)
    assert sum(each.finish.stats.preemptions for each in found)
    assert tokens_of(found) == expected
    monkeypatch.setattr(Work, "current", True)
    engine = Engine(one_model(), num_blocks=14, ahead=True)
    ids = [engine.submit(tokens, Sampling(60)) for tokens in CROWD]
    outputs = [output for _ in range(200) for output in engine.step()]
    answers = [tuple(o.token for o in outputs if o.request_id == each) for each in ids]
    assert answers != expected
    engine.close()
