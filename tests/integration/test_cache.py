"""A Cache end to end, with real blocks, a real arena and a real NVMe directory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kvtier
from kvtier.testing.toy import (
    BLOCK,
    CHUNK,
    CHUNK_BYTES,
    GEOMETRY,
    dram,
    opened,
    pattern,
    prompt,
)
from kvtier.transfer import CopyResult, CopyStatus

pytestmark = pytest.mark.everywhere

# ------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize(
    ("length", "offered"), [(63, 0), (64, 48), (65, 64), (127, 64), (128, 112), (129, 128)]
)
def test_the_offer_is_whole_blocks_below_the_prompt(toy, length, offered):
    """H06: at least one token is left to compute, and no half block is offered."""
    tokens = prompt(256)
    toy.save("a", tokens)
    got, loaded, exact = toy.load("b", tokens[:length])
    assert got == offered
    assert exact
    assert loaded is None or loaded.tokens == offered


@pytest.mark.parametrize("computed", [16, 48, 64, 80, 128, 176])
def test_a_load_begins_where_the_engine_has_no_blocks(toy, computed):
    tokens = prompt(257)
    toy.save("a", tokens[:256])
    offered, loaded, exact = toy.load("b", tokens, computed)
    assert offered == loaded.tokens == 256 - computed
    assert exact


def test_scattered_blocks_are_saved_and_loaded_exactly(toy):
    tokens = prompt(129)
    order = [5, 90, 17, 18, 19, 3, 77, 40]
    for index, block in enumerate(order):
        toy.kv[:, :, block] = pattern(tokens[: (index + 1) * BLOCK])
    toy.connector.save("a", tokens[:128], order)
    toy.connector.finish("a")
    toy.until(lambda update: "a" in update.released)
    toy.cache.flush(timeout=20)
    offered, _, exact = toy.load("b", tokens, first_block=128)
    assert (offered, exact) == (128, True)


def test_another_identity_shares_nothing(toy):
    """H08: adapter and salt separate; the same adapter hits."""
    tokens = prompt(129)
    request = kvtier.Request(adapter=b"A" * 32)
    toy.compute(tokens, range(8))
    toy.connector.save("a", tokens, list(range(8)), request)
    toy.connector.finish("a")
    toy.until(lambda update: "a" in update.released)
    toy.cache.flush(timeout=20)
    for other in (None, kvtier.Request(adapter=b"B" * 32), kvtier.Request(salt=b"x")):
        assert toy.connector.match(f"m{other}", tokens, 0, other).tokens == 0
    assert toy.connector.match("same", tokens, 0, request).tokens == 128
    toy.connector.finish("same")


def test_each_chunk_is_saved_once(toy):
    tokens = prompt(256)
    toy.compute(tokens, range(16))
    for length in range(16, 257, 16):  # chunked prefill, then decode
        toy.connector.save("a", tokens[:length], list(range(length // BLOCK)))
    toy.connector.finish("a")
    toy.until(lambda update: "a" in update.released)
    toy.cache.flush(timeout=20)
    toy.save("again", tokens)
    assert toy.cache.metrics.get("saved_chunks") == 4
    assert toy.load("b", tokens)[2]


# --------------------------------------------------------------------------------- slower tiers


def test_a_new_process_would_find_everything_on_disk(folder):
    """H20: reopened, all chunks hit, and saving them again writes nothing."""
    tokens = prompt(1025)
    first = opened(dram(32), folder)
    first.save("a", tokens[:1024])
    first.close()
    second = opened(dram(32), folder)
    offered, loaded, exact = second.load("b", tokens)
    assert (offered, exact) == (1024, True)
    assert loaded.tiers == {"lmdb": 1024}
    second.save("c", tokens[:1024])
    assert second.cache.metrics.get("spilled_bytes", tier="lmdb") == 0
    assert second.load("d", tokens)[1].tiers == {"dram": 1024}
    second.close()


def test_dram_smaller_than_the_prompt_gives_its_head(folder):
    tokens = prompt(1025)
    first = opened(dram(32), folder)
    first.save("a", tokens[:1024])
    first.close()
    second = opened(dram(4), folder)
    offered, loaded, exact = second.load("b", tokens)
    assert (offered, loaded.tokens, exact) == (4 * CHUNK, 4 * CHUNK, True)
    second.close()


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "2"},
        {"quantisation": "int8"},
        {"tenant": "b"},
        {"geometry": kvtier.Geometry(GEOMETRY.components, "float16", (BLOCK,), CHUNK)},
        {"geometry": kvtier.Geometry(GEOMETRY.components, "bfloat16", (BLOCK,), CHUNK, "other")},
    ],
)
def test_another_namespace_in_the_same_directory_never_meets_this_one(folder, change):
    """H03: equal sizes, equal tokens, another identity: no hit, and both live on."""
    tokens = prompt(257)
    first = opened(dram(8), folder)
    first.save("a", tokens[:256])
    first.close()
    fields = {"model": "tiny", "geometry": GEOMETRY, **change}
    other = opened(dram(8), folder, namespace=kvtier.Namespace(**fields))
    assert other.load("b", tokens)[0] == 0
    other.save("c", tokens[:256])
    other.close()
    again = opened(dram(8), folder)
    assert again.load("d", tokens)[:2][0] == 256
    again.close()


def test_evicted_from_dram_and_fetched_again(folder):
    one = opened(dram(8), folder)
    many = [prompt(513, seed) for seed in range(4)]
    for index, tokens in enumerate(many):
        one.save(str(index), tokens[:512])
    for index, tokens in enumerate(many):
        offered, _, exact = one.load(f"b{index}", tokens)
        assert (offered, exact) == (512, True)
    assert one.cache.metrics.get("fetched_bytes", tier="lmdb") >= 3 * 8 * CHUNK_BYTES
    one.close()


def test_a_full_directory_keeps_heads_and_stays_exact(tmp_path):
    capacity = 3 << 20  # 480 chunks of 12 KiB with their headers do not fit
    one = opened(dram(16), f"lmdb:{tmp_path}/kv?capacity={capacity}B")
    for seed in range(60):
        one.save(f"s{seed}", prompt(512, seed))
    used = sum(
        file.stat().st_blocks * 512 for file in (tmp_path / "kv").rglob("*") if file.is_file()
    )
    assert used <= capacity
    offers = [one.load(f"l{seed}", np.append(prompt(512, seed), 1)) for seed in range(60)]
    assert all(exact for _, _, exact in offers)
    assert sum(offered for offered, _, _ in offers) >= 40 * CHUNK
    assert one.cache.metrics.get("evicted_parts", tier="lmdb") > 0
    one.close()


def test_second_touch_writes_down_only_what_is_used_again(tmp_path):
    url = f"lmdb:{tmp_path}/kv?capacity=64MiB&admission=second-touch"
    one = opened(dram(32), url)
    used, unused = prompt(257, 1), prompt(257, 2)
    one.save("a", used[:256])
    one.save("b", unused[:256])
    assert one.cache.metrics.get("spilled_bytes", tier="lmdb") == 0
    one.load("c", used)
    assert one.cache.flush(timeout=20)
    assert one.cache.metrics.get("spilled_bytes", tier="lmdb") == 4 * CHUNK_BYTES
    one.close()


def test_another_geometry_on_the_same_memory_works_beside_it(toy):
    toy.save("a", prompt(257)[:256])
    geometry = replace(GEOMETRY, components=(kvtier.Component(layers=1, heads=2, head_size=8),))
    small = toy.cache.share(kvtier.Namespace("tiny", geometry))
    plan = small.plan_save(small.prefix(prompt(257)), range(16))
    assert len(plan.parts) == 4
    small.settle(plan, CopyResult(CopyStatus.OK))
    small.flush(timeout=5)
    assert small.match(prompt(257)).chunks == toy.cache.match(prompt(257)).chunks == 4
    with toy.cache.lease(toy.cache.match(prompt(257)), deadline=60) as lease:
        small.close()
        assert lease.held
