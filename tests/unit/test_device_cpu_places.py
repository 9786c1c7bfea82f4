"""The CPU device copies scattered blocks wherever the pages lie, and never all of those."""

from __future__ import annotations

import threading
import tracemalloc
from collections import deque
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kvtier.device import base, cpu
from kvtier.device.base import HOLE, Copy, Device, Role
from kvtier.device.chaos import ChaosDevice
from kvtier.device.cpu import CpuDevice
from kvtier.errors import ConfigError, MisuseError

PLANES, BLOCKS, BYTES = 6, 20, 48
SECONDS = 10.0
PARTS = pytest.mark.parametrize("part", [slice(None), slice(1, 5)], ids=["a slot", "a part of one"])
LIES = {  # how pages lie in memory, from more of it than they are
    "in one piece": lambda memory: memory[:, :BLOCKS, :BYTES].copy(),
    "planes apart": lambda memory: memory[:, 1 : 1 + BLOCKS, :BYTES].copy()[:, 1:],
    "blocks before planes": lambda memory: memory[:, :BLOCKS, :BYTES].swapaxes(0, 1).copy(),
    "blocks among others": lambda memory: memory[:, ::2, :BYTES],
    "odd gaps": lambda memory: memory[:, :, : BYTES + 16].copy()[:, :, 8 : 8 + BYTES],
    "planes oddly apart": lambda memory: (
        memory.reshape(PLANES, -1)[:, : BLOCKS * BYTES + 8]
        .copy()[:, : BLOCKS * BYTES]
        .reshape(PLANES, BLOCKS, BYTES)
    ),
    "one plane": lambda memory: memory[:1, :BLOCKS, :BYTES].copy(),
    "no plane": lambda memory: memory[:0, :BLOCKS, :BYTES].copy(),
    "no bytes": lambda memory: memory[:, :BLOCKS, :0].copy(),
    "backwards": lambda memory: memory[::-1, BLOCKS - 1 :: -1, :BYTES],
}


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    found = CpuDevice()
    yield found
    found.close()


def copied(device: Device, copy: Copy, role: Role) -> bool:
    if role == "store":
        return device.gather(device.stream(role), [copy], ()).wait(SECONDS)
    return device.scatter(device.stream(role), [[copy]], ())[-1].wait(SECONDS)


@PARTS
@pytest.mark.parametrize("blocks", [[17, 2, 11, 12], [17, 18, 2, 3], [6, 7, 8, 0]], ids=str)
@pytest.mark.parametrize("lies", LIES)
def test_scattered_blocks_are_copied_from_and_to_wherever_pages_lie(
    device: CpuDevice, lies: str, blocks: list[int], part: slice
):
    rng = np.random.default_rng(3)
    memory = rng.integers(0, 255, (PLANES, 2 * BLOCKS, 2 * BYTES), np.uint8)
    found = LIES[lies](memory)
    found = found.swapaxes(0, 1) if lies == "blocks before planes" else found
    whole = memory if np.shares_memory(found, memory) else found
    shape = (found.shape[0], 6 if part.stop else 4, found.shape[2])
    target = np.full(shape, 0xAB, np.uint8)
    assert copied(device, Copy(found, blocks, target[:, part]), "store")
    expected = np.full_like(target, 0xAB)
    expected[:, part] = found[:, blocks]
    assert np.array_equal(target, expected)
    source = rng.integers(0, 255, shape, np.uint8)
    left = whole.copy()
    (left if whole is found else LIES[lies](left))[:, blocks] = source[:, part]
    assert copied(device, Copy(found, blocks, source[:, part]), "load")
    assert np.array_equal(whole, left)


@PARTS
@pytest.mark.parametrize("lies", ["in one piece", "planes apart", "blocks before planes"])
def test_no_copy_is_made_of_all_pages(device: CpuDevice, lies: str, part: slice):
    """As ``np.take`` does of what is not in one piece: a cache of gigabytes, for each chunk."""
    pages = {
        "in one piece": np.zeros((PLANES, 512, 4096), np.uint8),
        "planes apart": np.zeros((PLANES, 513, 4096), np.uint8)[:, 1:],
        "blocks before planes": np.zeros((512, PLANES, 4096), np.uint8).swapaxes(0, 1),
    }[lies]
    blocks = [400, 2, 11, 300]
    copy = Copy(pages, blocks, np.zeros((PLANES, 6 if part.stop else 4, 4096), np.uint8)[:, part])
    tracemalloc.start()
    try:
        assert copied(device, copy, "store")
        assert copied(device, copy, "load")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < copy.slot.nbytes, "not even of the blocks"


def from_the_end(device: Device, role: Role, blocks: list[int]) -> bool:
    """Copy blocks of ids that there are not; return whether no byte has changed."""
    pages = np.random.default_rng(0).integers(0, 200, (PLANES, BLOCKS, BYTES), np.uint8)
    slot = np.full((PLANES, len(blocks), BYTES), 0xAB, np.uint8)
    before = pages.copy()
    with pytest.raises(MisuseError, match="do not match"):
        copied(device, Copy(pages, blocks, slot), role)
    return bool((slot == 0xAB).all()) and np.array_equal(pages, before)


@pytest.mark.parametrize("role", ["store", "load"])
@pytest.mark.parametrize(
    "blocks", [[-2], [-3, -2], [4, 5, -2], [HOLE, -2, HOLE], [-BLOCKS]], ids=str
)
def test_an_id_below_zero_is_no_block_from_the_end(
    device: CpuDevice, blocks: list[int], role: Role
):
    assert from_the_end(device, role, blocks)
    with closing(ChaosDevice(0)) as chaos:
        assert from_the_end(chaos, role, blocks)


def test_taken_as_an_array_takes_it_the_id_would_be_one(device: CpuDevice, monkeypatch):
    """The twin: ids that only HOLE is told from."""
    monkeypatch.setattr(base, "HOLE", -100)
    pages = np.random.default_rng(0).integers(0, 200, (PLANES, BLOCKS, BYTES), np.uint8)
    slot = np.zeros((PLANES, 1, BYTES), np.uint8)
    assert copied(device, Copy(pages, [-2], slot), "store")
    assert np.array_equal(slot, pages[:, [-2]])


def late(device: CpuDevice, monkeypatch) -> bool:
    """Copy where there is no thread, and then where there is; return if the first copy was made."""
    pages = np.ones((PLANES, BLOCKS, BYTES), np.uint8)
    first, second = np.zeros((2, PLANES, 1, BYTES), np.uint8)

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(
            ConfigError, match=r"\(can't start new thread\): raise the limit of pro"
        ):
            device.gather(device.stream("store"), [Copy(pages, [1], first)], ())
    assert copied(device, Copy(pages, [2], second), "store")
    assert second.all()
    return bool(first.any())


def test_a_copy_for_which_there_was_no_thread_is_not_made_later(device: CpuDevice, monkeypatch):
    """Its slot is another's by then. And those behind it are made as soon as there is one."""
    assert not late(device, monkeypatch)


def test_queued_before_there_is_a_thread_it_would_be_made(device: CpuDevice, monkeypatch):
    """The twin."""
    wake = cpu.CpuStream._wake

    def wakes(stream, works):
        if stream._thread is None:
            stream._work.put(works)
            wake(stream, deque())
        else:
            wake(stream, works)

    monkeypatch.setattr(cpu.CpuStream, "_wake", wakes)
    assert late(device, monkeypatch)
