"""The answers of a real engine do not depend on when, and in what order, its KV is copied."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.bench.arm import Arm
from kvtier.bench.messages import Empty, LoadModel, Open, Serve
from kvtier.device.chaos import ORDERS, ChaosFence

CHUNK = 256
CHUNKS = 3
OUTPUT = 12
SEEDS = range(20)
SEED_OF = dict.fromkeys(ORDERS) | {ORDERS[seed % len(ORDERS)]: seed for seed in SEEDS}


def prompt(seed):
    tokens = np.random.default_rng(seed).integers(0, 256, CHUNK * CHUNKS + 40)
    return [int(token) for token in tokens]


def served(tiers, chaos):
    """Serve two prompts, then the first again; return the answers, and what came from DRAM."""
    arm = Arm()
    try:
        arm.answer(LoadModel("random", CHUNK))
        arm.answer(Open(2000, prefix_cache=False, tiers=tiers, chaos=chaos))
        replies = []
        for number in (1, 2, 1):
            replies.append(arm.answer(Serve(prompt(number), OUTPUT)))
            arm.answer(Empty([]))
        return [reply.tokens for reply in replies], replies[-1].hits
    finally:
        arm.close()


@pytest.fixture(scope="module")
def right():
    answers, hits = served([], None)
    assert hits == {}
    return answers


@pytest.mark.slow
def test_on_twenty_schedules_the_answers_are_those_without_a_cache(right):
    for seed in SEEDS:
        assert served(["dram:4MiB"], seed) == (right, {"dram": CHUNK * CHUNKS})


def test_every_order_is_among_them():
    assert set(SEED_OF) == set(ORDERS)
    assert None not in SEED_OF.values()


def test_who_does_not_wait_for_fences_gives_other_answers(right, monkeypatch):
    """The twin: fences that are done at once."""
    monkeypatch.setattr(ChaosFence, "done", lambda self: True)
    monkeypatch.setattr(ChaosFence, "wait", lambda self, timeout: True)
    assert any(served(["dram:4MiB"], SEED_OF[order])[0] != right for order in ORDERS)
