"""What a CUDA device lends to operations: nothing of it is used again before they have ended."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from contextlib import closing
from functools import partial

import numpy as np
import pytest

from kvtier.device import cuda
from kvtier.device import turns as module
from kvtier.device.base import Copy, PlaneGroups
from kvtier.device.chaos import ChaosDevice
from kvtier.device.cpu import CpuFence
from kvtier.device.cuda import CudaDevice
from kvtier.device.paths import DEFAULT, PATHS, Choice, Way
from kvtier.device.turns import CudaFence, CudaStream, Turn
from kvtier.errors import MisuseError
from kvtier.testing.cpu_driver import CpuDriver
from kvtier.testing.forks import forked

PLANES, BYTES = 6, 48
SECONDS = 10.0
SEEDS = range(10)
Work = Callable[[CudaDevice, np.ndarray, np.ndarray], object]
"""Enqueues copies between pages, [planes, 20 blocks, bytes], and slots, two blocks each."""


def pages(seed: int = 0) -> np.ndarray:
    shape = (PLANES, 20, BYTES)
    return np.random.default_rng(seed).integers(0, 200, shape, np.uint8)


def crowd(seed: int, work: Work, count: int, way: Way) -> bool:
    """Enqueue more than may be in flight, on adverse streams; say whether all bytes are right.

    Three may: a table that is lent to groups, their copies over the link, and the kernel's turn.
    """
    chaos, kv = ChaosDevice(seed, "lazy"), pages(seed)
    slots = np.random.default_rng(seed + 1).integers(0, 200, (count, PLANES, 2, BYTES), np.uint8)
    driver = CpuDriver(chaos._stream, chaos.compute)
    device = CudaDevice(driver, DEFAULT, Choice(way), in_flight=3)
    with closing(chaos), closing(device):
        device.pin(slots)
        try:
            work(device, kv, slots)
        finally:
            device.close()
    return all(np.array_equal(slot, kv[:, ids(at)]) for at, slot in enumerate(slots))


def ids(at: int) -> tuple[int, int]:
    """Return the blocks of a slot, which are no other one's of the first nine."""
    return (at, at + 9) if at < 9 else (at - 9, at)


def one_by_one(device, kv, slots):
    for at, slot in enumerate(slots):
        device.gather(device.stream("store"), [Copy(kv, ids(at), slot)], ())


def in_one_call(device, kv, slots):
    """Each copy has other planes, so that it is planned, and is an operation, for itself."""
    copies = [Copy(kv[at:], ids(at), slot[at:]) for at, slot in enumerate(slots)]
    copies += [Copy(kv[:at], ids(at), slot[:at]) for at, slot in enumerate(slots)]
    device.gather(device.stream("store"), copies, ())


def by_groups(device, kv, slots):
    """Two kinds of copies in groups of planes; there is room for the table of one of them."""
    cuts = ((0, 2), (2, 3), (3, 6))
    *some, last = slots
    wide, blocks = [Copy(kv, ids(at), slot) for at, slot in enumerate(some)], ids(len(some))
    narrow = [Copy(kv[:4], blocks, last[:4]), Copy(kv[4:], blocks, last[4:])]
    parts = (((0, 2), (2, 3), (3, 4)), ((0, 1), (1, 1), (1, 2)))
    groups = PlaneGroups([*wide, *narrow], [*[cuts] * len(wide), *parts], 3)
    return device.scatter(device.stream("load"), groups, ())


def spoiled(work: Work, count: int, way: Way = "direct") -> bool:
    """Say whether some schedule has wrong bytes, or crashes, as its addresses may be such bytes."""

    def silently(seed: int) -> bool:
        faulthandler.disable()
        return crowd(seed, work, count, way)

    jobs = [partial(silently, seed) for seed in SEEDS]
    return not all(one.result for one in forked(jobs, seconds=20))


WORK = {
    "one by one": (one_by_one, 12, "direct"),
    "in one call": (in_one_call, 6, "direct"),
    "groups": (by_groups, 5, "direct"),
    "groups, staged": (by_groups, 5, "staged"),
    "groups, staged, over the link as a batch": (by_groups, 7, "staged"),
}
each = pytest.mark.parametrize(("work", "count", "way"), WORK.values(), ids=WORK)


@each
def test_no_table_is_written_anew_before_its_copy_has_read_it(work, count, way):
    assert all(crowd(seed, work, count, way) for seed in SEEDS)


@each
def test_written_anew_at_once_it_spoils_copies(work, count, way, monkeypatch):
    """The twin: an operation that does not wait for its turn."""
    monkeypatch.setattr(module, "_ended", lambda event: True)
    assert spoiled(work, count, way)


def test_one_that_does_not_know_what_has_no_event_yet_spoils_copies(monkeypatch):
    """The twin: operations of one call, before any event, take each other's tables."""
    monkeypatch.setattr(CudaStream, "record", lambda self: module.CudaFence(self.raw()))
    monkeypatch.setattr(
        CudaStream, "raw", lambda self: self._driver.record(self.handle), raising=False
    )
    assert spoiled(in_one_call, 6)


@pytest.mark.parametrize(("way", "count"), [("direct", 5), ("staged", 5), ("staged", 7)])
def test_lent_twice_a_table_that_groups_share_spoils_copies(way, count, monkeypatch):
    """The twin: what comes between two groups of planes takes the table of both."""
    monkeypatch.setattr(Turn, "lent", property(lambda _: False, lambda *_: None), raising=False)
    assert spoiled(by_groups, count, way)


def in_groups(in_flight: int) -> list[str]:
    """Load staged groups with so few operations in flight; return what the driver was asked.

    Raises what their last fence raises.
    """
    kv, driver, slots = pages(), CpuDriver(), np.zeros((7, PLANES, 2, BYTES), np.uint8)
    with closing(CudaDevice(driver, DEFAULT, Choice("staged"), in_flight=in_flight)) as device:
        device.pin(slots)
        assert by_groups(device, kv, slots)[-1].wait(SECONDS)
    return driver.calls


def test_tables_that_are_lent_leave_what_an_operation_needs():
    """So the call does not wait for itself; with more in flight, tables are shared."""
    uploads = [in_groups(in_flight).count("copy") for in_flight in (2, 3, 4)]
    assert uploads[0] > uploads[1] > uploads[2]


def test_a_call_that_lends_all_to_itself_is_told_and_does_not_hang(monkeypatch):
    """The twin."""

    def lavish(planned, room, upload):
        return tables(planned, room + 1, upload)

    tables = cuda.Tables
    monkeypatch.setattr(cuda, "Tables", lavish)
    with pytest.raises(MisuseError, match="all 2 operations in flight are of one call"):
        in_groups(2)


def event_after_drain(monkeypatch) -> object:
    """Pin memory anew while another thread enqueues; return by which event its operation ends.

    Just then, so that the operation comes after what is recorded to wait for.
    """
    driver, memory, turns = CpuDriver(), np.zeros(64, np.uint8), []
    with closing(CudaDevice(driver, DEFAULT, in_flight=2)) as device:
        device.pin(memory)
        stream, record = device.stream("store"), driver.record

        def record_and_enqueue(handle):
            event = record(handle)
            if handle is stream.handle:
                with stream.turn() as turn:
                    turns.append(turn)
            return event

        with monkeypatch.context() as patch:
            patch.setattr(driver, "record", record_and_enqueue)
            device.pin(memory[1:])
        return turns[0].event


def test_what_is_recorded_to_wait_for_all_ends_no_operation_of_another_thread(monkeypatch):
    assert event_after_drain(monkeypatch) is None


def test_recorded_as_the_streams_own_it_would_end_what_comes_after_it(monkeypatch):
    """The twin."""
    monkeypatch.setattr(CudaDevice, "_drain", lambda device, _: device.stream("store").record())
    assert event_after_drain(monkeypatch) is not None


def test_what_is_lent_is_given_to_nobody_else():
    with closing(CudaDevice(CpuDriver(), DEFAULT, in_flight=2)) as device:
        stream = device.stream("store")
        with stream.turn() as held:
            for _ in range(4):
                with stream.turn() as other:
                    assert other is not held


def test_groups_of_planes_share_a_table_that_is_uploaded_once():
    kv, driver = pages(), CpuDriver()
    slots = np.random.default_rng(1).integers(0, 200, (2, PLANES, 2, BYTES), np.uint8)
    with closing(CudaDevice(driver, DEFAULT, Choice("direct", 2))) as device:
        device.pin(slots)
        copies = [Copy(kv, ids(at), slot) for at, slot in enumerate(slots)]
        groups = PlaneGroups(copies, [((0, 1), (1, 4), (4, 6))] * 2, 3)
        fences = device.scatter(device.stream("load"), groups, ())
        assert all(fence.wait(SECONDS) for fence in fences)
    assert driver.calls == ["copy", *["launch 2"] * 3]
    assert all(np.array_equal(kv[:, ids(at)], slot) for at, slot in enumerate(slots))


WIDEST = 3 * 2 * BYTES  # of a slot, the most that a group has
# A table and five slots: of one plane, two of which have room at a time; and of two planes.
ALONE = ["copy", *2 * ["copy", "copy", "launch"], "copy", "launch"]
PAIR = ["copy", *5 * ["copy", "launch"]]


@pytest.mark.parametrize(
    ("missing", "calls"),
    [
        (0, ["copy", *3 * ["batch", "launch"]]),  # a table, and then all slots of a group
        (1, ["copy", *3 * [*4 * ["copy"], "launch", "copy", "launch"]]),  # in two lots
        (4 * WIDEST, ["copy", *15 * ["copy", "launch"]]),
        (4 * WIDEST + 1, [*ALONE, *PAIR, *ALONE, *PAIR]),  # each group, or part of it, by its own
    ],
)
def test_groups_of_planes_are_staged_by_one_table_where_each_has_room(missing, calls):
    kv, driver = pages(), CpuDriver()
    slots = np.random.default_rng(1).integers(0, 200, (5, PLANES, 2, BYTES), np.uint8)
    way, room = Choice("staged", 2), 5 * WIDEST - missing
    with closing(CudaDevice(driver, DEFAULT, way, staging_bytes=room)) as device:
        device.pin(slots)
        copies = [Copy(kv, ids(at), slot) for at, slot in enumerate(slots)]
        groups = PlaneGroups(copies, [((0, 1), (1, 4), (4, 6))] * 5, 3)
        fences = device.scatter(device.stream("load"), groups, ())
        assert all(fence.wait(SECONDS) for fence in fences)
    assert [call.partition(" ")[0] for call in driver.calls] == calls
    assert all(np.array_equal(kv[:, ids(at)], slot) for at, slot in enumerate(slots))


@pytest.mark.parametrize(("planes", "blocks"), [(4, 5600), (1100, 2)])
def test_what_has_no_room_in_one_table_is_uploaded_group_by_group(planes, blocks):
    kv, driver = np.zeros((planes, 2 * blocks, 8), np.uint8), CpuDriver()
    slot = np.random.default_rng(1).integers(0, 200, (planes, blocks, 8), np.uint8)
    some, half = range(0, 2 * blocks, 2), planes // 2
    with closing(CudaDevice(driver, DEFAULT, Choice("direct", 2))) as device:
        device.pin(slot)
        cuts = ((0, half), (half, planes))
        fences = device.scatter(
            device.stream("load"), PlaneGroups([Copy(kv, some, slot)], [cuts], 2), ()
        )
        assert all(fence.wait(SECONDS) for fence in fences)
    assert driver.calls.count("copy") == (4 if blocks > planes else 2)
    assert np.array_equal(kv[:, some], slot)


class Looks:
    """In the place of the pause between two looks at an event: lets what hangs go on.

    seen: how many operations had been enqueued, copies of tables and over the link apart.
    """

    def __init__(self, driver, gate):
        self.seen, self._driver, self._gate, self._pause = [], driver, gate, module._PAUSE

    def wait(self, seconds):
        self.seen.append(sum(not call.startswith("copy") for call in self._driver.calls))
        self._gate.settle()
        self._pause.wait(seconds)


@pytest.mark.parametrize("way", PATHS)
def test_a_call_waits_for_the_oldest_where_so_many_operations_are_under_way(way, monkeypatch):
    """Groups that share a table are operations, each of them."""
    driver, gate, in_flight = CpuDriver(), CpuFence(), 4
    kv, slots = pages(), np.ones((2, PLANES, 2, BYTES), np.uint8)
    copies = [Copy(kv, ids(at), slot) for at, slot in enumerate(slots)]
    groups = PlaneGroups(copies, [tuple((at, at + 1) for at in range(PLANES))] * 2, PLANES)
    looks = Looks(driver, gate)
    monkeypatch.setattr(module, "_PAUSE", looks)
    with closing(CudaDevice(driver, DEFAULT, Choice(way, 2), in_flight=in_flight)) as device:
        device.pin(slots)
        fences = device.scatter(device.stream("load"), groups, [CudaFence(gate)])
        assert looks.seen, "it did not wait"
        assert looks.seen[0] <= in_flight < PLANES
        assert all(fence.wait(SECONDS) for fence in fences)
