"""H19, H20: a disk never holds more than its budget, and a restart finds what it holds."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import kvtier
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import Segment
from kvtier.testing.faults import Rates
from kvtier.testing.hands import Hands
from kvtier.testing.overrun import overrun, watched
from kvtier.testing.short_index import short_index
from kvtier.testing.toy import BLOCK, CHUNK, CHUNK_BYTES, GEOMETRY, NAMESPACE, Toy, prompt
from kvtier.transfer import CopyResult, CopyStatus

MIB = 1 << 20
ALL = "admission=through&write_budget=unlimited"


def taken(folder) -> int:
    """Return the bytes of disk that a directory and all in it take."""
    total = folder.stat().st_blocks
    for path in list(folder.iterdir()):
        try:
            total += path.stat().st_blocks
        except FileNotFoundError:
            continue
    return total * 512


# -------------------------------------------------------------------------------------- H19


@pytest.mark.parametrize("kind", Rates.__slots__)
def test_whatever_fails_the_budget_of_a_tier_holds(engines, faulty_at, kind):
    """A store that knows no bound itself, and fails at every fourth depth: the cache counts."""
    store = faulty_at(kind, {2, 6})
    room = 20 * store.footprint(CHUNK_BYTES)
    clock = Hands()
    toy = engines(store, chunks=24, capacity=room, clock=clock)
    for seed in range(15):
        clock.now += 6.0  # what was left alone is tried again
        toy.save(f"save-{seed}", prompt(8 * CHUNK, seed))
        if seed % 5 == 4:
            toy.cache.clear("dram")
            assert toy.load(f"load-{seed}", prompt(8 * CHUNK + 1, seed))[2]
    assert store.peak_bytes <= room
    assert store.peak_bytes > room / 3
    store.heal()


def test_eight_threads_at_full_speed_never_exceed_the_capacity(tmp_path):
    """Through a Cache that writes all it can; the directory is looked at all the while."""
    capacity, size = 24 * MIB, 64 * CHUNK
    geometry = kvtier.Geometry(
        (kvtier.Component(layers=8, heads=4, head_size=16),), block_tokens=(BLOCK,)
    )
    namespace = kvtier.Namespace("larger", geometry)
    folder = tmp_path / "kv"
    cache = kvtier.open("dram:32MiB", f"lmdb:{folder}?capacity=24MiB&{ALL}", namespace=namespace)
    samples, done = [], threading.Event()

    def sample() -> None:
        while not done.is_set():
            samples.append(taken(folder))
            done.wait(0.005)

    def save(seed: int) -> None:
        for turn in range(10):
            prefix = cache.prefix(prompt(size, 1000 * seed + turn))
            plan = cache.plan_save(prefix, list(range(size // BLOCK)))
            if plan is not None:
                cache.settle(plan, CopyResult(CopyStatus.OK))
            assert cache.flush(timeout=40)

    threads = [threading.Thread(target=save, args=(seed,)) for seed in range(8)]
    sampler = threading.Thread(target=sample)
    for thread in (sampler, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.flush(timeout=40)
    done.set()
    sampler.join()
    written = cache.metrics.get("spilled_bytes", tier="lmdb")
    cache.close()
    assert written > 2 * capacity
    assert max(samples) <= capacity
    assert taken(folder) <= capacity


def test_a_gib_through_64_mib_stays_within_them(tmp_path):
    """Sampled every 50 ms, by eight threads, while a reader of the index does not end."""
    found = overrun(tmp_path / "kv", 64 * MIB, 1024 * MIB)
    assert found.written >= 1024 * MIB
    assert found.most <= 64 * MIB
    assert found.samples > 5


def test_twin_whose_segments_are_free_of_charge_goes_beyond(tmp_path, monkeypatch):
    monkeypatch.setattr(Segment, "charge", property(lambda self: self.length // 2))
    assert overrun(tmp_path / "kv", 64 * MIB, 256 * MIB, every=0.005).most > 64 * MIB


@pytest.fixture
def nearly_full(folder):
    """A toy engine on a tier whose index is about to be full, with no room for a second one."""
    with short_index():
        toy = Toy(
            kvtier.open("dram:1MiB", f"lmdb:{folder}?capacity=8MiB&{ALL}", namespace=NAMESPACE)
        )
        with watched(folder, 0.05) as samples:
            for seed in range(900):
                toy.save(f"s{seed}", prompt(CHUNK, seed))
            yield toy
        assert max(samples) <= 8 * MIB
        toy.close()


def written_in_400_turns(toy) -> float:
    metrics = toy.cache.metrics
    before = metrics.get("spilled_bytes", tier="lmdb")
    for seed in range(900, 1300):
        toy.save(f"s{seed}", prompt(CHUNK, seed))
        if seed % 10 == 0:
            assert toy.load(f"l{seed}", prompt(CHUNK + 1, seed - 40))[2]
    return metrics.get("spilled_bytes", tier="lmdb") - before


def test_a_tier_whose_index_is_full_makes_room_by_itself(nearly_full, warnings_of):
    """It goes on at once: nothing that is saved is dropped, and nothing fails."""
    assert written_in_400_turns(nearly_full) == 400 * CHUNK_BYTES
    assert len(warnings_of("made anew")) == 1
    assert nearly_full.cache.metrics.get("tier_errors", tier="lmdb") == 0


def test_twin_without_that_nothing_is_written_any_more(nearly_full, monkeypatch):
    monkeypatch.setattr("kvtier.storage_backends.slab_space.by_age", lambda *_: [])
    assert written_in_400_turns(nearly_full) < 300 * CHUNK_BYTES


# -------------------------------------------------------------------------------------- H20

SMALL = kvtier.Geometry(GEOMETRY.components, block_tokens=(BLOCK,), chunk_tokens=BLOCK)
CHUNKS = 1000


def stored(cache, tokens):
    """Save a prompt whose chunks are filled with their place in it; return what was written."""
    plan = cache.plan_save(cache.prefix(tokens), list(range(len(tokens) // BLOCK)))
    for part in plan.parts if plan is not None else ():
        cache._desk.arena.memory[part.offset : part.offset + part.nbytes] = part.blocks[0] % 251
    if plan is not None:
        cache.settle(plan, CopyResult(CopyStatus.OK))
    assert cache.flush(timeout=40)
    return cache.metrics.get("spilled_bytes", tier="lmdb")


def test_a_thousand_chunks_hit_after_a_restart_and_nothing_is_written_again(lmdb):
    namespace, tokens = kvtier.Namespace("small", SMALL), prompt(CHUNKS * BLOCK + 1)
    with kvtier.open("dram:16MiB", lmdb, namespace=namespace) as cache:
        nbytes = SMALL.bytes_per_token * BLOCK
        assert stored(cache, tokens[:-1]) == CHUNKS * nbytes
    with kvtier.open("dram:16MiB", lmdb, namespace=namespace) as cache:
        match = cache.match(tokens)
        assert match.chunks == CHUNKS
        assert stored(cache, tokens[:-1]) == 0
        with cache.fetch(match, timeout=30, deadline=60).result(40) as lease:
            assert lease.chunks == CHUNKS
            for chunk, (slot,) in enumerate(lease.slots):
                found = cache._desk.arena.memory[slot.offset : slot.offset + nbytes]
                assert (found == chunk % 251).all()
        assert stored(cache, tokens[:-1]) == 0
        assert cache.figures()["kvtier_orphan_parts"] == 0


WRITER = """
import os, signal, sys
import kvtier
from kvtier.testing.toy import NAMESPACE, Toy, prompt
toy = Toy(kvtier.open("dram:4MiB", sys.argv[1], namespace=NAMESPACE))
for seed in range(int(sys.argv[2])):
    toy.save(f"s{seed}", prompt(256, seed))
    print(seed, flush=True)
if sys.argv[3] == "busy":
    toy.compute(prompt(256, 99), range(16))
    toy.connector.save("busy", prompt(256, 99), list(range(16)))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["idle", "busy"])
@pytest.mark.parametrize("durability", ["none", "batch", "each"])
def test_after_kill_9_what_was_flushed_hits_and_every_byte_is_accounted_for(
    engines, folder, durability, when
):
    """Killed by a signal the page cache survives, so each mode keeps what it has committed."""
    url, count = f"lmdb:{folder}?capacity=64MiB&durability={durability}", 6
    command = [sys.executable, "-c", WRITER, url, str(count), when]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(done.stdout.split()) == count
    toy = engines(url)
    hits = [toy.load(f"l{s}", np.append(prompt(256, s), 1))[::2] for s in range(count)]
    if durability == "batch":  # commits what is a second old, or 256 MiB
        assert all(exact for _, exact in hits)
    else:
        assert hits == [(256, True)] * count
    for seed in range(count):
        toy.save(f"s{seed}", prompt(256, seed))
    assert toy.cache.figures()["kvtier_orphan_parts"] == 0
    engines.close(toy)
    store = LmdbSlabStore(folder, 64 * MIB)
    kept = sum(store.footprint(header.stored_bytes) for header in store.scan())
    overhead = store.capabilities.overhead
    store.close()
    assert kept >= count * 4 * CHUNK_BYTES
    assert taken(folder) <= 64 * MIB
    assert overhead < 64 * MIB


def test_an_index_that_forgets_would_write_everything_again(lmdb, monkeypatch):
    """The twin: nothing is listed at opening, so nothing hits."""
    toy = Toy(kvtier.open("dram:1MiB", lmdb, namespace=kvtier.Namespace("tiny", GEOMETRY)))
    toy.save("one", prompt(256))
    toy.close()
    monkeypatch.setattr("kvtier.depot.index_tiers", lambda *_: None)
    toy = Toy(kvtier.open("dram:1MiB", lmdb, namespace=kvtier.Namespace("tiny", GEOMETRY)))
    assert toy.load("two", prompt(257))[0] == 0
    toy.close()
