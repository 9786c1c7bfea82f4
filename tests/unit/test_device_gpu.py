"""The CUDA device on a real GPU: bytes in every layout on every way, order, and refusals."""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.device.base import HOLE, Copy
from kvtier.device.layout import bytes_at
from kvtier.device.paths import PATHS, Choice
from kvtier.device.torch_driver import cuda_device
from kvtier.device.turns import CudaFence
from kvtier.errors import ConfigError
from kvtier.testing.layouts import BLOCKS, CHOICES, LAYOUTS, by_planes, plane_groups

pytestmark = pytest.mark.gpu

SECONDS = 30.0
ARENA = 64 << 20
SLEEP = 200_000_000  # cycles of the GPU: a tenth of a second or so


@pytest.fixture(params=PATHS)
def device(request, tmp_path):
    try:
        found = cuda_device(0, Choice(request.param, 8), folder=tmp_path)
    except ConfigError as refusal:
        if "no batched copies" not in str(refusal):
            raise
        pytest.skip(str(refusal))
    with closing(found):
        yield found


@pytest.fixture
def arena(device):
    memory = np.frombuffer(mmap.mmap(-1, ARENA), np.uint8)
    device.pin(memory)
    return memory


def cut(arena, *shape):
    return arena[: int(np.prod(shape))].reshape(shape)


def kv(layout, generator):
    item = getattr(torch, layout.dtype).itemsize
    size = int(np.prod(layout.shape)) * item
    flat = torch.from_numpy(generator.integers(0, 200, size, np.uint8)).cuda()
    return layout.kept(flat.view(getattr(torch, layout.dtype)).view(layout.shape))


def as_bytes(layout, tensor):
    """Return what lies in memory, as [planes, blocks, bytes], on the host."""
    order = (*layout.planes, layout.blocks, *layout.inner)
    plain = tensor.permute(order).contiguous().view(torch.uint8).cpu().numpy()
    return plain.reshape(layout.plane_count, BLOCKS, -1)


@pytest.mark.parametrize("cut_into", [by_planes, plane_groups])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_there_and_back_in_every_layout(device, arena, layout, cut_into):
    generator = np.random.default_rng(0)
    source, target = kv(layout, generator), kv(layout, generator)
    was, expected = as_bytes(layout, source), as_bytes(layout, target)
    block = was.shape[2]
    chosen = [choice for choice in CHOICES.values() if choice]
    slots = cut(arena, len(chosen), layout.plane_count, 8, block)
    slots[:] = 0xAB
    places = [layout.pages(one, block, device.pages) for one in (source, target)]
    parts = [slot[:, 1 : 1 + len(ids)] for ids, slot in zip(chosen, slots, strict=True)]
    out, back = (
        [Copy(place, ids, part) for ids, part in zip(chosen, parts, strict=True)]
        for place in places
    )
    stored = device.gather(device.stream("store"), out, [device.host_fence()])
    fences = device.scatter(device.stream("load"), cut_into(back, 3), [stored])
    assert all(fence.wait(SECONDS) for fence in fences)
    for ids, slot in zip(chosen, slots, strict=True):
        kept = [at for at, one in enumerate(ids) if one != HOLE]
        named = [ids[at] for at in kept]
        assert np.array_equal(slot[:, [1 + at for at in kept]], was[:, named])
        rest = [at for at in range(8) if at - 1 not in kept]
        assert (slot[:, rest] == 0xAB).all()
        expected[:, named] = was[:, named]
    assert np.array_equal(as_bytes(layout, target), expected)


def slow_write(tensor, value):
    torch.cuda._sleep(SLEEP)
    tensor.fill_(value)


def stored(device, arena, *, edge):
    """Store blocks that compute is about to write; return what came into the slot."""
    tensor = torch.zeros(4, 8, 4096, dtype=torch.uint8, device="cuda")
    slot = cut(arena, 4, 2, 4096)
    slot[:] = 1
    pages = device.pages(tensor, 4, 4096)
    torch.cuda.synchronize()
    slow_write(tensor, 7)
    after = [device.host_fence()] if edge else []
    fence = device.gather(device.stream("store"), [Copy(pages, [1, 5], slot)], after)
    assert fence.wait(SECONDS)
    torch.cuda.synchronize()
    return slot


def test_a_store_waits_for_compute_and_without_its_fence_does_not(device, arena):
    assert (stored(device, arena, edge=True) == 7).all()
    assert (stored(device, arena, edge=False) == 0).all()


def test_no_hazard_spoils_bytes_and_each_does_without_what_it_waits_for(device, arena, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from device_order import Hazards

    found = Hazards(torch, device, arena, SLEEP).all()
    waited = {name: right for name, right in found.items() if name.endswith(", waiting")}
    others = {name: right for name, right in found.items() if name.endswith("not waiting")}
    assert len(waited) == len(others) == 9
    assert all(waited.values()), waited
    assert not any(others.values()), others


def test_compute_waits_for_the_layers_that_it_reads(device, arena):
    tensor = torch.zeros(4, 8, 1 << 20, dtype=torch.uint8, device="cuda")
    slot = cut(arena, 4, 2, 1 << 20)
    slot[:] = 9
    pages = device.pages(tensor, 4, 1 << 20)
    copy = Copy(pages, [1, 5], slot)
    fences = device.scatter(device.stream("load"), by_planes([copy], 4), [device.host_fence()])
    for layer, fence in enumerate(fences):
        assert isinstance(fence, CudaFence)
        torch.cuda.current_stream().wait_event(fence.event.event)
        assert (tensor[layer, [1, 5]] == 9).all()
    assert (tensor[:, [0, 2, 3, 4, 6, 7]] == 0).all()


def mapped(at=None):
    """Map fresh memory, at an address where there is some already, in its place."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    given = (ctypes.c_void_p(at), ctypes.c_size_t(ARENA), mmap.PROT_READ | mmap.PROT_WRITE)
    fixed = 0 if at is None else 0x10  # MAP_FIXED
    how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
    address = libc.mmap(*given, how, -1, ctypes.c_long(0))
    assert at in (None, address)
    return bytes_at(object(), address, (ARENA,), (1,))


def test_memory_that_is_mapped_anew_is_what_is_copied_to(device):
    """A new arena often lies where the one before it lay: a GPU must not keep to its pages."""
    tensor = torch.randint(0, 200, (4, 8, 4096), dtype=torch.uint8, device="cuda")
    want = tensor.index_select(1, torch.tensor([1, 5], device="cuda")).cpu().numpy()
    pages, at = device.pages(tensor, 4, 4096), None
    for _ in range(3):
        memory = mapped(at)
        at = memory.ctypes.data
        device.pin(memory)
        slot = cut(memory, 4, 2, 4096)
        store = device.stream("store")
        assert device.gather(store, [Copy(pages, [1, 5], slot)], ()).wait(SECONDS)
        assert np.array_equal(slot, want)


def test_a_thread_that_has_called_nothing_of_cuda_may_copy(device, arena):
    tensor = torch.full((4, 8, 4096), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    slot, pages = cut(arena, 4, 2, 4096), device.pages(tensor, 4, 4096)
    found = []

    def work():
        fence = device.gather(device.stream("store"), [Copy(pages, [1, 5], slot)], ())
        found.append(fence.wait(SECONDS))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(SECONDS)
    assert found == [True]
    assert (slot == 7).all()


def test_tensors_of_elsewhere_are_refused(device):
    with pytest.raises(ConfigError, match="needs KV tensors that are there, not on cpu"):
        device.pages(torch.zeros(4, 8, 64), 4, 256)
    with pytest.raises(ConfigError, match="needs KV tensors that are there"):
        device.pages(np.zeros((4, 8, 64), np.float32), 4, 256)


def test_a_gpu_that_is_not_there_is_told():
    with pytest.raises(ConfigError, match="GPU 99 is not there"):
        cuda_device(99)
