"""What vLLM's connector learns of vLLM's speed, and what follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.connectors import vllm_scheduler
from kvtier.testing.vllm_steps import FULL, VllmSteps


@pytest.fixture
def plain() -> Iterator[VllmSteps]:
    found = VllmSteps(FULL)
    yield found
    found.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def test_a_steps_time_is_learnt_where_a_request_goes_on(plain: VllmSteps, monkeypatch):
    """Between two steps that share no request vLLM may have waited for one."""
    now = 0.0
    monkeypatch.setattr(vllm_scheduler, "monotonic", lambda: now)
    learnt = []
    monkeypatch.setattr(
        plain.cache, "computed", lambda spans, seconds: learnt.append((spans, seconds))
    )
    request = plain.request("a", prompt(200))
    plain.allot(request, list(range(1, 14)))
    plain.scheduler._serve(request)
    for at, tokens in ((0.0, 96), (2.0, 96), (5.0, 8), (6.0, 1)):
        now = at
        plain.step(a=tokens)
    now = 90.0
    plain.serve("b", prompt(64, 1), list(range(20, 24)))
    now = 100.0
    plain.serve("c", prompt(64, 2), list(range(24, 28)))
    assert learnt == [([(0, 96)], 2.0), ([(96, 192)], 3.0)]


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_step_that_was_scheduled_ahead_is_not_taken_for_the_one_before(
    plain: VllmSteps, monkeypatch, at_once
):
    """With two under way the second is scheduled at once, which is nobody's time. And the twin."""
    now = 0.0
    monkeypatch.setattr(vllm_scheduler, "monotonic", lambda: now)
    learnt = []
    monkeypatch.setattr(
        plain.cache, "computed", lambda spans, seconds: learnt.append((spans, seconds))
    )
    plain.scheduler = vllm_scheduler.SchedulerSide(plain.cache, at_once)
    request = plain.request("a", prompt(200))
    plain.allot(request, list(range(1, 14)))
    plain.scheduler._serve(request)
    for at, tokens in ((0.0, 96), (0.001, 96), (2.0, 8), (5.0, 1), (5.1, 1)):
        now = at
        plain.step(a=tokens)
    right = [([(0, 96)], 1.999), ([(96, 192)], 3.0)]
    assert (learnt == right) is (at_once == 2)
    assert (learnt[0][1] < 0.01) is (at_once == 1)


def test_a_tier_slower_than_vllm_computes_is_left_alone(plain: VllmSteps, monkeypatch):
    """Told a tier that takes an hour; and the twin: vLLM's speed is not known."""
    first = plain.serve("a", prompt(200), list(range(1, 14)))
    plain.settle()
    match = plain.cache.match(plain.cache.prefix(first.all_token_ids))
    below = dataclasses.replace(match, where=b"\1" * match.chunks, stack=("dram", "lmdb"))
    monkeypatch.setattr(plain.cache._desk, "match", lambda prefix, **_: below)
    plain.cache._adviser.costs.believe_tier("lmdb", 3600.0, 0.0)
    monkeypatch.setattr(plain.cache._adviser, "_probe", lambda match, tier: None)
    assert plain.scheduler.match(plain.request("b", prompt(200)), 0)[0] is None  # it is fetched
    plain.cache.computed([(0, 96)], 0.001)
    assert plain.scheduler.match(plain.request("c", prompt(200)), 0) == (0, False)
