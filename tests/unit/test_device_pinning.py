"""Which memory a CUDA device has registered: all of it, once, of a mapping that is still there."""

from __future__ import annotations

import mmap
from contextlib import closing

import numpy as np
import pytest
import torch

from kvtier.copier import Pages
from kvtier.device.cuda import CudaDevice
from kvtier.device.layout import bytes_at
from kvtier.device.paths import DEFAULT
from kvtier.errors import ConfigError
from kvtier.identity.geometry import Component, Geometry
from kvtier.identity.record import PartName
from kvtier.memory.arena import Arena
from kvtier.testing.cpu_driver import CpuDriver


@pytest.fixture
def driver():
    return CpuDriver()


@pytest.fixture
def device(driver):
    with closing(CudaDevice(driver, DEFAULT, in_flight=2, staging_bytes=160)) as found:
        yield found


def test_pinned_memory_that_is_refused_is_an_error(device, driver):
    driver.refuses = True
    with pytest.raises(ConfigError, match="not pinned"):
        device.pin(np.zeros(64, np.uint8))


def test_memory_is_pinned_once_exactly_and_let_go_at_the_end(device, driver):
    memory = np.zeros(4096 + 7, np.uint8)
    device.pin(memory)
    device.pin(memory)
    assert driver.pinned == {memory.ctypes.data: memory.nbytes}
    device.pin(memory[5:])  # mapped anew, over what was there
    assert driver.pinned == {memory.ctypes.data + 5: memory.nbytes - 5}
    device.pin(memory[:0])
    device.close()
    assert driver.pinned == {}


def test_memories_that_lie_side_by_side_are_both_pinned(device, driver):
    memory = np.zeros(3 * 4096, np.uint8)
    low, middle, high = (memory[at : at + 4096] for at in range(0, memory.nbytes, 4096))
    for one in (low, high, middle):
        device.pin(one)
    assert driver.pinned == {one.ctypes.data: 4096 for one in (low, middle, high)}


def test_what_has_grown_where_it_lay_is_pinned_anew(device, driver):
    memory = np.zeros(8192, np.uint8)
    device.pin(memory[:4096])
    device.pin(memory)
    assert driver.pinned == {memory.ctypes.data: 8192}


def test_what_is_mapped_anew_where_another_lay_is_pinned_anew(device, driver):
    """By its address alone it would look pinned, and a GPU would use pages that are nobody's."""
    place = np.zeros(4096, np.uint8)
    first, again = (
        bytes_at(object(), place.ctypes.data, (4096,), (1,)) for _ in ("a mapping", "its successor")
    )
    device.pin(first)
    device.pin(first[:])
    assert driver.registered == [place.ctypes.data]
    device.pin(again)
    assert driver.registered == [place.ctypes.data] * 2
    assert driver.pinned == {place.ctypes.data: 4096}


@pytest.mark.parametrize("kind", [lambda: mmap.mmap(-1, 8192), lambda: bytearray(8192)])
def test_one_mapping_is_pinned_once_however_it_is_looked_at(device, driver, kind):
    memory = kind()
    device.pin(np.frombuffer(memory, np.uint8))
    device.pin(np.frombuffer(memory, np.uint8))
    assert len(driver.registered) == 1


def test_memory_that_is_gone_is_let_go_when_other_memory_is_pinned(device, driver):
    other = np.zeros(4096, np.uint8)
    arena = Arena(1 << 20)
    device.pin(arena.of(arena.id, 0))
    assert len(driver.pinned) == 1
    arena.close()
    device.pin(other)
    assert driver.pinned == {other.ctypes.data: 4096}


# ------------------------------------------------------------- at registration, never at a copy

GEOMETRY = Geometry((Component(2, 1, 8),), block_tokens=(4,), chunk_tokens=8)
SHAPE = (2, 2, 5, 4, 1, 8)


def bound(device, tensor):
    with closing(Arena(1 << 16, [GEOMETRY.part_bytes(PartName(0))])) as arena:
        return Pages(GEOMETRY, arena, [tensor], device)


def test_memory_that_is_refused_is_told_when_kv_is_bound(device, driver):
    assert bound(device, np.zeros(SHAPE, np.uint16))
    driver.refuses = True
    with pytest.raises(ConfigError, match="not pinned"):
        bound(device, np.zeros(SHAPE, np.uint16))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(*SHAPE[:-1], 16).half()[..., ::2], "gaps"),
        (torch.zeros(4, 2, *SHAPE[2:]).half()[::2].transpose(0, 1), "evenly"),
        (torch.zeros(2, 2, *SHAPE[3:]).half()[:, :, None].expand(SHAPE), "share bytes"),
        (torch.zeros(2, 2, 5, 4, 1, 9).half(), "planes"),
        (torch.zeros(SHAPE).float(), "planes"),
    ],
)
def test_tensors_that_are_not_as_declared_are_told_when_they_are_bound(device, tensor, said):
    with pytest.raises(ConfigError, match=said):
        bound(device, tensor)
