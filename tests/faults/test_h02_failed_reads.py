"""H02: bytes that did not come are never said to have come, whichever layer lost them."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from kvtier.device import cpu
from kvtier.testing.toy import BLOCK, CHUNK, prompt
from kvtier.transfer import CopyResult, CopyStatus

CHUNKS = 4
TOKENS = CHUNKS * CHUNK
WHOLE_CALL = {"unavailable", "defect"}
READING = ["failed", "absent", "short", "wrong", "unavailable", "defect"]


@pytest.mark.parametrize("bad", range(CHUNKS))
@pytest.mark.parametrize("kind", READING)
def test_what_a_tier_did_not_return_is_not_offered(engines, faulty_at, kind, bad):
    """Blocks are full of 0xAB before: those behind the last exact chunk stay so."""
    store, tokens = faulty_at(kind, ()), prompt(TOKENS + 1)
    toy = engines(store)
    toy.save("one", tokens[:TOKENS])
    toy.cache.clear("dram")
    store.depths = {bad}
    offered, loaded, exact = toy.load("two", tokens)
    assert exact
    assert offered == (0 if kind in WHOLE_CALL else bad * CHUNK)
    assert loaded is None or loaded.tokens == offered
    assert store.counts[kind]
    store.heal()
    toy.save("three", tokens[:TOKENS])
    assert toy.load("four", tokens)[::2] == (TOKENS, True)


@pytest.mark.parametrize("kind", READING)
def test_unguarded_the_poison_would_be_loaded(engines, faulty_at, kind, monkeypatch):
    """The twin: a tier that takes the store's word. Only a lie gets through, not an error."""
    store, tokens = faulty_at(kind, ()), prompt(TOKENS + 1)
    toy = engines(store)
    toy.save("one", tokens[:TOKENS])
    toy.cache.clear("dram")
    monkeypatch.setattr("kvtier.tiers.exact.is_exact", lambda header, wanted: True)
    store.depths = {2}
    _, _, exact = toy.load("two", tokens)
    assert exact == (kind != "wrong")


@pytest.mark.parametrize("free", range(CHUNKS + 1))
def test_staging_that_runs_out_shortens_the_load(engines, disk, free):
    """Slots for some chunks only: the others are reported as not there, and their blocks stay."""
    tokens, other = prompt(TOKENS + 1), prompt(TOKENS + 1, 1)
    toy = engines(disk, chunks=CHUNKS)
    toy.save("one", tokens[:TOKENS])
    toy.save("two", other[:TOKENS])
    toy.cache.clear("dram")
    pinned = None
    if free < CHUNKS:
        match = toy.cache.match(other[: (CHUNKS - free) * CHUNK + 1])
        pinned = toy.cache.fetch(match, timeout=5, deadline=60).result(20)
        assert pinned.chunks == CHUNKS - free
    offered, _, exact = toy.load("three", tokens)
    assert (offered, exact) == (free * CHUNK, True)
    if pinned is not None:
        pinned.release()
    assert toy.load("four", tokens)[::2] == (TOKENS, True)


def planned_load(toy, tokens):
    toy.save("one", tokens[:TOKENS])
    blocks = list(range(128, 128 + TOKENS // BLOCK))
    with toy.cache.lease(toy.cache.match(tokens), deadline=60) as lease:
        return toy.cache.plan_load(lease, blocks), blocks


@pytest.mark.parametrize("failing", range(2 * CHUNKS))
def test_a_copy_that_fails_anywhere_fails_the_load_and_names_its_blocks(
    engines, monkeypatch, failing
):
    """Two groups of layers, four chunks each: one of the eight copies fails, and all is told.

    The groups after it go on, so that a completion counter would still advance.
    """
    toy, tokens = engines(), prompt(TOKENS + 1)
    plan, blocks = planned_load(toy, tokens)
    copy, count = cpu._copy, []

    def broken(*args, **kwargs):
        count.append(0)
        if len(count) == failing + 1:
            raise OSError(errno.EIO, "the link is down")
        copy(*args, **kwargs)

    monkeypatch.setattr(cpu, "_copy", broken)
    transfer = toy.cache.bind(toy.kv, toy.device, groups=2).execute(plan, after=())
    assert transfer.result(0 if transfer.poll() else 5) == CopyResult(
        CopyStatus.FAILED, 0, tuple(blocks), "OSError: [Errno 5] the link is down"
    )
    assert transfer.poll()
    assert transfer.result(0).tokens == 0, "asked again, it says the same"
    toy.cache.settle(plan, transfer.result(0))


def test_a_load_that_ran_before_its_fence_failed_is_reported_too(engines):
    """The work that a load must wait for has failed: nothing is copied, and that is said."""
    toy, tokens = engines(), prompt(TOKENS + 1)
    plan, blocks = planned_load(toy, tokens)
    toy.kv[:, :, 128:] = 0xABAB
    stream = toy.device.stream("store")
    stream.enqueue(lambda: 1 // 0)
    transfer = toy.cache.bind(toy.kv, toy.device).execute(plan, after=(stream.record(),))
    result = transfer.result(20)
    assert (result.status, result.tokens) == (CopyStatus.FAILED, 0)
    assert result.failed_blocks == tuple(blocks)
    assert np.all(toy.kv[:, :, 128:] == 0xABAB)
    toy.cache.settle(plan, result)
