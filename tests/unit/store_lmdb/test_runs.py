"""Records of one call in adjacent slots: one system call, and each record's fate its own."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvtier.storage_backends import slab_runs
from kvtier.storage_backends.slab import FileIO, Segment, Slabs
from kvtier.storage_backends.slab_files import Placed
from kvtier.storage_backends.slab_ledger import Ledger
from kvtier.storage_backends.slab_runs import runs
from kvtier.testing.records import aligned, fetch, is_exact, make_record
from kvtier.tiers.store import Read, Status, Store, Write

MIB = 1 << 20
SIZE = 100_000
OK, FAILED, CORRUPT, ABSENT = Status.OK, Status.FAILED, Status.CORRUPT, Status.ABSENT


class Counting(FileIO):
    """Counts calls, and fails those that reach a given offset of a segment."""

    def __init__(self) -> None:
        self.reads = self.writes = 0
        self.bad: int | None = None
        self.raises: BaseException = OSError(errno.EIO, "injected")

    def _meets(self, buffers: Sequence[memoryview], offset: int) -> None:
        if self.bad is not None and offset <= self.bad < offset + sum(map(len, buffers)):
            raise self.raises

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.reads += 1
        self._meets(buffers, offset)
        return super().pread(descriptor, buffers, offset)

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.writes += 1
        self._meets(buffers, offset)
        return super().pwrite(descriptor, buffers, offset)


def opened_for_runs(opened: Any) -> tuple[Any, Counting]:
    """Return a store whose segments have forty slots, and its I/O; its own test is counted off."""
    io = Counting()
    store = opened(512 * MIB, io=io)
    io.reads = io.writes = 0
    return store, io


def read_all(store: Store, records: Sequence[Write]) -> list[tuple[Read, memoryview]]:
    into = [aligned(SIZE if at % 3 else 102_400) for at in range(len(records))]
    reads = store.read_many([record.header.id for record in records], into)
    return list(zip(reads, into, strict=True))


def test_adjacent_small_records_are_moved_together(opened: Any) -> None:
    store, io = opened_for_runs(opened)
    records = [make_record(number, SIZE) for number in range(18)]
    assert store.write_many(records) == [OK] * 18
    assert all(is_exact(*one) for one in read_all(store, records))
    assert io.writes == io.reads == 1
    assert all(is_exact(*one) for one in read_all(store, records[::-1]))  # whatever the order
    assert io.reads == 2
    assert all(is_exact(*one) for one in read_all(store, records[::2]))
    assert io.reads == 2 + 9


def test_twin_without_runs_each_costs_a_call(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_runs, "_MOST_BYTES", 0)
    store, io = opened_for_runs(opened)
    assert store.write_many([make_record(number, SIZE) for number in range(18)]) == [OK] * 18
    assert io.writes == 18


def test_a_run_is_bounded() -> None:
    large, small = Segment(1, MIB, 8), Segment(2, 8192, 1000)
    nothing = b"", 0, memoryview(b"")
    placed = [Placed(at, large, at, *nothing) for at in range(3)]
    placed += [Placed(3 + at, small, at, *nothing) for at in range(900)]
    lengths = [len(run) for run in runs(placed)]
    assert lengths == [3, 512, 388]  # 4 MiB; 1,024 buffers are the system's limit


def writes_of_pairs(opened: Any) -> int:
    """Free six neighbours of a full segment in disorder; return the calls that three pairs take."""
    store, io = opened_for_runs(opened)
    store.write_many([make_record(0, SIZE)])
    (segment,) = store._ledger._slabs.segments.values()
    records = [make_record(number, SIZE) for number in range(segment.slots)]
    assert set(store.write_many(records)) == {OK}
    store.delete_many([records[number].header.id for number in (13, 10, 15, 11, 14, 12)])
    store._ledger.commit(store._ledger.pending)
    io.writes = 0
    for number in (100, 102, 104):
        pair = [make_record(number, SIZE), make_record(number + 1, SIZE)]
        assert store.write_many(pair) == [OK, OK]
    assert not segment.free
    return io.writes


def test_slots_that_were_freed_in_any_order_are_taken_as_neighbours(opened: Any) -> None:
    assert writes_of_pairs(opened) == 3


def test_twin_in_the_order_of_their_release_they_would_be_strewn(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Segment, "line_up", lambda _: None)
    assert writes_of_pairs(opened) == 6


def takes_from(slabs: Slabs, freed: bool) -> list[int]:
    """Free slots of three segments in turn; return which segments the next four come from."""
    for number in (1, 2, 3):
        segment = Segment(number, MIB, 4)
        segment.occupy({0, 1, 2, 3})
        slabs.add(segment)
    one, two, three = slabs.segments.values()
    two.free, three.free = [0], [3, 2, 1]
    slabs.freed([two, three])
    taken = [slabs.take(MIB, 0.0)]
    one.free = [1, 0]
    if freed:
        slabs.freed([one])
    taken += [slabs.take(MIB, 0.0) for _ in range(3)]
    return [segment.number for segment, _ in filter(None, taken)]


def test_the_fullest_segment_gives_its_slots_first_so_that_others_drain() -> None:
    assert takes_from(Slabs(1 << 30, 0), freed=True) == [2, 1, 1, 3]


def test_twin_not_looked_through_again_another_would_fill() -> None:
    assert takes_from(Slabs(1 << 30, 0), freed=False) == [2, 3, 3, 3]


class Between(FileIO):
    """Does something else once, when a payload has been written and is not published yet."""

    also: Callable[[], object] | None = None

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = super().pwrite(descriptor, buffers, offset)
        also, self.also = self.also, None
        if also:
            also()
        return count


def overtaken(opened: Any) -> tuple[Any, int]:
    """Write a record twice at once, the second committed before the first is published.

    Returns the store, and how many of its slots are free.
    """
    io = Between()
    store = opened(64 * MIB, io=io)
    one, two = make_record(1, SIZE), make_record(1, SIZE, version=1)

    def other() -> None:
        assert store.write_many([two]) == [OK]
        store._ledger.commit(store._ledger.pending)

    io.also = other
    assert store.write_many([one]) == [OK]
    store._ledger.commit(store._ledger.pending)
    read, buffer = fetch(store, one.header.id, SIZE)
    assert is_exact(read, buffer)
    assert bytes(buffer[:SIZE]) == bytes(one.data[:SIZE])
    return store, sum(s.slots - len(s.free) for s in store._ledger._slabs.segments.values())


def test_what_another_call_committed_meanwhile_is_replaced(opened: Any) -> None:
    """What was known of a name is asked anew after a commit: its slot is freed."""
    assert overtaken(opened)[1] == 1


def test_twin_what_was_known_before_would_lose_a_slot(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "_replaced", lambda _, known: known.indexed)
    assert overtaken(opened)[1] == 2


def test_a_bad_slot_spoils_no_other_of_its_run(opened: Any) -> None:
    store, io = opened_for_runs(opened)
    records = [make_record(number, SIZE) for number in range(10)]
    stride = 106_496
    io.bad = 4 * stride
    statuses = store.write_many(records)
    assert statuses == [FAILED if at == 4 else OK for at in range(10)]
    io.bad = None
    assert store.write_many(records) == [OK] * 10
    io.bad = 7 * stride
    found = read_all(store, records)
    assert [read.status for read, _ in found] == [FAILED if at == 7 else OK for at in range(10)]
    assert all(is_exact(*one) for at, one in enumerate(found) if at != 7)


def test_a_foreign_header_spoils_no_other_of_its_run(opened: Any) -> None:
    store, _ = opened_for_runs(opened)
    records = [make_record(number, SIZE) for number in range(10)]
    store.write_many(records)
    path, at = opened.find(records[3])
    with path.open("r+b") as file:
        file.seek(at + 20)
        file.write(b"\xff")
    found = read_all(store, records)
    assert [read.status for read, _ in found] == [CORRUPT if at == 3 else OK for at in range(10)]


def test_a_name_that_stands_twice_is_what_was_written_last(opened: Any) -> None:
    store, _ = opened_for_runs(opened)
    first, again = make_record(1, SIZE), make_record(1, SIZE, version=1)
    other = make_record(2, SIZE)
    assert store.write_many([first, other, again, other]) == [OK] * 4
    read, buffer = fetch(store, first.header.id, SIZE)
    assert is_exact(read, buffer)
    assert bytes(buffer) == bytes(again.data)


def test_an_interrupted_call_keeps_no_slot(opened: Any) -> None:
    store, io = opened_for_runs(opened)
    store.write_many([make_record(0, SIZE)])
    (segment,) = store._ledger._slabs.segments.values()
    free = len(segment.free)
    io.bad, io.raises = 5 * segment.stride, KeyboardInterrupt()
    records = [make_record(number, SIZE) for number in range(1, 12)]
    with pytest.raises(KeyboardInterrupt):
        store.write_many(records)
    assert len(segment.free) == free
    assert set(store.contains_many([record.header.id for record in records])) == {ABSENT}
