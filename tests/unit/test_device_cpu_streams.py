"""What the CPU device's streams and fences owe to threads: one wake a call, and no order lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kvtier.device import cpu as module
from kvtier.device.base import Copy, PlaneGroups
from kvtier.device.chaos import ChaosDevice, ChaosStream
from kvtier.device.cpu import CpuDevice, CpuFence, CpuStream
from kvtier.errors import MisuseError

PLANES, BLOCKS, BYTES = 8, 20, 48
SECONDS = 10.0
DEVICES = {"threads": CpuDevice, "lazy": lambda: ChaosDevice(0, "lazy")}


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    found = CpuStream("load")
    yield found
    found.close()


def settled(error: Exception | None = None) -> CpuFence:
    fence = CpuFence()
    fence.settle(error)
    return fence


def in_groups(blocks: list[int], count: int) -> tuple[PlaneGroups, np.ndarray]:
    """Return a copy of ones into zeros, in groups of planes, and what it writes to."""
    pages = np.zeros((PLANES, BLOCKS, BYTES), np.uint8)
    slot = np.ones((PLANES, len(blocks), BYTES), np.uint8)
    step = PLANES // count
    cuts = tuple((at, at + step) for at in range(0, PLANES, step))
    return PlaneGroups([Copy(pages, blocks, slot)], [cuts], count), pages


def elsewhere(call) -> list:
    """Return what a call on another thread gives, once it has."""
    found: list = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(SECONDS)
    return found


# -------------------------------------------------------------------------------- one wake a call


def wakes(monkeypatch, groups: int) -> int:
    """Return how often a load wakes its thread, with a fence before it that is not done."""
    count, wake = [0], CpuStream._wake

    def counted(self, works) -> None:
        count[0] += 1
        wake(self, works)

    monkeypatch.setattr(CpuStream, "_wake", counted)
    gate = CpuFence()
    copies, pages = in_groups([3, 9, 1], groups)
    with closing(CpuDevice()) as device:
        fences = device.scatter(device.stream("load"), copies, [gate])
        assert (len(fences), pages.any()) == (groups, False)
        gate.settle()
        assert all(fence.wait(SECONDS) for fence in fences)
    assert pages[:, [3, 9, 1]].all()
    return count[0]


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_a_load_wakes_its_thread_once(monkeypatch, groups: int):
    assert wakes(monkeypatch, groups) == 1


def test_put_piece_by_piece_it_would_wake_it_three_times_a_group(monkeypatch):
    """The twin."""
    monkeypatch.setattr(CpuStream, "submit", CpuStream._each)
    assert wakes(monkeypatch, 4) == 12


def test_another_threads_work_comes_before_or_after_a_call_and_not_into_it(stream: CpuStream):
    free = []

    def works() -> Iterator[list]:
        free.extend(elsewhere(lambda: stream._lock.acquire(blocking=False)))
        yield []

    (fence,) = stream.submit([], works())
    assert free == [False]
    assert fence.wait(SECONDS)


def test_what_was_enqueued_before_a_call_fails_is_done(stream: CpuStream):
    seen: list[int] = []

    def works() -> Iterator[list]:
        yield [lambda: seen.append(1)]
        raise OSError("no second group")

    with pytest.raises(OSError, match="no second group"):
        stream.submit([], works())
    stream.enqueue(lambda: seen.append(2))
    assert stream.record().wait(SECONDS)
    assert seen == [1, 2]


def test_the_chaos_device_goes_piece_by_piece_and_locks_no_stream_meanwhile():
    """Work of one stream, done meanwhile, may enqueue on another whose lock is held."""
    held: list[bool] = []
    with closing(ChaosDevice(0, "random")) as device:
        stream, idle = device.stream("load"), device._schedule.idle
        assert isinstance(stream, ChaosStream)

        def looks() -> None:
            held.append(not elsewhere(lambda: free(stream))[0])
            idle()

        device._schedule.idle = looks
        copies, pages = in_groups([3, 9, 1], 4)
        device.scatter(stream, copies, [CpuFence()])[0].done()
        assert (set(held), len(held) > 4 * 3) == ({False}, True)
        device._schedule.idle = idle
        for item in stream._items:
            if item.gate is not None:
                item.gate.settle()
    assert pages[:, [3, 9, 1]].all()


def free(stream: CpuStream) -> bool:
    if not stream._lock.acquire(blocking=False):
        return False
    stream._lock.release()
    return True


# ------------------------------------------------------------------------------ groups of planes


@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
def test_groups_take_down_their_ids_when_they_are_enqueued(make):
    assert written_while_the_table_changes(make()) == [3, 9]


@pytest.mark.parametrize("make", DEVICES.values(), ids=DEVICES)
def test_unless_they_do_not(make, monkeypatch):
    """The twin."""
    monkeypatch.setattr(module, "_frozen", lambda copies: copies)
    monkeypatch.setattr(ChaosDevice, "_works", CpuDevice._works)
    assert written_while_the_table_changes(make()) == [1, 2]


def written_while_the_table_changes(device: CpuDevice) -> list[int]:
    table, gate = [3, 9], CpuFence()
    copies, pages = in_groups(table, 4)
    with closing(device):
        device.scatter(device.stream("load"), copies, [gate])
        table[:] = 1, 2
        gate.settle()
    return [block for block in range(BLOCKS) if pages[:, block].any()]


def test_a_load_is_cut_into_its_groups_on_the_streams_thread(monkeypatch):
    threads, cut = [], PlaneGroups.__getitem__

    def noted(self, index):
        threads.append(threading.current_thread().name)
        return cut(self, index)

    monkeypatch.setattr(PlaneGroups, "__getitem__", noted)
    copies, _ = in_groups([3, 9, 1], 4)
    with closing(CpuDevice()) as device:
        device.scatter(device.stream("load"), copies, [])[-1].wait(SECONDS)
    assert threads == ["kvtier-load"] * 4


# ---------------------------------------------------------------------------------------- fences


def test_all_who_wait_for_a_fence_hear_that_it_is_done():
    fence, heard = CpuFence(), []
    threads = [threading.Thread(target=lambda: heard.append(fence.wait(SECONDS))) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert not fence.done()
    assert not fence.wait(0)
    assert not fence.wait(-1)
    fence.settle()
    for thread in threads:
        thread.join(SECONDS)
    assert heard == [True] * 5
    assert fence.done()
    assert fence.wait(0)


def test_a_fence_is_settled_once():
    fence = settled(OSError("the first"))
    fence.settle()
    with pytest.raises(OSError, match="the first"):
        fence.done()


def test_a_stream_need_not_wait_for_what_is_done(stream: CpuStream):
    stream.wait(settled())
    assert stream._thread is None
    stream.wait(settled(OSError("the kernel failed")))
    with pytest.raises(OSError, match="the kernel failed"):
        stream.record().wait(SECONDS)


def test_a_closed_stream_waits_for_nothing(stream: CpuStream):
    stream.close()
    with pytest.raises(MisuseError, match="closed"):
        stream.wait(settled())
