"""The CPU device: exact copies, really asynchronous, in order, and errors where they belong."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from kvtier.device import cpu as module
from kvtier.device.base import HOLE, Copy
from kvtier.device.cpu import CpuDevice, CpuFence
from kvtier.errors import ConfigError, MisuseError
from kvtier.testing.layouts import by_planes

PLANES, BLOCKS, BYTES = 6, 20, 48
SECONDS = 10.0
RUNS = {
    "one": [7],
    "consecutive": list(range(3, 11)),
    "scattered": [19, 0, 7, 3],
    "mixed": [4, 5, 6, 2, 17, 18, 1],
    "backwards": [9, 8, 7],
    "none": [],
}


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    found = CpuDevice()
    yield found
    found.close()


def pages(seed: int = 0) -> np.ndarray:
    shape = (PLANES, BLOCKS, BYTES)
    return np.random.default_rng(seed).integers(0, 255, shape, np.uint8)


def slot(count: int, fill: int = 0xAB) -> np.ndarray:
    return np.full((PLANES, count, BYTES), fill, np.uint8)


def gather(device: CpuDevice, copies: list[Copy], *after: CpuFence) -> CpuFence:
    return device.gather(device.stream("store"), copies, after)


def scatter(device: CpuDevice, copies: list[Copy], *after: CpuFence, groups: int = 1):
    return device.scatter(device.stream("load"), by_planes(copies, groups), after)


# ---------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize("blocks", RUNS.values(), ids=RUNS)
def test_gather_is_numpy_indexing(device: CpuDevice, blocks: list[int]):
    source, target = pages(), slot(len(blocks))
    assert gather(device, [Copy(source, blocks, target)]).wait(SECONDS)
    assert np.array_equal(target, source[:, blocks])


@pytest.mark.parametrize("groups", [1, 4, 6, 9])
@pytest.mark.parametrize("blocks", RUNS.values(), ids=RUNS)
def test_scatter_is_numpy_indexing_and_touches_no_other_block(
    device: CpuDevice, blocks: list[int], groups: int
):
    target, source = pages(), pages(1)[:, : len(blocks)]
    expected = target.copy()
    expected[:, blocks] = source
    fences = scatter(device, [Copy(target, blocks, source)], groups=groups)
    assert len(fences) == groups
    assert fences[-1].wait(SECONDS)
    assert np.array_equal(target, expected)


def test_a_part_of_a_slot_is_copied_by_strides(device: CpuDevice):
    source, target = pages(), slot(8)
    assert gather(device, [Copy(source, [3, 9], target[:, 2:4])]).wait(SECONDS)
    assert np.array_equal(target[:, 2:4], source[:, [3, 9]])
    assert (target[:, :2] == 0xAB).all()
    assert (target[:, 4:] == 0xAB).all()


def test_holes_are_left_alone_in_blocks_and_slot(device: CpuDevice):
    source, target, blocks = pages(), slot(6), [HOLE, 0, 1, HOLE, HOLE, 7]
    assert gather(device, [Copy(source, blocks, target)]).wait(SECONDS)
    assert np.array_equal(target[:, [1, 2, 5]], source[:, [0, 1, 7]])
    assert (target[:, [0, 3, 4]] == 0xAB).all()
    found, expected = pages(1), pages(1)
    expected[:, [0, 1, 7]] = target[:, [1, 2, 5]]
    assert scatter(device, [Copy(found, blocks, target)])[-1].wait(SECONDS)
    assert np.array_equal(found, expected)


def test_nothing_to_copy_is_done_at_once(device: CpuDevice):
    assert gather(device, []).wait(SECONDS)
    assert all(fence.wait(SECONDS) for fence in scatter(device, [], groups=4))


# --------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "int8"])
def test_torch_tensors_are_seen_as_their_bytes(device: CpuDevice, dtype: str):
    import torch

    kind = getattr(torch, dtype)
    tensor = torch.arange(2 * 2 * 5 * 4 * 2 * 8).reshape(2, 2, 5, 4, 2, 8).to(kind)
    block = 4 * 2 * 8 * tensor.element_size()
    found = device.pages(tensor, 4, block)
    assert found.shape == (4, 5, block)
    assert found.tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    found[3, 2] = 0
    assert not tensor[1, 1, 2].to(torch.float32).any(), "it is the tensor's own memory"


@pytest.mark.parametrize("shape", [(2, 2, 5, 4, 2, 8), (4, 5, 64), (2, 2, 5, 64), (4, 5, 4, 16)])
def test_any_leading_dimensions_that_make_up_the_planes_will_do(
    device: CpuDevice, shape: tuple[int, ...]
):
    array = np.arange(4 * 5 * 64, dtype=np.uint16).reshape(shape)
    found = device.pages(array, 4, 128)
    assert found.shape == (4, 5, 128)
    assert np.shares_memory(found, array)


@pytest.mark.parametrize(
    ("shape", "planes", "blocks"),
    [
        ((3, 1, 5, 4, 1, 8), 3, 5),  # MLA: one plane a layer, one head
        ((3, 5, 4, 8), 3, 5),
        ((1, 1, 5, 4, 1, 8), 1, 5),
        ((5, 4, 8), 1, 5),
        ((3, 1, 1, 4, 1, 8), 3, 1),
        ((1, 2, 1, 4, 1, 8), 2, 1),
    ],
)
def test_dimensions_of_one_do_not_hide_the_blocks(
    device: CpuDevice, shape: tuple[int, ...], planes: int, blocks: int
):
    assert device.pages(np.zeros(shape, np.uint16), planes, 64).shape == (planes, blocks, 64)


def test_what_is_not_such_a_tensor_is_refused(device: CpuDevice):
    import torch

    good = np.zeros((4, 5, 64), np.uint16)
    for bad, planes, block in (
        (good, 3, 128),
        (good, 8, 128),
        (good, 4, 64),
        (good, 20, 128),
        (good.astype(np.uint8), 4, 128),
    ):
        with pytest.raises(ConfigError, match=r"is not .* planes"):
            device.pages(bad, planes, block)
    strided = np.lib.stride_tricks.as_strided
    for bad, why in (
        (np.zeros((4, 5, 128), np.uint16)[:, :, ::2], "gaps"),
        (torch.zeros(4, 64, 5).half().transpose(1, 2), "gaps"),
        (np.zeros((4, 4, 5, 64), np.uint16)[:2, :2], "evenly"),
        (strided(good, good.shape, (640, 64, 2)), "share bytes"),
        (strided(good, good.shape, (0, 128, 2)), "share bytes"),
        (torch.zeros(5, 64).half().expand(4, 5, 64), "share bytes"),
        (good[::-1], "share bytes"),
        (np.broadcast_to(good[0], good.shape), "writable"),
    ):
        with pytest.raises(ConfigError, match=why):
            device.pages(bad, 4, 128)
    for bad in ([[0]], None, torch.zeros(4, 5, 64, device="meta")):
        with pytest.raises(ConfigError, match="CPU device needs"):
            device.pages(bad, 4, 128)


def test_planes_and_blocks_may_lie_apart_and_in_either_order(device: CpuDevice):
    base = np.arange(7 * 6 * 80, dtype=np.uint16).reshape(7, 6, 80)
    for view in (base[:4, :5, :64], base.transpose(1, 0, 2)[1:5, 2:, :64]):
        found = device.pages(view, 4, 128)
        assert found.shape == (4, 5, 128)
        assert np.shares_memory(found, base)
        assert np.array_equal(found, np.ascontiguousarray(view).view(np.uint8))


def test_heads_may_come_before_tokens(device: CpuDevice):
    """The bytes of a block are taken as they lie, however a view names its dimensions."""
    import torch

    lies = torch.arange(2 * 5 * 2 * 4 * 8).reshape(2, 5, 2, 4, 8).half()  # heads, tokens
    found = device.pages(lies.transpose(2, 3), 2, 128)
    assert found.tobytes() == lies.numpy().tobytes()


# ------------------------------------------------------------------------- asynchronous, in order


def test_a_copy_returns_at_once_and_waits_for_its_fence(device: CpuDevice):
    source, target = pages(), slot(2)
    compute = CpuFence()
    fence = gather(device, [Copy(source, [1, 2], target)], compute)
    assert not fence.done(), "the call came back while the compute is under way"
    assert not fence.wait(0)
    assert (target == 0xAB).all()
    source[:, 1:3] = 77  # the compute writes late
    compute.settle()
    assert fence.wait(SECONDS)
    assert (target == 77).all()


def test_without_its_fence_stale_bytes_are_copied(device: CpuDevice):
    """The twin: the same calls, the fence left out."""
    source, target = pages(), slot(2)
    stale = source[:, 1:3].copy()
    assert gather(device, [Copy(source, [1, 2], target)]).wait(SECONDS)
    source[:, 1:3] = 77
    assert np.array_equal(target, stale)


def test_a_scatter_waits_for_whoever_still_reads(device: CpuDevice):
    target, source = pages(), slot(1)
    before, reading = target.copy(), CpuFence()
    fences = scatter(device, [Copy(target, [4], source)], reading, groups=3)
    assert not any(fence.done() for fence in fences)
    assert np.array_equal(target, before)
    reading.settle()
    assert fences[-1].wait(SECONDS)
    assert (target[:, 4] == 0xAB).all()


def test_layers_land_in_order(device: CpuDevice):
    """The fence of the first planes is done while the copy of later ones has not begun."""
    target, source, gate = pages(), slot(1), CpuFence()
    stream = device.stream("load")
    original, calls = stream.wait, []

    def wait(fence: CpuFence) -> None:
        calls.append(fence)
        original(fence if len(calls) == 1 else gate)

    stream.wait = wait  # holds back every group but the first
    done = CpuFence()
    done.settle()
    first, second, third = scatter(device, [Copy(target, [4], source)], done, groups=3)
    assert first.wait(SECONDS)
    assert (target[:2, 4] == 0xAB).all()
    assert not second.done()
    assert not (target[2:, 4] == 0xAB).all()
    gate.settle()
    assert third.wait(SECONDS)
    assert (target[:, 4] == 0xAB).all()


def test_work_of_a_stream_keeps_its_order(device: CpuDevice):
    source, target, gate = pages(), slot(1), CpuFence()
    gather(device, [Copy(source, [0], target)], gate)
    last = gather(device, [Copy(source, [n], target) for n in range(BLOCKS)])
    assert not last.done(), "it waits behind the first"
    gate.settle()
    assert last.wait(SECONDS)
    assert np.array_equal(target, source[:, [BLOCKS - 1]])


def test_streams_are_independent_until_one_waits_for_the_other(device: CpuDevice):
    source, target, gate = pages(), slot(1), CpuFence()
    held = gather(device, [Copy(source, [0], target)], gate)
    (free,) = scatter(device, [Copy(pages(1), [0], slot(1))])
    assert free.wait(SECONDS)
    assert not held.done()
    (bound,) = scatter(device, [Copy(source, [0], slot(1, 5))], held)
    assert not bound.done()
    gate.settle()
    assert bound.wait(SECONDS)
    assert not (target == 5).any()
    assert (source[:, 0] == 5).all()


def test_what_the_calling_thread_computed_is_done(device: CpuDevice):
    assert device.host_fence().done()


def test_a_fence_is_never_recorded_again(device: CpuDevice):
    first = gather(device, [])
    assert first.wait(SECONDS)
    gate = CpuFence()
    gather(device, [], gate)
    assert first.done()
    gate.settle()


# ---------------------------------------------------------------------------------------- errors


def test_an_error_reaches_its_own_fence_and_only_that_one(device: CpuDevice):
    source, target = pages(), slot(2)
    before = gather(device, [Copy(source, [1, 2], target)])
    failed = gather(device, [Copy(source, [1, 2], slot(1)), Copy(source, [5, 6], target)])
    after = gather(device, [Copy(source, [3, 4], target[:, :2])])
    assert before.wait(SECONDS)
    with pytest.raises(MisuseError, match="do not match"):
        failed.wait(SECONDS)
    with pytest.raises(MisuseError, match="do not match"):
        failed.done()
    assert after.wait(SECONDS)
    assert np.array_equal(target, source[:, 3:5])


@pytest.mark.parametrize(("blocks", "size"), [([19, 20], 2), ([20], 1), ([3, 4], 1)])
def test_a_block_that_is_not_there_is_an_error_and_never_another_block(
    device: CpuDevice, blocks: list[int], size: int
):
    store, load = slot(size), pages()
    (scattered,) = scatter(device, [Copy(load, blocks, slot(size, 5))])
    for fence in (gather(device, [Copy(pages(), blocks, store)]), scattered):
        with pytest.raises(MisuseError, match="do not match"):
            fence.wait(SECONDS)
    assert (store == 0xAB).all()
    assert np.array_equal(load, pages())


def test_a_copy_whose_fence_failed_is_not_made(device: CpuDevice):
    source, target, kept = pages(), slot(2), pages()
    compute = CpuFence()
    compute.settle(RuntimeError("the kernel failed"))
    gathered = gather(device, [Copy(source, [1, 2], target)], compute)
    scattered = scatter(device, [Copy(kept, [1, 2], slot(2))], compute, groups=3)
    for fence in (gathered, *scattered):
        with pytest.raises(RuntimeError, match="kernel failed"):
            fence.wait(SECONDS)
    assert (target == 0xAB).all()
    assert np.array_equal(kept, source)


def test_copied_anyway_it_would_be_stale(device: CpuDevice, monkeypatch):
    """The twin: a stream that goes on after an error."""

    def enqueue(self, work) -> None:
        self._put(work)

    monkeypatch.setattr(module.CpuStream, "enqueue", enqueue)
    compute = CpuFence()
    compute.settle(RuntimeError("the kernel failed"))
    target = slot(2)
    with pytest.raises(RuntimeError):
        gather(device, [Copy(pages(), [1, 2], target)], compute).wait(SECONDS)
    assert not (target == 0xAB).all()


def test_foreign_streams_are_refused(device: CpuDevice):
    with pytest.raises(MisuseError, match="its own streams"):
        device.gather(object(), [], [])


# ----------------------------------------------------------------------------------------- close


def test_close_does_what_is_queued():
    device, source, target, gate = CpuDevice(), pages(), slot(1), CpuFence()
    fence = gather(device, [Copy(source, [3], target)], gate)
    threading.Timer(0, gate.settle).start()
    device.close()
    device.close()
    assert fence.done()
    assert np.array_equal(target, source[:, [3]])


def test_a_closed_stream_takes_no_work():
    device = CpuDevice()
    gather(device, []).wait(SECONDS)
    device.close()
    with pytest.raises(MisuseError, match="closed"):
        gather(device, [])
    unused = CpuDevice()
    unused.close()
    with pytest.raises(MisuseError, match="closed"):
        scatter(unused, [])


def test_close_is_bounded_and_leaves_what_a_fence_still_guards_alone(monkeypatch):
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 1.0)
    device, target = CpuDevice(), pages()
    before = target.copy()
    (fence,) = scatter(device, [Copy(target, [3], slot(1))], CpuFence())  # never settled
    device.close()
    with pytest.raises(MisuseError, match="before a fence was done"):
        fence.wait(SECONDS)
    assert np.array_equal(target, before)


def test_a_finished_copy_holds_no_memory(device: CpuDevice):
    target = slot(1)
    gone = weakref.ref(target)
    assert gather(device, [Copy(pages(), [3], target)]).wait(SECONDS)
    assert device.gather(device.stream("store"), [], []).wait(SECONDS)
    del target
    gc.collect()
    assert gone() is None
