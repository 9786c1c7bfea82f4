"""Every live policy under many schedules: whatever it prefers, no tail is without its head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.catalog.index import Index
from kvtier.testing.simscenario import Scenario
from kvtier.testing.simtask import SimError
from kvtier.testing.simworld import run_world

OTHERS = ("arc", "lfu", "s3fifo")  # test_core has the default
OPS = 150


def live(policy: str) -> None:
    for seed in range(8):
        run_world(seed, replace(Scenario.draw(seed), ops=OPS, policy=policy))


@pytest.mark.parametrize("policy", OTHERS)
def test_a_world_under_each_policy_ends_well(policy):
    live(policy)


@pytest.mark.parametrize("policy", OTHERS)
def test_where_a_head_may_leave_before_its_tail_a_world_ends_badly(policy, monkeypatch):
    """The twin: what keeps a policy from leaving tails is the leaf."""
    monkeypatch.setattr(Index, "leaf", lambda self, row, tier: not self.holds[row])
    with pytest.raises((SimError, AssertionError)):
        live(policy)
