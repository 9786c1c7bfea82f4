"""The chaos device: any order and any pieces that streams and fences allow, and nothing else."""

from __future__ import annotations

import threading
from contextlib import closing

import numpy as np
import pytest

from kvtier.device import chaos as module
from kvtier.device import cpu
from kvtier.device.base import Copy, Device
from kvtier.device.chaos import ORDERS, POISON, ChaosDevice
from kvtier.device.cpu import CpuDevice, CpuFence
from kvtier.errors import ConfigError, MisuseError
from kvtier.testing.layouts import by_planes

PLANES, BLOCKS, BYTES = 6, 20, 48
SECONDS = 10.0
SEEDS = range(40)
RUNS = {
    "one": [7],
    "consecutive": list(range(3, 11)),
    "scattered": [19, 0, 7, 3],
    "mixed": [4, 5, 6, 2, 17, 18, 1],
    "none": [],
}


def pages(seed: int = 0) -> np.ndarray:
    shape = (PLANES, BLOCKS, BYTES)
    return np.random.default_rng(seed).integers(0, POISON, shape, np.uint8)


def slot(count: int, fill: int = 0xAB) -> np.ndarray:
    return np.full((PLANES, count, BYTES), fill, np.uint8)


def gather(device, copies, *after):
    return device.gather(device.stream("store"), copies, after)


def scatter(device, copies, *after, groups=1):
    return device.scatter(device.stream("load"), by_planes(copies, groups), after)


def ticks(device, seen, count=5):
    """Append work to all streams that says whose turn it was."""
    streams = {"load": device.stream("load"), "store": device.stream("store")}
    for number in range(count):
        for name, stream in {**streams, "compute": device.compute}.items():
            stream.enqueue(lambda name=name, number=number: seen.append((name, number)))


# ---------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("blocks", RUNS.values(), ids=RUNS)
def test_in_the_end_exactly_the_named_bytes_are_copied(order, blocks):
    for seed in SEEDS:
        with closing(ChaosDevice(seed, order)) as device:
            source, middle, target = pages(seed), slot(len(blocks)), pages(seed + 1)
            expected = target.copy()
            expected[:, blocks] = source[:, blocks]
            done = gather(device, [Copy(source, blocks, middle)])
            fences = scatter(device, [Copy(target, blocks, middle)], done, groups=4)
            assert all(fence.wait(SECONDS) for fence in fences)
            assert np.array_equal(middle, source[:, blocks])
            assert np.array_equal(target, expected)


def test_a_part_of_a_chunk_leaves_the_rest_of_its_slot_alone():
    for seed in SEEDS:
        with closing(ChaosDevice(seed)) as device:
            source, whole = pages(), slot(8)
            gather(device, [Copy(source, [2, 9], whole[:, 3:5])])
        assert np.array_equal(whole[:, 3:5], source[:, [2, 9]])
        assert (whole[:, :3] == 0xAB).all()
        assert (whole[:, 5:] == 0xAB).all()


def test_it_is_a_device():
    with closing(ChaosDevice(0)) as device:
        assert isinstance(device, Device)


@pytest.mark.parametrize("make", [CpuDevice, lambda: ChaosDevice(0, "lazy")])
def test_a_block_table_may_change_once_the_copy_is_enqueued(make):
    assert np.array_equal(*copied_while_the_table_changes(make()))


@pytest.mark.parametrize("make", [CpuDevice, lambda: ChaosDevice(0, "lazy")])
def test_unless_its_ids_were_not_taken_down(make, monkeypatch):
    """The twin."""
    monkeypatch.setattr(cpu, "_frozen", lambda copies: copies)
    monkeypatch.setattr(ChaosDevice, "_works", CpuDevice._works)
    assert not np.array_equal(*copied_while_the_table_changes(make()))


def copied_while_the_table_changes(device):
    source, target, table, gate = pages(), slot(2), [4, 9], CpuFence()
    expected = source[:, table]
    with closing(device):
        gather(device, [Copy(source, table, target)], gate)
        table[:] = 1, 2
        gate.settle()
    return target, expected


# ------------------------------------------------------------------------------ order, and chance


def test_a_seed_is_a_schedule():
    def course(seed, order):
        seen = []
        with closing(ChaosDevice(seed, order)) as device:
            ticks(device, seen)
        return tuple(seen)

    for order in ORDERS:
        courses = [course(seed, order) for seed in SEEDS]
        assert courses == [course(seed, order) for seed in SEEDS]
        assert len(set(courses)) > 10


def test_work_of_a_stream_keeps_its_order():
    for seed in SEEDS:
        seen = []
        with closing(ChaosDevice(seed)) as device:
            ticks(device, seen)
        for name in ("load", "store", "compute"):
            assert [number for who, number in seen if who == name] == list(range(5))


@pytest.mark.parametrize("order", ORDERS)
def test_work_waits_for_its_fence_on_every_schedule(order):
    for seed in SEEDS:
        source, target = pages(), slot(2)
        with closing(ChaosDevice(seed, order)) as device:
            device.compute.enqueue(lambda source=source: source.fill(77))
            assert gather(device, [Copy(source, [1, 2], target)], device.host_fence()).wait(SECONDS)
        assert (target == 77).all()


def test_without_the_fence_some_schedules_are_wrong_and_some_right():
    """The twin: the seed chooses."""
    right = 0
    for seed in SEEDS:
        source, target = pages(), slot(2)
        with closing(ChaosDevice(seed, "random")) as device:
            device.compute.enqueue(lambda source=source: source.fill(77))
            gather(device, [Copy(source, [1, 2], target)])
        right += bool((target == 77).all())
    assert 0 < right < len(SEEDS)


def test_lazy_work_is_done_when_it_is_waited_for_and_no_other():
    seen = []
    with closing(ChaosDevice(3, "lazy")) as device:
        ticks(device, seen, 2)
        device.idle()
        first = device.stream("load").record()
        assert not first.done()
        assert not first.wait(0)
        assert seen == []
        assert first.wait(SECONDS)
        assert seen == [("load", 0), ("load", 1)]
        device.stream("load").wait(device.stream("store").record())
        assert device.stream("load").record().wait(SECONDS)
        assert seen[2:] == [("store", 0), ("store", 1)], "what the fence needs comes first"
    assert len(seen) == 6


def test_who_asks_for_lazy_work_long_enough_gets_it():
    with closing(ChaosDevice(3, "lazy")) as device:
        target = slot(1)
        fence = gather(device, [Copy(pages(), [3], target)])
        asked = 0
        while not fence.done():
            asked += 1
            assert asked < 1000
        assert asked > 50
        assert np.array_equal(target, pages()[:, [3]])


@pytest.mark.parametrize("name", ["load", "store", "compute"])
def test_a_starved_stream_comes_last(name):
    for seed in SEEDS:
        seen = []
        with closing(ChaosDevice(seed, f"starve {name}")) as device:
            gate = CpuFence()  # so that all work is there before any of it begins
            for stream in (device.stream("load"), device.stream("store"), device.compute):
                stream.wait(gate)
            ticks(device, seen)
            gate.settle()
        assert [who for who, _ in seen[-5:]] == [name] * 5


def test_a_copy_is_seen_half_done_and_its_target_poisoned():
    """Between two calls some of a copy is done: the new bytes, poison and what was there before."""
    seen = set()
    for seed in SEEDS:
        with closing(ChaosDevice(seed, "random")) as device:
            source, target = pages(), slot(8)
            fence = gather(device, [Copy(source, list(range(8)), target)])
            while not fence.done():
                landed, poison = target == source[:, :8], target == POISON
                seen.add((landed.all(), landed.any(), poison.all(), poison.any()))
    assert (False, True, False, True) in seen, "some bytes landed, some are still to come"
    assert (False, False, True, True) in seen, "nothing landed, and what was there is gone"


def test_whole_copies_would_never_be_seen_half_done(monkeypatch):
    """The twin."""
    monkeypatch.setattr(ChaosDevice, "_works", CpuDevice._works)
    for seed in SEEDS:
        with closing(ChaosDevice(seed, "random")) as device:
            source, target = pages(), slot(8)
            fence = gather(device, [Copy(source, list(range(8)), target)])
            while not fence.done():
                assert (target == 0xAB).all() or np.array_equal(target, source[:, :8])


# --------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("order", ORDERS)
def test_a_copy_that_fails_raises_at_its_fence_alone(order):
    with closing(ChaosDevice(1, order)) as device:
        source = pages()
        before = source.copy()
        bad = [
            gather(device, [Copy(source, [3], slot(2)[:, :0])]),
            gather(device, [Copy(source, [BLOCKS], slot(1))]),
            gather(device, [Copy(source, [3], np.zeros((PLANES, 1, BYTES + 8), np.uint8))]),
            *scatter(device, [Copy(source, [3, 4], slot(1))]),
        ]
        target = slot(1)
        good = gather(device, [Copy(source, [3], target)])
        for fence in bad:
            with pytest.raises(MisuseError, match="do not match"):
                fence.wait(SECONDS)
        assert good.wait(SECONDS)
        assert np.array_equal(target, source[:, [3]])
        assert np.array_equal(source, before), "nothing is poisoned for a copy that cannot be done"


def test_who_waits_for_a_failed_copy_fails_with_it():
    for order in ORDERS:
        with closing(ChaosDevice(2, order)) as device:
            source, target = pages(), pages(1)
            before = target.copy()
            failed = gather(device, [Copy(source, [BLOCKS], slot(1))])
            (fence,) = scatter(device, [Copy(target, [1], slot(1))], failed)
            with pytest.raises(MisuseError, match="do not match"):
                fence.wait(SECONDS)
        assert np.array_equal(target, before)


def test_an_unknown_order_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'lazy'"):
        ChaosDevice(0, "lasy")


def test_after_close_everything_is_done_and_nothing_is_taken():
    for seed in SEEDS:
        device = ChaosDevice(seed)
        target = slot(1)
        fence = gather(device, [Copy(pages(), [3], target)])
        device.close()
        assert np.array_equal(target, pages()[:, [3]])
        assert fence.done()
        with pytest.raises(MisuseError, match="is closed"):
            gather(device, [Copy(pages(), [3], target)])
        device.close()


def test_a_fence_of_elsewhere_holds_work_until_it_is_settled():
    with closing(ChaosDevice(0)) as device:
        gate, target = CpuFence(), slot(1)
        fence = gather(device, [Copy(pages(), [3], target)], gate)
        assert not fence.wait(0.02)
        assert (target == 0xAB).all()
        other = threading.Thread(target=gate.settle)
        other.start()
        assert fence.wait(SECONDS)
        other.join()
        assert np.array_equal(target, pages()[:, [3]])


def test_close_gives_up_on_a_fence_that_nobody_settles(monkeypatch):
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.05)
    device = ChaosDevice(0)
    target, after = slot(1), slot(1)
    held = gather(device, [Copy(pages(), [3], target)], CpuFence())
    free = gather(device, [Copy(pages(), [4], after)])
    device.close()
    with pytest.raises(MisuseError, match="closed before a fence"):
        held.done()
    assert (target == 0xAB).all()
    assert free.done()
    assert np.array_equal(after, pages()[:, [4]])


def test_threads_may_call_it_side_by_side():
    with closing(ChaosDevice(5, "random")) as device:
        source = pages()
        targets = [slot(3) for _ in range(8)]

        def copy(target):
            for _ in range(20):
                fence = gather(device, [Copy(source, [5, 6, 1], target)])
                assert fence.wait(SECONDS)

        threads = [threading.Thread(target=copy, args=(target,)) for target in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(np.array_equal(target, source[:, [5, 6, 1]]) for target in targets)
