"""Drafts and steps ahead over a real Cache: only accepted tokens are saved, and nothing twice."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from kvtier.engine import Sampling
from kvtier.testing.serving import CHUNK, Serving, alone, one_model, servings

SAMPLING = Sampling(max_tokens=8)
LONG = Sampling(max_tokens=60)
CROWD = [np.random.default_rng(seed).integers(0, 97, 70).tolist() for seed in range(5)]


@pytest.fixture
def serving():
    """Open engines with caches, closed at the end of the test."""
    with servings() as open_one:
        yield functools.partial(open_one, one_model())


def guess(tokens, most):
    """Guess rightly what the last token's parity allows, and wrongly else."""
    right = alone(next(each for each in CROWD if each == tokens[:70].tolist()), LONG)
    at = len(tokens) - 70
    return [(token + (n == at % 5)) % 97 for n, token in enumerate(right[at : at + most])]


def turns(one: Serving) -> list[bool]:
    """Ask each of the crowd what follows its answer; say whether all that is right."""
    found = []
    for each in CROWD:
        talk = [*each, *alone(each, LONG)]
        completion = one.answer(talk[: CHUNK * 2 + 1], SAMPLING)
        assert completion.finish.stats.hit_tokens == {"dram": CHUNK * 2}
        found.append(completion.tokens == alone(talk[: CHUNK * 2 + 1]))
    return found


def accepted_only(one: Serving, monkeypatch) -> None:
    """Fail if a token is offered for saving that is not of a prompt or its one right answer."""
    save, right = one.connector.save, {(*each, *alone(each, LONG)) for each in CROWD}

    def checked(request_id, tokens, *rest):
        assert any(tuple(tokens) == each[: len(tokens)] for each in right)
        save(request_id, tokens, *rest)

    monkeypatch.setattr(one.connector, "save", checked)


@pytest.mark.parametrize(
    "options",
    [{"ahead": True}, {"drafter": guess}, {"drafter": guess, "draft_tokens": 2}],
    ids=["ahead", "drafts", "two drafts"],
)
@pytest.mark.parametrize("tight", [{}, {"num_blocks": 18, "step_tokens": 48}], ids=["", "tight"])
def test_answers_and_what_is_saved_of_them_are_right(serving, monkeypatch, options, tight):
    one = serving(**options, **tight)
    accepted_only(one, monkeypatch)
    completions = one.engine.generate(CROWD, LONG)
    assert [each.tokens for each in completions] == [alone(each, LONG) for each in CROWD]
    stats = [each.finish.stats for each in completions]
    assert all(0 < each.accepted_tokens < each.drafted_tokens for each in stats) or (
        "ahead" in options
    )
    assert bool(tight) == any(each.preemptions for each in stats)
    one.settle()
    monkeypatch.undo()
    assert one.saved_chunks == 2 * len(CROWD)
    assert set(one.store.writes.values()) == {1}
    one.engine._scheduler._drafting = None
    assert all(turns(one))


def never(tokens, most):
    """Guess wrongly."""
    right = alone(next(each for each in CROWD if each == tokens[:70].tolist()), LONG)
    at = len(tokens) - 70
    return [(token + 1) % 97 for token in right[at : at + most]]


def test_what_is_saved_with_every_draft_rejected_is_right(serving):
    one = serving(drafter=never)
    one.engine.generate(CROWD, LONG)
    one.settle()
    one.engine._scheduler._drafting = None
    assert all(turns(one))


def test_twin_saving_unverified_tokens_spoils_a_later_answer(serving, monkeypatch):
    """The KV of a rejected draft is kept under the key of the token that stood in its place."""
    one = serving(drafter=never)
    save, find = one.connector.save, one.engine._scheduler.find

    def unverified(name, _, *rest):
        save(name, find(name).tokens, *rest)
        for copying in one.connector._copying:  # before the right token stands there
            copying.transfer.result(10)

    monkeypatch.setattr(one.connector, "save", unverified)
    one.engine.generate(CROWD, LONG)
    one.settle()
    one.engine._scheduler._drafting = None
    assert not all(turns(one))


@pytest.mark.parametrize("role", ["load", "store"])
def test_copies_in_flight_and_preemption_do_not_disturb_steps_ahead(serving, role):
    """H15 and H16, one step ahead: blocks change hands only when nobody writes them."""
    one = serving(num_blocks=18, step_tokens=48, ahead=True)
    one.engine.generate(CROWD[:2], LONG)
    one.settle()
    with one.held(role):
        ids = [one.engine.submit(each, LONG) for each in CROWD]
        requests = [one.engine._scheduler.find(each) for each in ids]
        for _ in range(30):
            one.engine.step()
        one.engine.abort(ids[1])
        for _ in range(5):
            one.engine.step()
    one.settle()
    for number in (0, 2, 3, 4):
        assert tuple(requests[number].tokens[70:]) == alone(CROWD[number], LONG)
    for each in CROWD:
        assert one.answer(each, LONG).tokens == alone(each, LONG)
    pool = one.engine._pools.pools[0]
    assert pool.free == pool.num_blocks
    assert one.cache.figures()["kvtier_leased_parts"] == 0


def load_after_an_abort(one: Serving) -> tuple[int, ...]:
    """Load into the blocks of a request that was aborted while its step was under way."""
    one.answer(CROWD[0], SAMPLING)
    victim = one.engine.submit([*CROWD[1], *CROWD[2]], SAMPLING)
    for _ in range(3):
        one.engine.step()
    one.engine.abort(victim)
    request = one.engine._scheduler.find(one.engine.submit(CROWD[0], SAMPLING))
    one.settle()
    assert request.hits["dram"] == CHUNK
    return tuple(request.tokens[70:])


def test_a_load_begins_when_the_step_under_way_has_ended(serving):
    one = serving(num_blocks=10, step_tokens=16, ahead=True)
    assert load_after_an_abort(one) == alone(CROWD[0])


def test_twin_a_load_that_begins_at_once_is_overwritten(serving, monkeypatch):
    one = serving(num_blocks=10, step_tokens=16, ahead=True)
    schedule = one.engine._scheduler.schedule

    def begun_at_once():
        work = schedule()
        one.engine._runner.copy(one.engine._scheduler.begin())
        for copying in one.connector._copying:
            copying.transfer.result(10)
        return work

    monkeypatch.setattr(one.engine._scheduler, "schedule", begun_at_once)
    assert load_after_an_abort(one) != alone(CROWD[0])
