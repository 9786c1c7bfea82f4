"""Draft and reject: any drafter, right or wrong, gives the answers of plain decoding."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from kvtier.engine import Engine, Sampling, prompt_lookup
from kvtier.errors import ConfigError
from kvtier.testing.serving import one_model, prompt

PROMPTS = [prompt(n, n) for n in (1, 15, 17, 40, 90)]


class Oracle:
    """Knows the answers, and is wrong about every `wrong`-th token."""

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], wrong: int) -> None:
        self.answers, self.wrong = answers, wrong

    def __call__(self, tokens, most):
        for known, answer in self.answers.items():
            if tuple(tokens[: len(known)]) == known:
                at = len(tokens) - len(known)
                guesses = answer[at : at + most]
                return [
                    (token + ((at + n + 1) % self.wrong == 0)) % 97
                    for n, token in enumerate(guesses)
                ]
        raise AssertionError


def answers_of(sampling: Sampling, **options):
    engine = Engine(one_model(), **{"num_blocks": 64, **options})
    completions = engine.generate(PROMPTS, sampling)
    assert engine._pools.pools[0].free == engine._pools.pools[0].num_blocks
    return completions


@functools.cache
def plain(sampling: Sampling) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in answers_of(sampling)]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize(("draft_tokens", "wrong"), [(1, 2), (3, 1), (3, 5), (8, 1000)])
def test_right_and_wrong_guesses_change_no_answer(temperature, draft_tokens, wrong):
    sampling = Sampling(40, temperature=temperature, seed=3)
    oracle = Oracle(dict(zip(map(tuple, PROMPTS), plain(sampling), strict=True)), wrong)
    for tight in ({}, {"num_blocks": 10, "step_tokens": 20}):
        found = answers_of(sampling, drafter=oracle, draft_tokens=draft_tokens, **tight)
        assert [each.tokens for each in found] == plain(sampling)
        stats = [each.finish.stats for each in found]
        assert all(each.drafted_tokens for each in stats)
        assert all((each.accepted_tokens == 0) == (wrong == 1) for each in stats)
        assert wrong < 1000 or all(each.accepted_tokens == each.drafted_tokens for each in stats)


def test_right_guesses_save_steps():
    sampling = Sampling(41)
    oracle = Oracle(dict(zip(map(tuple, PROMPTS), plain(sampling), strict=True)), 1000)
    engine = Engine(one_model(), num_blocks=64, drafter=oracle, draft_tokens=4)
    for tokens in PROMPTS:
        engine.submit(tokens, sampling)
    steps = 0
    while engine.unfinished:
        engine.step()
        steps += 1
    assert steps == 1 + -(-(41 - 5) // 5)  # the prompt's step verifies drafts too


def test_a_stop_token_among_the_drafts_ends_the_output():
    answer = plain(Sampling(40))[3]
    sampling = Sampling(40, stop=(answer[6],))
    oracle = Oracle({tuple(PROMPTS[3]): answer}, 1000)
    engine = Engine(one_model(), num_blocks=64, drafter=oracle, draft_tokens=8)
    (completion,) = engine.generate([PROMPTS[3]], sampling)
    assert completion.tokens == answer[: answer.index(answer[6]) + 1]
    assert completion.finish.reason == "stop"


def test_rejected_tokens_enter_no_prefix_cache():
    """What an answer leaves behind serves the next turn, whose tokens are the accepted ones."""
    sampling = Sampling(40)
    oracle = Oracle(dict(zip(map(tuple, PROMPTS), plain(sampling), strict=True)), 3)
    drafting = Engine(one_model(), num_blocks=64, drafter=oracle)
    for tokens, answer in zip(PROMPTS, plain(sampling), strict=True):
        drafting.generate([tokens], sampling)
        talk = [*tokens, *answer, 5]
        expected = Engine(one_model(), num_blocks=64).generate([talk], Sampling(4))[0].tokens
        oracle.answers = {tuple(talk): expected, **oracle.answers}
        found = drafting.generate([talk], Sampling(4))[0]
        assert found.tokens == expected
        assert len(talk) < 17 or found.finish.stats.hit_tokens["hbm"] >= len(talk) - 17


@pytest.mark.parametrize(
    ("tokens", "guesses"),
    [
        ([], []),
        ([1], []),
        ([1, 1], []),
        ([1, 2, 3, 1, 2], [3, 1, 2]),
        ([1, 2, 3, 1, 2, 4, 5, 6, 7, 1, 2], [4, 5, 6]),
        ([7, 7, 7], [7]),
    ],
)
def test_prompt_lookup_guesses_what_followed_last_time(tokens, guesses):
    assert prompt_lookup(np.array(tokens, np.int32), 3) == guesses


def test_prompt_lookup_serves_an_engine():
    found = answers_of(Sampling(40), drafter=prompt_lookup)
    assert [each.tokens for each in found] == plain(Sampling(40))


def test_drafts_do_not_go_with_steps_ahead():
    with pytest.raises(ConfigError, match="drafts need the outputs"):
        Engine(one_model(), num_blocks=8, drafter=prompt_lookup, ahead=True)
