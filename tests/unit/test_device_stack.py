"""Tensors that are alike, copied as one: all their bytes, no others, and the checker sees each."""

from __future__ import annotations

import gc
from contextlib import closing

import numpy as np
import pytest

from kvtier.device import rows
from kvtier.device.base import HOLE, Copy
from kvtier.device.chaos import ORDERS, ChaosDevice
from kvtier.device.cpu import CpuDevice
from kvtier.device.race import Checked, RaceError
from kvtier.device.stack import Stack, stacked
from kvtier.errors import MisuseError
from kvtier.testing.layouts import by_planes

PLANES, BLOCKS, BYTES = 6, 9, 24
SECONDS = 10.0
RUNS = {"scattered": (7, 0, 3), "consecutive": (2, 3, 4), "holes": (1, HOLE, 6), "one": (5,)}
DEVICES = {"threads": CpuDevice, **{one: lambda one=one: ChaosDevice(3, one) for one in ORDERS}}


def memory(seed: int = 0) -> np.ndarray:
    """Return more planes than are used; the last but one is nobody's."""
    shape = (PLANES + 2, BLOCKS, BYTES)
    return np.random.default_rng(seed).integers(0, 200, shape, np.uint8)


def tensors(whole: np.ndarray) -> Stack:
    """Return layers of two planes, in no order, one of which lies apart."""
    (found,) = stacked([whole[4:6], whole[:2], whole[7:1:-4]])
    assert isinstance(found, Stack)
    return found


def named(whole: np.ndarray) -> np.ndarray:
    """Return a copy of the planes of those, in their order."""
    return whole[[4, 5, 0, 1, 7, 3]]


@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("blocks", RUNS.values(), ids=RUNS)
def test_there_and_back(blocks, make):
    source, target = memory(), memory(1)
    expected, slot = target.copy(), np.full((PLANES, len(blocks), BYTES), 0xAB, np.uint8)
    kept = [at for at, block in enumerate(blocks) if block != HOLE]
    ids = [blocks[at] for at in kept]
    for plane, into in zip(named(source), [4, 5, 0, 1, 7, 3], strict=True):
        expected[into][ids] = plane[ids]
    with closing(make()) as device:
        out, back = (Copy(tensors(one), blocks, slot) for one in (source, target))
        stored = device.gather(device.stream("store"), [out], ())
        fences = device.scatter(device.stream("load"), by_planes([back], 4), [stored])
        assert all(fence.wait(SECONDS) for fence in fences)
    assert np.array_equal(slot[:, kept], named(source)[:, ids])
    if HOLE in blocks:
        assert len(set(slot[:, blocks.index(HOLE)].ravel())) == 1
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("planes", [PLANES - 1, PLANES + 1])
def test_a_slot_of_more_or_fewer_planes_is_refused(planes, make):
    slot = np.zeros((planes, 2, BYTES), np.uint8)
    with closing(make()) as device:
        fence = device.gather(device.stream("store"), [Copy(tensors(memory()), (1, 2), slot)], ())
        with pytest.raises(MisuseError, match="do not match their slot"):
            fence.wait(SECONDS)


UNEVEN = {  # how tensors of two planes, one, and three lie
    "in one piece": lambda one: one.copy(),
    "planes apart": lambda one: one,
    "blocks among others": lambda one: np.repeat(one, 2, 1)[:, ::2],
    "odd gaps": lambda one: np.concatenate([one, one[:, :, :8]], 2)[:, :, :BYTES],
}


@pytest.mark.parametrize("blocks", [(7, 0, 3), (7, 0, 3, 4), (0, 0, 5)], ids=str)
@pytest.mark.parametrize("cut", [slice(0, 6), slice(2, 6), slice(1, 5), slice(2, 3)], ids=str)
@pytest.mark.parametrize("part", [slice(None), slice(1, -1)], ids=["a slot", "a part of one"])
@pytest.mark.parametrize("lies", UNEVEN.values(), ids=UNEVEN)
def test_tensors_of_more_or_fewer_planes_are_copied_by_planes(blocks, cut, part, lies):
    whole = memory()[:, 1:]
    each = [lies(whole[low:high]) for low, high in ((0, 2), (2, 3), (3, 6))]
    (stack,) = stacked(each)
    count = len(blocks) + (2 if part.stop else 0)
    slot = np.full((PLANES, count, BYTES), 0xAB, np.uint8)
    expected = slot.copy()
    expected[cut, part] = np.concatenate(each)[cut][:, blocks]
    with closing(CpuDevice()) as device:
        out = Copy(stack, blocks, slot[:, part]).cut(cut)
        assert device.gather(device.stream("store"), [out], ()).wait(SECONDS)
        assert np.array_equal(slot, expected)
        slot[:] = np.random.default_rng(2).integers(0, 200, slot.shape, np.uint8)
        expected = np.concatenate(each)
        expected[cut, blocks] = slot[cut, part]
        back = device.scatter(device.stream("load"), [[out]], ())
        assert back[-1].wait(SECONDS)
    assert np.array_equal(np.concatenate(each), expected)


def test_rows_are_made_once_as_long_as_a_stack_is_there():
    whole, before = memory(), len(rows._kept)
    (stack,) = stacked([whole[at : at + 2] for at in (0, 2, 4)])
    found = rows.rows_of(stack)
    assert rows.rows_of(stack) is found
    ((memories, planes, across),) = found
    assert [one.ctypes.data for one in memories] == [whole[at].ctypes.data for at in (0, 2, 4)]
    assert (planes.tolist(), across) == ([[0], [BLOCKS]], 1)
    assert [len(one.planes) for one in rows.rows_of(stack[1:6])] == [1, 2]
    del stack
    gc.collect()
    assert len(rows._kept) == before


def test_where_one_tensor_lies_oddly_none_has_a_row():
    assert rows.rows_of(tensors(memory())) == []


@pytest.mark.parametrize("blocks", [(7, 0, BLOCKS), (7, 0, -2), (BLOCKS + 3,), (-2, HOLE)])
@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("of", [lambda whole: whole, tensors], ids=["one tensor", "several"])
def test_of_blocks_one_of_which_is_not_there_none_is_copied(blocks, make, of):
    whole = memory()
    pages = of(whole)
    slot = np.full((len(pages), len(blocks), BYTES), 0xAB, np.uint8)
    with closing(make()) as device:
        copy = Copy(pages, blocks, slot)
        back = device.scatter(device.stream("load"), [[copy]], ())
        for fence in (device.gather(device.stream("store"), [copy], ()), *back):
            with pytest.raises(MisuseError, match="do not match"):
                fence.wait(SECONDS)
    assert np.array_equal(whole, memory())
    assert (slot == 0xAB).all()


def racing(plane: int) -> bool:
    """Store blocks, and compute into one plane of one of them before that has ended."""
    whole = memory()
    copy = Copy(tensors(whole), (1, 6), np.zeros((PLANES, 2, BYTES), np.uint8))
    with closing(Checked(CpuDevice())) as device:
        device.gather(device.stream("store"), [copy], ())
        try:
            device.touch("the engine", writes=[whole[plane, 6]])
        except RaceError:
            return True
    return False


def test_the_checker_sees_every_tensor_and_nothing_between_them():
    assert [plane for plane in range(PLANES + 2) if racing(plane)] == [0, 1, 3, 4, 5, 7]


def test_one_that_looks_at_the_first_tensor_misses_the_others(monkeypatch):
    """The twin."""
    all_of = Copy.tensors
    monkeypatch.setattr(Copy, "tensors", lambda copy: list(all_of(copy))[:1])
    assert [plane for plane in range(PLANES + 2) if racing(plane)] == [4, 5]


def test_tensors_are_taken_together_where_they_are_alike_and_side_by_side():
    whole = memory()
    padded = np.zeros((2, BLOCKS, BYTES + 8), np.uint8)[:, :, :BYTES]
    found = stacked([whole[:1], whole[2:4], padded, memory(1)[:2, :5], memory(2)[:2], whole[4:5]])
    assert [len(one) for one in found] == [3, 2, 2, 3]
    assert [isinstance(one, Stack) for one in found] == [True, False, False, True]
