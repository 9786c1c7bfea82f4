"""Each guard of the core, taken away: the simulation must notice within a few seeds."""

from __future__ import annotations

import re

import pytest

from kvtier.catalog.catalog import Catalog
from kvtier.errors import ConfigError
from kvtier.testing.mutations import MUTATIONS, named, removed
from kvtier.testing.simworld import run_world

SEEDS = 60


def first_failure() -> str:
    for seed in range(SEEDS):
        try:
            run_world(seed)
        except Exception as error:  # noqa: BLE001  (how it shows differs with the guard)
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_guard_is_found(name):
    with removed(name):
        found = first_failure()
    assert re.search(named(name).shows, found)


def test_a_guard_that_was_removed_is_back_afterwards():
    before = Catalog.settle
    with removed("never-settle-a-load"):
        assert Catalog.settle is not before
    assert Catalog.settle is before


def test_an_unknown_mutation_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'forget-the-checksum'"):
        named("forget-checksum")
