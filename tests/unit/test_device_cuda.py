"""The CUDA device on CPU streams: bytes, order, what it holds and what it refuses; no GPU."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch

from kvtier.device import cuda as module
from kvtier.device.base import HOLE, Copy, Device, PlaneGroups
from kvtier.device.cpu import CpuDevice, CpuFence, CpuStream
from kvtier.device.cuda import CudaDevice
from kvtier.device.layout import bytes_at
from kvtier.device.paths import DEFAULT, PATHS, Choice
from kvtier.device.turns import TABLE_RUNS, CudaFence
from kvtier.errors import ConfigError, MisuseError
from kvtier.testing.cpu_driver import CpuDriver
from kvtier.testing.hazards import AT_ONCE, HAZARDS, examine
from kvtier.testing.layouts import BLOCKS, CHOICES, LAYOUTS, by_planes, plane_groups

SECONDS = 10.0
PLANES, BYTES = 6, 48
WAYS = [Choice(way, 3) for way in PATHS]

every_way = pytest.mark.parametrize("way", WAYS, ids=PATHS)
each_or_none = pytest.mark.parametrize("way", [None, *WAYS], ids=["as the table says", *PATHS])


def made(way=None, driver=None, **options):
    return CudaDevice(driver or CpuDriver(), DEFAULT, way, **{"staging_bytes": 160, **options})


def pages(seed: int = 0) -> np.ndarray:
    shape = (PLANES, 20, BYTES)
    return np.random.default_rng(seed).integers(0, 200, shape, np.uint8)


def gather(device, copies, *after):
    return device.gather(device.stream("store"), copies, after)


def scatter(device, copies, *after, groups=1):
    return device.scatter(device.stream("load"), by_planes(copies, groups), after)


# ---------------------------------------------------------------------------------------- bytes


def as_bytes(layout, tensor):
    """Return a copy of what lies in memory, as [planes, blocks, bytes]."""
    order = (*layout.planes, layout.blocks, *layout.inner)
    plain = tensor.permute(order).contiguous().view(torch.uint8).numpy().copy()
    return plain.reshape(layout.plane_count, BLOCKS, -1)


@pytest.mark.parametrize("cut_into", [by_planes, plane_groups])
@each_or_none
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_there_and_back_in_every_layout(layout, way, cut_into):
    item = getattr(torch, layout.dtype).itemsize
    size = int(np.prod(layout.shape)) * item
    flat = torch.from_numpy(np.random.default_rng(0).integers(0, 200, (2, size), np.uint8))
    kv = [layout.kept(one.view(getattr(torch, layout.dtype)).view(layout.shape)) for one in flat]
    block = kv[0].numel() // layout.plane_count // BLOCKS * item
    chosen = [choice for choice in CHOICES.values() if choice]
    slots = np.full((len(chosen), layout.plane_count, 8, block), 0xAB, np.uint8)
    with closing(made(way)) as device:
        device.pin(slots)
        source, target = (layout.pages(one, block, device.pages) for one in kv)
        parts = [slot[:, 1 : 1 + len(ids)] for ids, slot in zip(chosen, slots, strict=True)]
        copies = [Copy(source, ids, part) for ids, part in zip(chosen, parts, strict=True)]
        stored = gather(device, copies, device.host_fence())
        back = [Copy(target, ids, part) for ids, part in zip(chosen, parts, strict=True)]
        before, expected = (as_bytes(layout, one) for one in kv)
        *_, landed = device.scatter(device.stream("load"), cut_into(back, 3), [stored])
        assert landed.wait(SECONDS)
        for ids, slot in zip(chosen, slots, strict=True):
            kept = [at for at, one in enumerate(ids) if one != HOLE]
            named = [ids[at] for at in kept]
            assert np.array_equal(slot[:, [1 + at for at in kept]], before[:, named])
            rest = [at for at in range(8) if at - 1 not in kept]
            assert (slot[:, rest] == 0xAB).all()
            expected[:, named] = before[:, named]
        assert np.array_equal(as_bytes(layout, kv[1]), expected)


@each_or_none
@pytest.mark.parametrize("planes", [1, 2])
def test_several_copies_of_few_planes(way, planes):
    kv, slots = pages()[:planes], np.zeros((3, planes, 2, BYTES), np.uint8)
    ids, back = ((1, 2), (4, 7), (9, 8)), np.zeros_like(kv)
    with closing(made(way)) as device:
        device.pin(slots)
        stored = gather(device, [Copy(kv, *one) for one in zip(ids, slots, strict=True)])
        copies = [Copy(back, *one) for one in zip(ids, slots, strict=True)]
        *_, landed = scatter(device, copies, stored, groups=2)
        assert landed.wait(SECONDS)
    for some, slot in zip(ids, slots, strict=True):
        assert np.array_equal(slot, kv[:, some])
        assert np.array_equal(back[:, some], kv[:, some])


@each_or_none
def test_groups_of_planes_of_the_same_copies_land_like_others(way):
    kv, slots = pages(), np.zeros((2, PLANES, 2, BYTES), np.uint8)
    slots[:] = np.random.default_rng(1).integers(0, 200, slots.shape, np.uint8)
    cuts = ((0, 1), (1, 4), (4, 6))
    copies = [Copy(kv, (1, 9), slots[0]), Copy(kv[:4], (4, 5), slots[1, :4])]
    with closing(made(way)) as device:
        device.pin(slots)
        groups = PlaneGroups(copies, (cuts, ((0, 0), (0, 2), (2, 4))), 3)
        fences = device.scatter(device.stream("load"), groups, ())
        assert len(fences) == 3
        assert fences[-1].wait(SECONDS)
    assert np.array_equal(kv[:, [1, 9]], slots[0])
    assert np.array_equal(kv[:4, [4, 5]], slots[1, :4])
    assert np.array_equal(kv[:, 0], pages()[:, 0])


@every_way
@pytest.mark.parametrize(("planes", "blocks"), [(2, 5600), (1100, 2), (8, 5600)])
def test_more_runs_or_planes_than_a_table_has_room_for(way, planes, blocks):
    kv = np.random.default_rng(0).integers(0, 200, (planes, 2 * blocks, 8), np.uint8)
    slots, ids = np.zeros((2, planes, blocks, 8), np.uint8), range(0, 2 * blocks, 2)
    with closing(made(way, in_flight=2)) as device:
        device.pin(slots)
        fences = [gather(device, [Copy(kv, ids, slot)]) for slot in slots]
        assert all(fence.wait(SECONDS) for fence in fences)
    assert all(np.array_equal(slot, kv[:, ids]) for slot in slots)


@pytest.mark.parametrize("batches", [True, False])
def test_more_runs_than_a_table_has_room_for_in_several_stages(batches):
    count, blocks = 8, 800  # of which one copy is staged at a time
    kv = np.random.default_rng(0).integers(0, 200, (1, 2 * blocks, 8), np.uint8)
    slots, ids = np.zeros((count, 1, blocks, 8), np.uint8), range(0, 2 * blocks, 2)
    assert count * blocks > TABLE_RUNS
    driver = CpuDriver(batches=batches)
    with closing(made(Choice("staged"), driver, staging_bytes=blocks * 8)) as device:
        device.pin(slots)
        assert gather(device, [Copy(kv, ids, slot) for slot in slots]).wait(SECONDS)
    assert driver.calls.count("launch 4") == count
    assert all(np.array_equal(slot, kv[:, ids]) for slot in slots)


@pytest.mark.parametrize(
    ("way", "calls"),
    [
        ("batch", {"batch"}),
        ("staged", {"copy", "launch 2"}),  # as many runs as its small buffer takes
        ("direct", {"copy", "launch 2"}),
    ],
)
def test_each_way_is_the_one_that_was_chosen(way, calls):
    kv, slots, driver = pages(), np.zeros((PLANES, 4, BYTES), np.uint8), CpuDriver()
    with closing(made(Choice(way, 2), driver)) as device:
        device.pin(slots)
        gather(device, [Copy(kv, (1, 3, 5, 9), slots)]).wait(SECONDS)
    assert set(driver.calls) == calls


LONG = 64 << 10
SHORT = 16 << 10


@pytest.mark.parametrize("size", [LONG, SHORT])
def test_what_lies_apart_in_slots_is_staged_in_long_pieces_only(size):
    kv = np.random.default_rng(0).integers(0, 200, (20, 5, size), np.uint8)
    slot, back, driver = np.zeros((20, 3, size), np.uint8), np.zeros_like(kv), CpuDriver()
    ids = (1, HOLE, 3)
    with closing(made(Choice("staged", 2), driver, staging_bytes=8 << 20)) as device:
        device.pin(slot)
        assert gather(device, [Copy(kv, ids, slot)]).wait(SECONDS)
        assert scatter(device, [Copy(back, ids, slot)])[-1].wait(SECONDS)
    assert np.array_equal(slot[:, [0, 2]], kv[:, [1, 3]])
    assert not slot[:, 1].any()
    assert np.array_equal(back[:, [1, 3]], kv[:, [1, 3]])
    tables, apart = 2, size == LONG  # a table is what the kernel reads
    assert driver.calls.count("launch 4") == (2 if apart else 0)
    assert driver.calls.count("launch 2") == (0 if apart else 2)
    # Each piece goes over the link once, with all of the planes that have room.
    assert driver.calls.count("copy of planes") == (4 if apart else 0)
    assert driver.calls.count("copy") == tables


def test_whole_slots_go_over_the_link_at_once():
    kv, slots, driver = pages(), np.zeros((2, PLANES, 3, BYTES), np.uint8), CpuDriver()
    ids = ((1, 3, 5), (2, 9, 0))
    with closing(made(Choice("staged"), driver, staging_bytes=1 << 20)) as device:
        device.pin(slots)
        copies = [Copy(kv, some, slot) for some, slot in zip(ids, slots, strict=True)]
        assert gather(device, copies).wait(SECONDS)
    assert driver.calls == ["copy", "launch 4", "copy"]
    assert all(np.array_equal(slot, kv[:, some]) for some, slot in zip(ids, slots, strict=True))


@pytest.mark.parametrize(("batches", "over_the_link"), [(True, {"batch"}), (False, {"copy"})])
def test_many_slots_go_over_the_link_by_batches_where_the_driver_has_them(batches, over_the_link):
    kv, driver = pages(), CpuDriver(batches=batches)
    slots = np.zeros((12, PLANES, 2, BYTES), np.uint8)
    copies = [Copy(kv, (at, at + 7), slot) for at, slot in enumerate(slots[::2])]
    with closing(made(Choice("staged"), driver, staging_bytes=1 << 20)) as device:
        device.pin(slots)
        assert gather(device, copies).wait(SECONDS)
    table, *others = driver.calls
    assert table == "copy"
    assert set(others) == {"launch 4", *over_the_link}
    assert all(np.array_equal(slot, kv[:, ids]) for _, ids, slot in copies)


def test_without_a_choice_the_table_says():
    kv, slots, driver = pages(), np.zeros((PLANES, 4, BYTES), np.uint8), CpuDriver()
    with closing(made(None, driver)) as device:
        device.pin(slots)
        gather(device, [Copy(kv, (1, 3, 5, 9), slots)]).wait(SECONDS)
        stored = driver.calls.copy()
        scatter(device, [Copy(kv, (1, 3, 5, 9), slots)])[-1].wait(SECONDS)
    assert "launch 2" in stored, "small runs are staged when they are stored"
    assert driver.calls[len(stored) :] == ["copy", "launch 8"], "and read directly when loaded"


def test_a_driver_without_batched_copies_is_not_asked_for_long_ones():
    kv, driver = np.ones((2, 4, LONG), np.uint8), CpuDriver(batches=False)
    slot = np.zeros((2, 2, LONG), np.uint8)
    with closing(made(None, driver, staging_bytes=1 << 20)) as device:
        device.pin(slot)
        assert gather(device, [Copy(kv, (1, 3), slot)]).wait(SECONDS)
        assert scatter(device, [Copy(kv, (0, 2), slot)])[-1].wait(SECONDS)
    assert slot.all()


# ---------------------------------------------------------------------------------------- order


@every_way
@pytest.mark.parametrize(
    "hazard",
    [one for one in HAZARDS if one not in AT_ONCE],
    ids=lambda hazard: hazard.__name__,
)
def test_no_hazard_spoils_bytes_and_the_checker_finds_each_twin(hazard, way):
    found = examine(hazard, 5, way.way)
    assert (found.corrupted, found.accused, found.twin_caught_by_checker) == (0, 0, 5)
    assert found.ordered


def test_a_call_returns_before_its_copy_and_the_copy_waits_for_its_fence():
    driver, gate = CpuDriver(), CpuFence()
    kv, slots = pages(), np.zeros((PLANES, 2, BYTES), np.uint8)
    compute = CpuStream("compute")
    with closing(compute), closing(made(Choice("batch"), driver)) as device:
        device.pin(slots)
        compute.wait(gate)
        fence = gather(device, [Copy(kv, (1, 2), slots)], CudaFence(compute.record()))
        assert not fence.done()
        assert not fence.wait(0)
        kv[:, 1:3] = 77
        gate.settle()
        assert fence.wait(SECONDS)
    assert (slots == 77).all()


def test_fences_of_the_host_have_to_be_done():
    device, gate = made(), CpuFence()
    with closing(device):
        with pytest.raises(MisuseError, match="is not done: wait for it on the host"):
            gather(device, [], gate)
        gate.settle()
        assert gather(device, [], gate).wait(SECONDS)
        failed = CpuFence()
        failed.settle(RuntimeError("the kernel failed"))
        with pytest.raises(RuntimeError, match="kernel failed"):
            gather(device, [], failed)


def test_who_computes_waits_itself_for_a_fence_of_no_gpu():
    gate, failed = CpuFence(), CpuFence()
    with closing(made()) as device:
        assert not device.hold(gate, 0)
        gate.settle()
        assert device.hold(gate, 0)
        failed.settle(RuntimeError("the kernel failed"))
        with pytest.raises(RuntimeError, match="kernel failed"):
            device.hold(failed, 0)


def test_one_operation_in_flight_is_too_few():
    with pytest.raises(ConfigError, match="at least 2"):
        made(in_flight=1)


# ------------------------------------------------------------------------------- what it refuses


def test_it_is_a_device():
    with closing(made()) as device:
        assert isinstance(device, Device)
        assert device.name.startswith("cuda: ")


def test_slots_that_are_not_pinned_are_refused_and_nothing_is_enqueued():
    driver, kv = CpuDriver(), pages()
    slots = np.zeros((3, PLANES, 2, BYTES), np.uint8)
    with closing(made(Choice("batch"), driver)) as device:
        for pinned, used in ((0, slots[0]), (1, slots[1]), (1, slots[:, 0]), (2, slots[1:, 0])):
            device.pin(slots[:pinned])
            with pytest.raises(MisuseError, match=r"call its pin\(\)"):
                gather(device, [Copy(kv[: len(used)], (1, 2), used)])
            with pytest.raises(MisuseError, match=r"call its pin\(\)"):
                scatter(device, [Copy(kv[: len(used)], (1, 2), used)])
        assert driver.calls == []


def test_what_does_not_match_is_refused_and_nothing_is_enqueued():
    driver, kv, slots = CpuDriver(), pages(), np.zeros((PLANES, 2, BYTES), np.uint8)
    with closing(made(None, driver)) as device:
        device.pin(slots)
        good = Copy(kv, (1, 2), slots)
        for bad in (Copy(kv, (1, 20), slots), Copy(kv, (1,), slots), Copy(kv[:5], (1, 2), slots)):
            with pytest.raises(MisuseError, match="do not match"):
                gather(device, [good, bad])
            with pytest.raises(MisuseError, match="do not match"):
                device.scatter(device.stream("load"), [[good], [bad]], ())
        assert driver.calls == []


def test_what_hangs_at_close_stays_pinned(monkeypatch):
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.05)
    driver, gate = CpuDriver(), CpuFence()
    slots = np.zeros((PLANES, 2, BYTES), np.uint8)
    device = made(Choice("batch"), driver)
    device.pin(slots)
    fence = gather(device, [Copy(pages(), (1, 2), slots)], CudaFence(gate))
    device.close()
    assert driver.pinned
    with pytest.raises(MisuseError, match="closed"):
        gather(device, [])
    gate.settle()
    assert fence.wait(SECONDS)
    driver.close()


def test_what_is_still_copied_is_not_let_go_for_what_is_mapped_anew(monkeypatch):
    """A GPU would write to pages that have another owner by then."""
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.05)
    driver, gate = CpuDriver(), CpuFence()
    place = np.zeros((PLANES, 2, BYTES), np.uint8)
    old, new = (
        bytes_at(object(), place.ctypes.data, place.shape, place.strides) for _ in ("old", "new")
    )
    with closing(made(Choice("batch"), driver)) as device:
        device.pin(old)
        fence = gather(device, [Copy(pages(), (1, 2), old)], CudaFence(gate))
        with pytest.raises(ConfigError, match="still copies to or from memory that is mapped anew"):
            device.pin(new)
        assert len(driver.registered) == 1
        gate.settle()
        assert fence.wait(SECONDS)
        device.pin(new)
        assert len(driver.registered) == 2


def test_tensors_that_are_none_of_the_drivers_are_refused():
    with closing(made()) as device, pytest.raises(ConfigError, match="none of this driver's"):
        device.pages(torch.zeros(4, 8, 64, device="meta"), 4, 256)


def test_streams_of_others_are_refused():
    with closing(made()) as device, closing(made()) as other, closing(CpuDevice()) as cpu:
        for stream in (other.stream("store"), cpu.stream("store"), object()):
            with pytest.raises(MisuseError, match="its own streams"):
                device.gather(stream, [], [])


def test_batched_copies_need_a_driver_that_has_them():
    with pytest.raises(ConfigError, match=r"no batched copies: they need CUDA 12\.8"):
        made(Choice("batch"), CpuDriver(batches=False))
