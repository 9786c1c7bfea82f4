"""A spoilt record changes no answer, and it is the verification that sees to it.

The answers are those of a real engine over a random model, whose attention is sharp enough that
wrong KV gives other tokens.
"""

from __future__ import annotations

import os
import re

import numpy as np
import pytest

from kvtier.bench.arm import Arm
from kvtier.bench.messages import Empty, LoadModel, Open, Serve
from kvtier.bench.report import digest
from kvtier.identity.record import Header

CHUNK = 256
CHUNKS = 3
KV_BYTES = CHUNK * 256
PAGE = 4096
OUTPUT = 24
PROMPT = [int(token) for token in np.random.default_rng(7).integers(0, 256, CHUNK * CHUNKS + 40)]


def arm_with(tiers):
    arm = Arm()
    arm.answer(LoadModel("random", CHUNK))
    arm.answer(Open(2000, prefix_cache=True, tiers=tiers))
    return arm


def serve(arm):
    return arm.answer(Serve(PROMPT, OUTPUT))


@pytest.fixture(scope="module")
def right():
    """Return the digest of the answer that is computed without a cache."""
    arm = arm_with([])
    yield digest([serve(arm).tokens])
    arm.close()


@pytest.fixture
def lmdb(tmp_path):
    """Return an arm whose prefix lies on disk only."""
    arm = arm_with(["dram:4MiB", f"lmdb:{tmp_path}/kv?capacity=64MiB"])
    serve(arm)
    arm.answer(Empty(["dram"]))
    yield arm
    arm.close()


def payloads(folder):
    """Return file and offset of the payload of each chunk of the prompt in a slab directory.

    Which slot a chunk lies in is as its write came; its header says how deep in the prompt it is.
    """
    found = {}
    for path in folder.glob("slab-*.seg"):
        stride = int(re.fullmatch(r"slab-\d+-(\d+)\.seg", path.name)[1])
        for start in range(0, path.stat().st_size, stride):
            with path.open("rb") as file:
                file.seek(start)
                head = file.read(PAGE)
            if any(head):
                depth = Header.unpack(head).depth
                assert depth not in found
                found[depth] = (path, start + PAGE)
    assert sorted(found) == list(range(CHUNKS))
    return [found[depth] for depth in range(CHUNKS)]


def overwrite(path, offset, data):
    descriptor = os.open(path, os.O_WRONLY)
    try:
        assert os.pwrite(descriptor, data, offset) == len(data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flip_a_bit(path, offset):
    with path.open("rb") as file:
        file.seek(offset)
        byte = file.read(1)[0]
    overwrite(path, offset, bytes([byte ^ 0x10]))


def noise(number):
    """Return KV that could be real: bfloat16 values around zero, no NaN among them."""
    values = np.random.default_rng(number).standard_normal(KV_BYTES // 2, np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def corrupt(arm):
    return arm._cache.metrics.get("corrupt_records", tier="lmdb")


def test_what_was_stored_gives_the_same_answer(lmdb, right):
    again = serve(lmdb)
    assert again.hits == {"lmdb": CHUNK * CHUNKS}
    assert again.read_bytes >= KV_BYTES * CHUNKS
    assert digest([again.tokens]) == right
    assert corrupt(lmdb) == 0


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_flipped_bit_costs_a_chunk_and_no_answer(lmdb, right, tmp_path, chunk):
    path, offset = payloads(tmp_path / "kv")[chunk]
    flip_a_bit(path, offset + KV_BYTES // 2)
    again = serve(lmdb)
    assert digest([again.tokens]) == right
    assert corrupt(lmdb) == 1
    assert again.hits.get("lmdb", 0) == CHUNK * chunk
    assert again.recomputed == len(PROMPT) - CHUNK * chunk


def test_noise_goes_unused(lmdb, right, tmp_path):
    for number, (path, offset) in enumerate(payloads(tmp_path / "kv")):
        overwrite(path, offset, noise(number))
    again = serve(lmdb)
    assert digest([again.tokens]) == right
    assert corrupt(lmdb) == CHUNKS
    assert again.hits == {}


def test_without_verification_noise_changes_the_answer(lmdb, right, tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier.tiers.exact.is_exact", lambda header, wanted: True)
    for number, (path, offset) in enumerate(payloads(tmp_path / "kv")):
        overwrite(path, offset, noise(number))
    again = serve(lmdb)
    assert again.hits == {"lmdb": CHUNK * CHUNKS}
    assert digest([again.tokens]) != right
