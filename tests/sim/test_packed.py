"""Shared tiers that pack small parts, in simulated worlds, and their guards taken away."""

from __future__ import annotations

from dataclasses import replace

from kvtier.testing.simscenario import Scenario, TierShape
from kvtier.testing.simtask import SimError
from kvtier.testing.simworld import run_world
from kvtier.tiers.tier import Tier

SEEDS = range(24)
PACKED = TierShape(None, shared=True, packed=True)


def lived(seed: int, **changes: object) -> None:
    """Live through the world of a seed, with one packed tier."""
    drawn = replace(Scenario.draw(seed), tiers=(PACKED,), crashes=(), hangs=False)
    run_world(seed, replace(drawn, **changes))


def first_failure(seeds: range = SEEDS, **changes: object) -> str:
    for seed in seeds:
        try:
            lived(seed, **changes)
        except SimError as error:
            return str(error)
    return "nothing"


def test_packed_tiers_live_through_worlds_with_faults_and_without():
    assert first_failure() == "nothing"
    assert first_failure(model="two") == "nothing"


def test_if_parts_of_two_sizes_were_sought_by_one_they_would_be_lost(monkeypatch):
    learn = Tier.learn
    monkeypatch.setattr(Tier, "learn", lambda self, members, _: learn(self, members, 128))
    assert "although another copy" in first_failure(model="two")


def test_if_packs_of_others_were_taken_whole_what_was_removed_would_be_back(monkeypatch):
    monkeypatch.setattr("kvtier.tiers.places._DELETED", 0)
    assert "withdrawn" in first_failure(range(50, 60), model="two")


def test_if_only_known_packs_were_deleted_others_would_stay(monkeypatch):
    monkeypatch.setattr("kvtier.tiers.packer._orders", lambda _: range(1))
    monkeypatch.setattr("kvtier.tiers.places._DELETED", 0)
    assert "withdrawn" in first_failure()


def test_if_packs_were_charged_as_their_parts_alone_a_budget_would_be_exceeded(monkeypatch):
    monkeypatch.setattr(Tier, "footprint", lambda self, size, **_: self.store.footprint(size))
    assert "of a write budget" in first_failure(tiers=(replace(PACKED, writes=6),))
