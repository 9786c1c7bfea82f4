"""Simulated worlds of hybrid models and of two namespaces: what their oracle states and finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.identity.record import PartName, record_id
from kvtier.identity.shape import Shape
from kvtier.testing.simmodel import CHUNK, MODELS
from kvtier.testing.simscenario import Scenario, TierShape
from kvtier.testing.simtask import SimError
from kvtier.testing.simworld import run_world

CALM = Scenario(dram_slots=8, tiers=(TierShape(None),), model="plain", clients=6, strangers=True)


def names(model: str, chunks: int):
    """Return the names of all parts of some chunks of a model on one rank."""
    count = len(MODELS[model].components)
    keys = [bytes([chunk]) * 32 for chunk in range(chunks)]
    return [tuple(record_id(key, PartName(number)) for number in range(count)) for key in keys]


def usable(model: str, chunks: int, prompt: int, *lost: tuple[int, int]) -> int:
    """Return what can be used of a prompt of which some (chunk, component) are lost."""
    parts = names(model, chunks)
    gone = {parts[chunk][component] for chunk, component in lost}
    return MODELS[model].usable(parts, prompt, lambda name: name not in gone)


@pytest.mark.parametrize("model", MODELS)
def test_worlds_of_every_model_end_well(model):
    slots = 4 * MODELS[model].width
    for seed in range(4):
        run_world(seed, replace(CALM, model=model, dram_slots=slots, cancel_rate=0.02))


def test_what_a_prefix_needs_is_stated_by_hand():
    assert usable("plain", 3, 3 * CHUNK) == 20  # a token, and so a block, is left to compute
    assert usable("plain", 3, 3 * CHUNK + 1) == 24
    assert usable("plain", 3, 3 * CHUNK + 1, (1, 0)) == 8
    assert usable("window", 4, 40) == 32
    assert usable("window", 4, 40, (0, 1), (1, 1)) == 32  # its last 12 tokens are in chunks 2 and 3
    assert usable("window", 4, 40, (2, 1)) == 16
    assert usable("window", 4, 40, (1, 0)) == 8
    assert usable("state", 4, 40, (0, 1), (1, 1)) == 32
    assert usable("state", 4, 40, (3, 1)) == 24
    assert usable("state", 4, 31) == 24  # only where a state stands


def failures(model: str) -> set[str]:
    """Return what goes wrong in a few worlds of a model."""
    found = set()
    for seed in range(12):
        try:
            run_world(seed, replace(CALM, model=model, dram_slots=3 * MODELS[model].width))
        except SimError as error:
            found.add(str(error))
    return found


@pytest.mark.parametrize("model", ["window", "state"])
def test_a_match_that_looks_at_full_attention_alone_is_found(model, monkeypatch):
    monkeypatch.setattr(Shape, "needed", lambda self, tokens, chunk: self.always)
    found = failures(model)
    assert any("nowhere was matched" in one or "does not copy" in one for one in found), found


def test_namespaces_that_share_names_are_found(monkeypatch):
    monkeypatch.setattr("kvtier.prefix.root_key", lambda *_: bytes(32))
    assert failures("plain") == {"two namespaces share the name of a part"}
