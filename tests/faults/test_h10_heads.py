"""H10: when there is no room for all of a prompt, its head is kept and its tail is not."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.catalog.catalog import Catalog
from kvtier.catalog.spill import Spiller
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.testing.toy import BLOCK, CHUNK, CHUNK_BYTES, prompt
from kvtier.tiers.store import Status

CHUNKS, ROOM = 32, 25  # 128 and 100 of the scenario, a quarter of each
TOKENS = CHUNKS * CHUNK


def save(toy, tokens, step):
    """Save a prompt as an engine does that computes `step` tokens at a time."""
    blocks = list(range(len(tokens) // BLOCK))
    toy.compute(tokens, range(len(blocks)))
    for stop in range(step, len(tokens) + step, step):
        toy.connector.save("save", tokens[:stop], blocks)
    if toy.connector.finish("save"):
        toy.until(lambda update: update.released)
    assert toy.cache.flush(timeout=20)


STEPS = [CHUNK, 5 * CHUNK, TOKENS]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("before", [0, 1, 3])
def test_dram_keeps_the_head(engines, step, before):
    """before: prompts that filled it, and leave for this one's sake."""
    toy, tokens = engines(chunks=ROOM), prompt(TOKENS + 1)
    for seed in range(before):
        save(toy, prompt(ROOM * CHUNK, 1 + seed), step)
    save(toy, tokens[:TOKENS], step)
    offered, _, exact = toy.load("load", tokens)
    assert (offered, exact) == (ROOM * CHUNK, True)
    assert toy.cache.figures()["kvtier_orphan_parts"] == 0


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_slower_tier_keeps_the_head(engines, disk, step, before):
    toy, tokens = (
        engines(disk, chunks=40, capacity=ROOM * disk.footprint(CHUNK_BYTES)),
        prompt(TOKENS + 1),
    )
    for seed in range(before):
        save(toy, prompt(ROOM * CHUNK, 1 + seed), step)
    save(toy, tokens[:TOKENS], step)
    engines.close(toy)
    again = engines(disk, chunks=40)
    offered, _, exact = again.load("load", tokens)
    assert ROOM - 1 <= offered // CHUNK <= ROOM
    assert exact
    depths = sorted(header.depth for header in disk.scan())
    assert again.cache.figures()["kvtier_orphan_parts"] == 0, depths


@pytest.mark.parametrize("step", STEPS)
def test_an_nvme_directory_keeps_the_head(engines, folder, step):
    store = LmdbSlabStore(folder, 64 << 20)
    capacity = store.capabilities.overhead + ROOM * store.footprint(CHUNK_BYTES)
    store.close()
    url, tokens = f"lmdb:{folder}?capacity={capacity}B", prompt(TOKENS + 1)
    toy = engines(url, chunks=40)
    save(toy, tokens[:TOKENS], step)
    engines.close(toy)
    again = engines(url, chunks=40)
    offered, _, exact = again.load("load", tokens)
    assert 0.75 * ROOM <= offered // CHUNK <= ROOM + 1
    assert exact
    kept = again.cache.figures()['kvtier_tier_parts{tier="lmdb"}']
    assert kept * CHUNK == offered, "nothing is kept that cannot be used"


def test_branches_leave_before_what_they_share(engines, disk):
    """Conversations on one system prompt: whoever asks, the shared head is the last to go."""
    head, room = prompt(8 * CHUNK, 1), 20
    toy = engines(disk, chunks=40, capacity=room * disk.footprint(CHUNK_BYTES))
    for seed in range(12):
        tail = prompt(4 * CHUNK, 100 + seed)
        save(toy, np.concatenate([head, tail]), CHUNK)
        toy.cache.clear("dram")
        asked = np.concatenate([head, prompt(CHUNK, 500 + seed)])
        offered, _, exact = toy.load("ask", asked)
        assert (offered, exact) == (8 * CHUNK, True)
    assert toy.cache.figures()["kvtier_orphan_parts"] == 0


@pytest.mark.parametrize("times", [1, 7, 100])
@pytest.mark.parametrize("bad", range(4))
def test_what_a_tier_has_no_room_for_takes_its_children_along(engines, new_disk, bad, times):
    """FULL for one chunk, once or for ever, while there was room for those after it."""

    class FullAt(new_disk):
        left = times

        def _write(self, header, data):
            if header.depth == bad and self.left:
                self.left -= 1
                return Status.FULL
            return super()._write(header, data)

    disk, tokens = FullAt(), prompt(4 * CHUNK + 1)
    toy = engines(disk)
    save(toy, tokens[:-1], 4 * CHUNK)
    engines.close(toy)
    stays = bad if times > 8 else 4
    assert sorted(header.depth for header in disk.scan()) == list(range(stays))
    again = engines(disk)
    assert again.cache.figures()["kvtier_orphan_parts"] == 0
    assert again.load("load", tokens)[::2] == (stays * CHUNK, True)


def test_settled_one_by_one_they_would_be_orphans_after_a_restart(engines, new_disk, monkeypatch):
    """The twin."""

    class FullAt(new_disk):
        def _write(self, header, data):
            return Status.FULL if header.depth == 1 else super()._write(header, data)

    def alone(self, jobs, statuses):
        full = [job for job, one in zip(jobs, statuses, strict=True) if one is Status.FULL]
        for job, one in zip(jobs, statuses, strict=True):
            if one is not Status.FULL:
                self._settled(job, one)
        return full

    monkeypatch.setattr(Spiller, "_settle", alone)
    monkeypatch.setattr(Catalog, "_unfit", lambda self, row, tier, fit: "")
    disk, tokens = FullAt(), prompt(4 * CHUNK + 1)
    toy = engines(disk)
    save(toy, tokens[:-1], 4 * CHUNK)
    engines.close(toy)
    again = engines(disk, recount=False)
    assert again.cache.figures()["kvtier_orphan_parts"] == 1
    assert again.load("load", tokens)[0] == CHUNK


def test_room_made_for_a_tail_that_is_not_kept_would_cost_the_head(engines, disk, monkeypatch):
    """The twin: what hangs under a dropped chunk makes room for itself before it is dropped."""
    monkeypatch.setattr(Spiller, "_fit", lambda self, jobs: jobs)
    toy = engines(disk, chunks=40, capacity=ROOM * disk.footprint(CHUNK_BYTES))
    save(toy, prompt(TOKENS), TOKENS)
    engines.close(toy)
    again = engines(disk, chunks=40, recount=False)
    assert again.load("load", prompt(TOKENS + 1))[0] // CHUNK < ROOM - 1


@pytest.mark.parametrize("kind", ["failed", "lost_ack"])
@pytest.mark.parametrize("bad", range(3))
def test_what_was_written_below_a_failed_chunk_is_gone_before_a_restart(
    engines, faulty_at, kind, bad
):
    """Its records are deleted at once, and not only when room is needed."""
    store = faulty_at(kind, {bad})
    toy = engines(store)
    save(toy, prompt(4 * CHUNK), 4 * CHUNK)
    store.heal()
    engines.close(toy)
    assert sorted(header.depth for header in store.scan()) == list(range(bad))
    again = engines(store)
    assert again.cache.figures()["kvtier_orphan_parts"] == 0
    assert again.load("load", prompt(4 * CHUNK + 1))[2]
