"""The core under many schedules: a seed that fails is printed, and fails again by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from kvtier.testing.faults import Rates
from kvtier.testing.simmodel import MODELS
from kvtier.testing.simscenario import TROUBLES, Scenario, TierShape
from kvtier.testing.simworld import run_world

SEEDS = 300
GROUP = 25
OPS = 200  # calls on the cache: match, lease or fetch, plan, settle, loaded, clear

DIGESTS = """
import logging, random, sys
noise = random.Random(sys.argv[1])  # other objects at other addresses
kept = [x for x in (tuple(range(noise.randrange(1, 60))) for _ in range(20000)) if len(x) % 2]
logging.disable(logging.CRITICAL)
from kvtier.testing.oracle import Oracle
from dataclasses import replace
from kvtier.testing.simscenario import Scenario
from kvtier.testing.simthreads import ThreadWorld
from kvtier.testing.simworld import run_world
if sys.argv[2] == "leak":
    Oracle.state = lambda self: repr(list({self.cache} | set(self._index.rows)))
for seed in range(int(sys.argv[3])):
    loop = run_world(seed)
    print(seed, loop.steps, loop.digest)
loop = run_world(3, replace(Scenario.draw(3), crashes=(), cancel_rate=0.0), kind=ThreadWorld)
print("threads", loop.steps, loop.digest)
"""


@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_a_world_of_every_seed_ends_well(first):
    for seed in range(first, first + GROUP):
        worlds = []
        run_world(seed, replace(Scenario.draw(seed), ops=OPS), watch=worlds.append)
        assert worlds[-1].calls >= OPS


def test_worlds_of_every_kind_are_drawn():
    drawn = [Scenario.draw(seed) for seed in range(SEEDS)]
    crashing = sum(bool(one.crashes) for one in drawn)
    assert 0.2 * SEEDS <= crashing <= 0.4 * SEEDS
    assert 0.2 * SEEDS <= sum(one.order == "pct" for one in drawn) <= 0.4 * SEEDS
    assert {one.model for one in drawn} == set(MODELS)
    assert sum(one.strangers for one in drawn) >= 0.15 * SEEDS
    for what in TROUBLES:
        assert sum(one.without(what) != one for one in drawn) >= 10


@pytest.mark.parametrize("kind", Rates.__slots__)
def test_a_tier_that_always_fails_in_one_way_is_only_a_miss(kind):
    scenario = Scenario(
        dram_slots=4,
        tiers=(TierShape(8), TierShape(None)),
        model="plain",
        clients=6,
        rates=Rates(**{kind: 1.0}),
        cancel_rate=0.02,
    )
    run_world(1, scenario)


def test_other_processes_take_the_same_course():
    runs = [digests(seed, "none", 20) for seed in ("1", "2")]
    assert runs[0] == runs[1]
    assert len(set(runs[0].splitlines())) == 21


def test_an_order_that_is_not_the_seeds_shows_in_the_digest():
    runs = [digests(seed, "leak", 2) for seed in ("1", "2")]
    assert runs[0] != runs[1]
    steps = [[line.split()[1] for line in run.splitlines()] for run in runs]
    assert steps[0] == steps[1]  # the schedule is the same; what was found in it is not


def digests(hash_seed: str, leak: str, seeds: int) -> str:
    command = [sys.executable, "-W", "ignore", "-c", DIGESTS, hash_seed, leak, str(seeds)]
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


def test_a_failure_names_its_seed(monkeypatch):
    monkeypatch.setattr("kvtier.catalog.catalog.Catalog.settle", lambda self, lease: None)
    with pytest.raises(AssertionError, match="a lease is left") as caught:
        run_world(1)
    assert caught.value.__notes__[0].startswith("seed 1, step ")
