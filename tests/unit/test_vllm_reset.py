"""After a change of weights vLLM empties the cache: what others computed is not served any more."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.connectors.vllm_scheduler import SchedulerSide
from kvtier.testing.vllm_steps import FULL, VllmSteps


@pytest.fixture
def plain() -> Iterator[VllmSteps]:
    found = VllmSteps(FULL)
    yield found
    found.close()


def prompt(length: int) -> list[int]:
    return np.random.default_rng(0).integers(0, 1000, length).tolist()


def emptied(vllm: VllmSteps) -> None:
    """Do as vLLM's reset does after a change of the weights."""
    vllm.scheduler.reset()
    vllm.cache.purge(timeout=20)


def offered_before_and_after(vllm: VllmSteps) -> list[int | None]:
    """Let a request be offered a load; empty the cache before it has blocks for it."""
    vllm.serve("a", prompt(200), list(range(1, 14)))
    vllm.settle()
    waits = vllm.request("b", prompt(200))
    first, _ = vllm.scheduler.match(waits, 0)
    emptied(vllm)
    return [first, vllm.scheduler.match(waits, 0)[0]]


def test_a_request_that_waits_is_not_offered_what_other_weights_computed(plain: VllmSteps):
    assert offered_before_and_after(plain) == [192, 0]
    assert plain.cache.figures()["kvtier_leased_parts"] == 0


def test_without_the_reset_it_would_be(plain: VllmSteps, monkeypatch):
    monkeypatch.setattr(SchedulerSide, "reset", lambda _: None)
    assert offered_before_and_after(plain) == [192, 192]


def saved_after(vllm: VllmSteps, *, computed: int, upto: int) -> int | None:
    """Empty the cache when a request has some KV; return how much of it is offered later.

    computed: tokens that it has then; upto: those that it has in the end.
    """
    request = vllm.serve("a", prompt(100), list(range(1, 14)))
    vllm.settle()
    request.num_computed_tokens = computed
    emptied(vllm)
    request.all_token_ids = prompt(upto)
    request.num_tokens = upto
    vllm.step(a=upto - computed)
    vllm.settle()
    return vllm.scheduler.match(vllm.request("b", prompt(200)), 0)[0]


def test_what_a_request_computes_behind_the_kv_of_other_weights_is_not_saved(plain: VllmSteps):
    assert saved_after(plain, computed=100, upto=200) == 0
    assert plain.cache.figures()['kvtier_tier_parts{tier="dram"}'] == 0


def test_what_it_computes_from_the_first_token_on_is(plain: VllmSteps):
    """As where vLLM preempts what runs, so that all of it is computed anew."""
    assert saved_after(plain, computed=0, upto=100) == 64
