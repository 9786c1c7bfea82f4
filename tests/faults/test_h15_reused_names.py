"""H15, H08: a request that becomes another under one name is never stored under the old keys."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

import kvtier
from kvtier.testing.toy import BLOCK, CHUNK, prompt

MINE, OTHER = prompt(8 * CHUNK, 1), prompt(8 * CHUNK, 2)
LORA = kvtier.Request(adapter=hashlib.sha256(b"lora").digest())


def asked(toy, tokens, identity=None):
    toy.connector.match("r", tokens, 0, identity)


def saved(toy, tokens, identity=None):
    """Compute and save, once no save before reads the blocks any more."""
    toy.until(lambda update: not toy.connector.saving("r"))
    toy.compute(tokens, range(len(tokens) // BLOCK))
    toy.connector.save("r", tokens, list(range(len(tokens) // BLOCK)), identity)


@pytest.mark.parametrize("first", [asked, saved])
@pytest.mark.parametrize("then", [asked, saved])
@pytest.mark.parametrize(
    "change",
    [
        (OTHER[: 5 * CHUNK], None),
        (np.append(MINE[: 4 * CHUNK - 1], OTHER[: CHUNK + 1]), None),
        (MINE[: 5 * CHUNK], LORA),
    ],
    ids=["tokens", "one token", "adapter"],
)
def test_another_request_under_a_name_that_was_not_finished_is_misuse(engines, first, then, change):
    toy = engines()
    first(toy, MINE[: 4 * CHUNK])
    with pytest.raises(kvtier.MisuseError, match="'r' comes with other tokens, or another"):
        then(toy, *change)
    if toy.connector.finish("r"):
        toy.until(lambda update: update.released)
    assert toy.cache.flush(timeout=20)
    then(toy, *change)  # finished, the name is free
    if toy.connector.finish("r"):
        toy.until(lambda update: update.released)
    assert toy.cache.flush(timeout=20)
    for tokens in (MINE, OTHER, np.append(MINE[: 4 * CHUNK - 1], OTHER)):
        assert toy.load("load", tokens)[2], "whatever is a hit is exact"


def test_tokens_may_be_added_at_every_step(engines):
    toy = engines()
    asked(toy, MINE[: 2 * CHUNK + 1])
    for length in range(CHUNK, 6 * CHUNK + 1, BLOCK):
        saved(toy, MINE[:length])
    toy.connector.finish("r")
    toy.until(lambda update: update.released)
    assert toy.cache.flush(timeout=20)
    assert toy.load("load", MINE)[::2] == (6 * CHUNK, True)


def test_unnoticed_its_kv_would_be_served_to_a_third(engines, monkeypatch):
    """The twin: what follows the first one's chunks was computed after other tokens."""
    toy = engines()
    monkeypatch.setattr("kvtier.prefix.Prefix.agrees", lambda self, tokens: True)
    saved(toy, MINE[: 2 * CHUNK])
    saved(toy, OTHER[: 4 * CHUNK])
    toy.connector.finish("r")
    toy.until(lambda update: update.released)
    assert toy.cache.flush(timeout=20)
    third = np.concatenate([MINE[: 2 * CHUNK], OTHER[2 * CHUNK : 4 * CHUNK + 1]])
    offered, _, exact = toy.load("load", third)
    assert offered == 4 * CHUNK
    assert not exact
