"""The core under many schedules: a seed that fails is printed, and fails again by itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvtier.testing.faults import Rates
from kvtier.testing.simscenario import Scenario, TierShape
from kvtier.testing.simworld import run_world

SEEDS = 180
GROUP = 15

DIGESTS = """
import logging, random, sys
noise = random.Random(sys.argv[1])  # other objects at other addresses
kept = [x for x in (tuple(range(noise.randrange(1, 60))) for _ in range(20000)) if len(x) % 2]
logging.disable(logging.CRITICAL)
from kvtier.testing.simworld import run_world
for seed in range(10):
    loop = run_world(seed)
    print(seed, loop.steps, loop.digest)
"""


@pytest.fixture(autouse=True)
def quiet(caplog):
    """A faulty store is warned about; that is no news here."""
    caplog.set_level("CRITICAL", logger="kvtier")


@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_a_world_of_every_seed_ends_well(first):
    for seed in range(first, first + GROUP):
        run_world(seed)


@pytest.mark.parametrize("kind", Rates.__slots__)
def test_a_tier_that_always_fails_in_one_way_is_only_a_miss(kind):
    scenario = Scenario(
        dram_slots=4,
        tiers=(TierShape(8), TierShape(None)),
        components=1,
        shards=1,
        requests=6,
        rates=Rates(**{kind: 1.0}),
        cancel_rate=0.02,
    )
    run_world(1, scenario)


def test_other_processes_take_the_same_course():
    runs = [digests(seed) for seed in ("1", "2")]
    assert runs[0] == runs[1]
    assert len(set(runs[0].splitlines())) == 10


def digests(hash_seed: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", DIGESTS, hash_seed]
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


def test_a_failure_names_its_seed(monkeypatch):
    monkeypatch.setattr("kvtier.catalog.catalog.Catalog.settle", lambda self, lease: None)
    with pytest.raises(AssertionError, match="a lease is left") as caught:
        run_world(1)
    assert caught.value.__notes__[0].startswith("seed 1, step ")
