"""H01: a chunk whose write failed, in whatever way, is never served from there, and heals."""

from __future__ import annotations

import errno
from collections.abc import Collection
from pathlib import Path

import pytest

from kvtier.device import cpu
from kvtier.errors import Corrupt
from kvtier.identity.record import HEADER_BYTES, Header
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import FileIO
from kvtier.testing.toy import CHUNK, prompt

CHUNKS = 3
WHOLE_CALL = {"unavailable", "defect"}


def save_lose_dram_and_load(toy, tokens):
    toy.save("one", tokens[: CHUNKS * CHUNK])
    toy.cache.clear("dram")
    return toy.load("two", tokens)


def expect_healed(toy, tokens):
    """A retry stores what is missing, and everything is there and exact."""
    offered, loaded, exact = save_lose_dram_and_load(toy, tokens)
    assert (offered, loaded.tokens, exact) == (CHUNKS * CHUNK, CHUNKS * CHUNK, True)


@pytest.mark.parametrize("bad", range(CHUNKS))
@pytest.mark.parametrize("kind", ["failed", "lost_ack", "lost_write", "unavailable", "defect"])
def test_only_what_lies_before_a_failed_write_is_a_hit(engines, faulty_at, kind, bad):
    store, tokens = faulty_at(kind, {bad}), prompt(CHUNKS * CHUNK + 1)
    toy = engines(store)
    offered, _, exact = save_lose_dram_and_load(toy, tokens)
    assert exact
    assert offered == (0 if kind in WHOLE_CALL else bad * CHUNK)
    assert store.counts[kind]
    assert toy.cache.match(tokens).tokens == offered, "nor is it offered again"
    store.heal()
    expect_healed(toy, tokens)


class HalfWritten(FileIO):
    """A disk that writes the first page of records of some depths, and then fails, or stops."""

    def __init__(self, depths: Collection[int], code: int) -> None:
        self.depths = depths
        self.code = code

    def pwrite(self, descriptor, buffers, offset):
        try:
            header = Header.unpack(bytes(buffers[0][:HEADER_BYTES]))
        except Corrupt:  # the self-test's page
            return super().pwrite(descriptor, buffers, offset)
        if header.depth not in self.depths:
            return super().pwrite(descriptor, buffers, offset)
        count = super().pwrite(descriptor, [buffers[0][:4096]], offset)
        if self.code:
            raise OSError(self.code, "injected")
        return count


@pytest.mark.parametrize("bad", range(CHUNKS))
@pytest.mark.parametrize("code", [errno.EIO, errno.EFBIG, 0])
def test_half_a_record_on_the_disk_is_no_record(engines, folder: Path, code, bad):
    """A header whose payload never came, by an error or a short count, then a restart."""
    io, tokens = HalfWritten({bad}, code), prompt(CHUNKS * CHUNK + 1)
    toy = engines(LmdbSlabStore(folder, 64 << 20, io=io))
    offered, _, exact = save_lose_dram_and_load(toy, tokens)
    assert (offered, exact) == (bad * CHUNK, True)
    engines.close(toy)
    again = engines(f"lmdb:{folder}?capacity=64MiB")
    assert again.load("after a restart", tokens)[::2] == (bad * CHUNK, True)
    expect_healed(again, tokens)


@pytest.mark.parametrize("bad", range(CHUNKS))
def test_a_full_disk_stores_a_head_and_no_more(engines, folder: Path, bad):
    io, tokens = HalfWritten(range(bad, CHUNKS), errno.ENOSPC), prompt(CHUNKS * CHUNK + 1)
    toy = engines(LmdbSlabStore(folder, 64 << 20, io=io))
    offered, _, exact = save_lose_dram_and_load(toy, tokens)
    assert (offered, exact) == (bad * CHUNK, True)
    io.depths = ()
    expect_healed(toy, tokens)


def test_a_copy_that_fails_at_one_chunk_stores_nothing_after_it(engines, monkeypatch):
    """The gather of one chunk fails: the plan failed, so no chunk of it becomes visible."""
    toy, tokens = engines(), prompt(CHUNKS * CHUNK + 1)
    copy, count = cpu._copy, []

    def broken(*args, **kwargs):
        count.append(0)
        if len(count) == 2:
            raise OSError(errno.EIO, "the link is down")
        copy(*args, **kwargs)

    monkeypatch.setattr(cpu, "_copy", broken)
    toy.save("one", tokens[: CHUNKS * CHUNK])
    monkeypatch.undo()
    assert toy.load("two", tokens)[0] == 0
    assert toy.cache.metrics.get("dropped_saves", reason="copy") == CHUNKS
    toy.save("three", tokens[: CHUNKS * CHUNK])
    assert toy.load("four", tokens)[::2] == (CHUNKS * CHUNK, True)
