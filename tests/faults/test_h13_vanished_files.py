"""H13: what vanishes below an open cache is a miss, never an error of the engine."""

from __future__ import annotations

import os
import shutil

import pytest

from kvtier.testing.hands import Hands
from kvtier.testing.toy import CHUNK, prompt
from kvtier.tiers.tier import Tier

CHUNKS = 4
TOKENS = CHUNKS * CHUNK


def payloads(toy, folder):
    """The files are gone, and so are the descriptors that were open on them."""
    close_segments(toy)
    for path in folder.glob("*.seg"):
        path.unlink()


def cut_payloads(toy, folder):
    for path in folder.glob("*.seg"):
        os.truncate(path, 4096)


def entries(toy, folder):
    """Somebody else has deleted the records from the index."""
    store = toy.cache._desk.depot.tiers[1].store
    store.delete_many([header.id for header in list(store.scan())])


def directory(toy, folder):
    close_segments(toy)
    shutil.rmtree(folder)


def cut_index(toy, folder):
    """An LMDB map that ends before its pages: touched, it would be a SIGBUS."""
    os.truncate(folder / "index.lmdb", 8192)


def empty_index(toy, folder):
    os.truncate(folder / "index.lmdb", 0)


def close_segments(toy):
    files = toy.cache._desk.depot.tiers[1].store._files
    with files._guard:
        for held in files._open.values():
            os.close(held.descriptor)
        files._open.clear()


DAMAGES = [payloads, cut_payloads, entries, directory, cut_index, empty_index]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__)
def test_a_hit_whose_files_have_vanished_is_a_miss(engines, lmdb, folder, damage, warnings_of):
    toy, tokens = engines(lmdb, recount=False), prompt(TOKENS + 1)
    toy.save("one", tokens[:TOKENS])
    toy.cache.clear("dram")
    match = toy.cache.match(tokens)
    assert match.tokens == TOKENS
    damage(toy, folder)
    counted = toy.cache.metrics.get("tier_errors")
    for _ in range(3):
        assert toy.cache.fetch(match, timeout=5, deadline=5).result(10) is None
    for turn in range(10):
        assert toy.load(f"load-{turn}", tokens)[0] == 0
    if damage is not entries:
        assert toy.cache.metrics.get("tier_errors") > counted
        told = warnings_of(str(folder)) + warnings_of("lmdb")
        assert 1 <= len(told) <= 3, "told, and not for each of thirteen times"
    assert toy.cache.figures()["kvtier_leased_parts"] == 0
    toy.save("two", tokens[:TOKENS])
    assert toy.load("again", tokens)[::2] == (TOKENS, True), "dram alone goes on"


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__)
def test_saving_over_vanished_files_raises_nothing(engines, lmdb, folder, damage):
    toy, tokens = engines(lmdb, recount=False), prompt(TOKENS + 1)
    toy.save("one", prompt(TOKENS, 1))
    damage(toy, folder)
    for seed in range(3):
        toy.save(f"more-{seed}", prompt(TOKENS, 10 + seed))
    toy.save("two", tokens[:TOKENS])
    assert toy.load("three", tokens)[::2] == (TOKENS, True)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda one: one.__name__)
def test_opened_again_it_has_what_is_whole_and_takes_more(engines, lmdb, folder, damage):
    toy, tokens = engines(lmdb, recount=False), prompt(TOKENS + 1)
    toy.save("one", tokens[:TOKENS])
    damage(toy, folder)
    engines.close(toy)
    again = engines(lmdb)
    assert again.load("two", tokens)[::2] == (0, True)
    again.save("three", tokens[:TOKENS])
    again.cache.clear("dram")
    assert again.load("four", tokens)[::2] == (TOKENS, True)


@pytest.mark.parametrize("kind", ["failed", "absent", "short", "wrong"])
def test_what_one_tier_lost_comes_from_the_next_and_fails_once(engines, faulty_at, new_disk, kind):
    upper, lower, tokens = faulty_at(kind, ()), new_disk(), prompt(TOKENS + 1)
    toy = engines(upper, lower)
    toy.save("one", tokens[:TOKENS])
    toy.cache.clear("dram")
    upper.depths = range(CHUNKS)
    for turn in range(3):
        offered, loaded, exact = toy.load(f"load-{turn}", tokens)
        assert (offered, exact) == (TOKENS, True)
        assert loaded.tiers == {"disk2": TOKENS}
        assert toy.cache.flush(timeout=20)
        toy.cache.clear("dram")
    assert 0 < upper.reads <= upper.writes, "each copy that was written fails once at most"


def outage(engines, faulty_at):
    """Ask a tier that does not answer for ten prompts, then let it answer again."""
    clock, store = Hands(), faulty_at("unavailable", ())
    toy = engines(store, chunks=48, clock=clock)
    prompts = [prompt(TOKENS + 1, seed) for seed in range(10)]
    for seed, tokens in enumerate(prompts):
        toy.save(f"save-{seed}", tokens[:TOKENS])
    toy.cache.clear("dram")
    matches = [toy.cache.match(tokens) for tokens in prompts]
    store.depths = range(CHUNKS)
    for match in matches:
        assert toy.cache.fetch(match, timeout=5, deadline=5).result(10) is None
    assert store.counts["unavailable"] == 5, "then the breaker opened"
    assert toy.cache.flush(timeout=20)  # or a write may be the one call that tries
    store.heal()
    clock.now += 5.0
    return sum(
        toy.load(f"alive-{seed}", t)[::2] == (TOKENS, True) for seed, t in enumerate(prompts)
    )


def test_a_tier_that_does_not_answer_is_not_taken_for_empty(engines, faulty_at):
    """What was never asked for is still there when it comes back."""
    assert outage(engines, faulty_at) == 5


def test_taken_for_failed_what_was_not_asked_for_would_be_lost(engines, faulty_at, monkeypatch):
    """The twin."""
    monkeypatch.setattr(Tier, "readable", True)
    assert outage(engines, faulty_at) == 0


def test_while_a_tier_is_silent_dram_does_its_work_without_it(engines, faulty_at):
    """What only that tier has is computed, saved and hit again; and is still there afterwards."""
    clock, store = Hands(), faulty_at("unavailable", ())
    toy = engines(store, chunks=48, clock=clock)
    prompts = [prompt(TOKENS + 1, seed) for seed in range(10)]
    for seed, tokens in enumerate(prompts):
        toy.save(f"save-{seed}", tokens[:TOKENS])
    toy.cache.clear("dram")
    store.depths = range(CHUNKS)
    for seed, tokens in enumerate(prompts):
        assert toy.load(f"dead-{seed}", tokens)[0] == 0
        toy.save(f"anew-{seed}", tokens[:TOKENS])
        assert toy.load(f"dram-{seed}", tokens)[::2] == (TOKENS, True)
    assert toy.cache.match(prompts[9]).tiers == ("dram",) * CHUNKS
    assert toy.cache.flush(timeout=20)  # or a write may be the one call that tries
    store.heal()
    clock.now += 5.0
    toy.cache.clear("dram")
    assert toy.load("alive", prompts[9])[::2] == (TOKENS, True)


def test_taken_for_stored_it_would_be_computed_for_ever(engines, faulty_at):
    """The twin."""
    store = faulty_at("unavailable", ())
    toy = engines(store, chunks=48, clock=Hands())
    prompts = [prompt(TOKENS + 1, seed) for seed in range(10)]
    for seed, tokens in enumerate(prompts):
        toy.save(f"save-{seed}", tokens[:TOKENS])
    toy.cache.clear("dram")
    toy.cache._desk.catalog.silent = int
    store.depths = range(CHUNKS)
    for seed, tokens in enumerate(prompts):
        toy.load(f"dead-{seed}", tokens)
        toy.save(f"anew-{seed}", tokens[:TOKENS])
    assert toy.load("again", prompts[9])[0] == 0
