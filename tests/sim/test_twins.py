"""Each guard of the core, taken away: the simulation must notice within a few seeds."""

from __future__ import annotations

import re

import pytest

from kvtier.catalog.catalog import Catalog
from kvtier.errors import ConfigError
from kvtier.testing.mutations import MUTATIONS, named, removed
from kvtier.testing.simworld import run_world

SEEDS = 60
# Seeds at which what the first few do not show is seen. They are tried first; where one is out of
# date, the others are tried as ever, for some seconds more.
FIRST = {
    "ask-for-what-is-to-be-deleted": 53,
    "believe-in-every-delete": 7,
    "count-a-failed-write-as-stored": 25,
    "free-slots-of-reads-that-nobody-waits-for": 12,
    "give-up-after-the-first-copy": 23,
    "keep-what-a-tier-lost": 47,
    "lose-the-coalesced-waiter": 23,
    "never-expire-a-part": 11,
    "never-try-a-broken-tier-again": 18,
    "pay-only-for-what-is-kept": 18,
    "pin-all-of-dram": 20,
    "take-in-a-late-answer": 16,
    "take-what-is-below-a-floor": 7,
    "wait-for-a-hung-tier": 15,
    "wait-for-a-shared-tier-for-ever": 9,
    "write-above-the-ceiling": 20,
    "write-over-the-budget": 6,
}


def failure(first: int) -> str:
    for seed in sorted(range(SEEDS), key=lambda seed: seed != first):
        try:
            run_world(seed)
        except Exception as error:  # noqa: BLE001  (how it shows differs with the guard)
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_no_seed_is_of_a_guard_that_is_not_there():
    assert FIRST.keys() <= MUTATIONS.keys()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_guard_is_found(name):
    with removed(name):
        found = failure(FIRST.get(name, 0))
    assert re.search(named(name).shows, found)


def test_a_guard_that_was_removed_is_back_afterwards():
    before = Catalog.settle
    with removed("never-settle-a-load"):
        assert Catalog.settle is not before
    assert Catalog.settle is before


def test_an_unknown_mutation_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'forget-the-checksum'"):
        named("forget-checksum")
