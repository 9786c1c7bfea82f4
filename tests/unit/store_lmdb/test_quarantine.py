"""A slot that the device fails is not used again for a while."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from kvtier.storage_backends.slab import FileIO, Segment
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.tiers.store import Status

MIB = 1 << 20
OK, FAILED, FULL = Status.OK, Status.FAILED, Status.FULL
CAPACITY = 16 * MIB  # two slots a segment
SIZE = 60_000


class BadBlock(FileIO):
    """A device of which one place in a file can't be written, or read. Counts the failures."""

    def __init__(self, code: int = errno.EIO) -> None:
        self.code = code
        self.place: tuple[str, int] | None = None
        self.failed = 0
        self.reads = False
        self.writes = True

    def _hit(self, descriptor: int, buffers: list[memoryview], offset: int) -> None:
        if self.place is None:
            return
        name, at = self.place
        there = Path(f"/proc/self/fd/{descriptor}").readlink().name == name
        if there and offset <= at < offset + sum(map(len, buffers)):
            self.failed += 1
            raise OSError(self.code, os.strerror(self.code))

    def pwrite(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if self.writes:
            self._hit(descriptor, buffers, offset)
        return super().pwrite(descriptor, buffers, offset)

    def pread(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if self.reads:
            self._hit(descriptor, buffers, offset)
        return super().pread(descriptor, buffers, offset)


class Disk:
    """A store on such a device: its first record lies where the device is about to go bad."""

    def __init__(self, opened: Any, code: int = errno.EIO) -> None:
        self.io, self.clock, self.opened = BadBlock(code), opened.clock, opened
        self.store = opened(CAPACITY, durability="none", io=self.io, clock=opened.clock)
        self.first = make_record(0, SIZE)
        assert self.store.write_many([self.first]) == [OK]
        path, at = opened.find(self.first)
        self.io.place = (path.name, at + 5000)

    def write(self, number: int) -> Status:
        return self.store.write_many([make_record(number, SIZE)])[0]

    def free_first(self) -> None:
        assert self.store.delete_many([self.first.header.id]) == [OK]

    def fill(self, numbers: range) -> list[Status]:
        """Write until the store is full."""
        said = []
        for number in numbers:
            said.append(self.write(number))
            if said[-1] is FULL:
                return said
        raise AssertionError("it is never full")


@pytest.fixture
def disk(opened: Any) -> Disk:
    return Disk(opened)


def test_a_bad_block_costs_one_write(disk: Disk) -> None:
    disk.free_first()
    said = disk.fill(range(1, 400))
    assert said.count(FAILED) == disk.io.failed == 1
    assert said.count(OK) > 100
    good = [n for n, status in enumerate(said, 1) if status is OK]
    for number in good:
        assert is_exact(*fetch(disk.store, make_record(number, SIZE).header.id, SIZE))


def test_twin_without_quarantine_every_write_fails(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Segment, "fail", lambda *_: None)
    disk.free_first()
    assert [disk.write(number) for number in range(1, 20)] == [FAILED] * 19


def test_it_is_tried_again_when_nothing_else_is_free_and_ever_less_often(disk: Disk) -> None:
    disk.free_first()
    disk.fill(range(1, 400))
    times = []
    for second in range(1, 500):
        disk.clock.now = float(second)
        before = disk.io.failed
        assert disk.write(1000) in (FULL, FAILED)
        if disk.io.failed > before:
            times.append(second)
    assert times == [30, 90, 210, 450]


def test_a_fault_that_passes_is_over_in_half_a_minute(disk: Disk) -> None:
    disk.free_first()
    disk.fill(range(1, 400))
    disk.io.place = None
    disk.clock.now = 29.0
    assert disk.write(1000) is FULL
    disk.clock.now = 31.0
    assert disk.write(1000) is OK
    assert disk.store.delete_many([make_record(1000, SIZE).header.id]) == [OK]
    assert disk.write(1001) is OK  # what was written is no longer under suspicion


def test_a_slot_that_cannot_be_read_is_not_written_next(disk: Disk) -> None:
    disk.io.reads, disk.io.writes = True, False
    read, _ = fetch(disk.store, disk.first.header.id, SIZE)
    assert read.status is FAILED
    disk.free_first()
    number = 1
    while disk.write(number) is OK:
        assert is_exact(*fetch(disk.store, make_record(number, SIZE).header.id, SIZE))
        number += 1
    assert number > 100


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EINTR, errno.EBADF])
def test_what_is_not_the_devices_fault_condemns_no_slot(opened: Any, code: int) -> None:
    disk = Disk(opened, code)
    disk.free_first()
    assert disk.write(1) is FAILED
    disk.io.place = None
    said = disk.fill(range(2, 400))
    assert said.count(OK) == len(said) - 1
    path, _ = opened.find(make_record(2, SIZE))
    assert path.name == "slab-00000001-65536.seg"


def test_a_segment_of_bad_slots_can_make_room_for_another_class(disk: Disk) -> None:
    disk.free_first()
    said = disk.fill(range(1, 400))
    names = [make_record(n, SIZE).header.id for n, status in enumerate(said, 1) if status is OK]
    assert disk.store.delete_many(names) == [OK] * len(names)
    assert disk.store.write_many([make_record(200, 2 * MIB)]) == [OK]
    assert disk.opened.disk_bytes() <= CAPACITY
