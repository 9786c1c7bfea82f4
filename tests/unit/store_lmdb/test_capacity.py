"""The NVMe store's bytes: within the capacity at every instant, and no slot given out twice."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest

from kvtier.identity.record import Header, PartName
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import PAGE, FileIO, Segment, Slabs, stride_for, stride_of
from kvtier.storage_backends.slab_files import SegmentFiles
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.tiers.store import Status

MIB = 1 << 20
OK, FULL = Status.OK, Status.FULL


def test_capacity_is_never_exceeded(opened: Any, durability: str) -> None:
    capacity = 24 * MIB
    store = opened(capacity, durability=durability)
    samples: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while not done.is_set():
            samples.append(opened.disk_bytes())
            time.sleep(0.002)

    threads = [threading.Thread(target=overfill, args=(store, seed)) for seed in range(8)]
    sampler = threading.Thread(target=sample)
    for thread in (sampler, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    sampler.join()
    assert max(samples) <= capacity
    assert max(samples) > capacity * 0.8
    for header in list(store.scan()):
        assert is_exact(*fetch(store, header.id, header.stored_bytes))
    store.close()
    assert opened.disk_bytes() <= capacity


class SmallDisk(FileIO):
    """A disk that has less room than the capacity promises."""

    def __init__(self, room: int) -> None:
        self.room = room

    def fallocate(self, descriptor: int, length: int) -> None:
        if length > self.room:
            raise OSError(errno.ENOSPC, "injected")
        self.room -= length
        super().fallocate(descriptor, length)


def test_on_a_full_disk_what_is_deleted_makes_room_at_once(opened: Any, durability: str) -> None:
    clock = opened.clock  # it stands: no batch is due
    store = opened(256 * MIB, durability=durability, io=SmallDisk(8 * MIB), clock=clock)
    records = [make_record(number, 500_000) for number in range(40)]
    count = store.write_many(records).index(FULL)
    assert count > 4
    for number in range(count, 40):
        assert store.write_many([records[number]]) == [FULL]
        assert store.delete_many([records[number - count].header.id]) == [OK]
        assert store.write_many([records[number]]) == [OK]
    for record in records[-count:]:
        assert is_exact(*fetch(store, record.header.id, 500_000))


def overfill(store: LmdbSlabStore, seed: int) -> None:
    choose = random.Random(seed)
    mine: list[bytes] = []
    for number in range(40):
        size = choose.choice((3000, 70_000, 262_144, 262_144, 900_000))
        record = make_record(1000 * seed + number, size)
        while (status := store.write_many([record])[0]) is FULL and mine:
            store.delete_many([mine.pop(0)])
        if status is OK:
            mine.append(record.header.id)


def test_lower_capacity_drops_the_oldest(opened: Any) -> None:
    store = opened(32 * MIB)
    records = [make_record(number, MIB) for number in range(20)]
    assert store.write_many(records) == [OK] * 20
    store.close()
    store = opened(12 * MIB)
    assert opened.disk_bytes() <= 12 * MIB
    left = [header.depth for header in store.scan()]
    assert left
    assert left == list(range(20 - len(left), 20))
    assert is_exact(*fetch(store, records[-1].header.id, MIB))


def test_segments_change_their_class(opened: Any, durability: str) -> None:
    store = opened(durability=durability)
    for sizes in (100_000, 900_000, 5000, 3_000_000):
        names = []
        for number in range(5000):
            record = make_record(number, sizes)
            (status,) = store.write_many([record])
            if status is FULL:
                break
            assert status is OK
            names.append(record.header.id)
        assert status is FULL
        assert len(names) * store.footprint(sizes) > 16 * MIB * 0.6
        assert store.delete_many(names) == [OK] * len(names)


def test_slot_with_a_reader_is_not_reused(opened: Any) -> None:
    class Slow(FileIO):
        entered, go = threading.Event(), threading.Event()
        armed = False

        def pread(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
            if self.armed:
                self.entered.set()
                assert self.go.wait(10)
            return super().pread(descriptor, buffers, offset)

    io = Slow()
    store = opened(4 * MIB, durability="each", io=io)
    old, new = make_record(1, MIB), make_record(2, MIB)
    assert store.write_many([old]) == [OK]
    io.armed = True
    result: list[object] = []
    thread = threading.Thread(target=lambda: result.extend(fetch(store, old.header.id, MIB)))
    thread.start()
    assert io.entered.wait(10)
    assert store.delete_many([old.header.id]) == [OK]
    assert store.write_many([new]) == [FULL]
    io.go.set()
    thread.join()
    assert is_exact(*result)
    assert store.write_many([new]) == [OK]


def test_free_slots_are_waited_for_by_commit_only(opened: Any) -> None:
    """In batch mode a deleted record's slot is reused, but after the deletion is committed."""
    store = opened(4 * MIB, clock=opened.clock)
    for number in range(20):
        record = make_record(number, MIB)
        assert store.write_many([record]) == [OK]
        assert store.delete_many([record.header.id]) == [OK]


def test_footprint_is_what_a_record_takes(opened: Any) -> None:
    store = opened(64 * MIB)
    count = 0
    while store.write_many([make_record(count, 500_000)]) == [OK]:
        count += 1
    assert 0.93 * 64 * MIB <= count * store.footprint(500_000) <= 64 * MIB


def test_more_segments_than_open_files(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.storage_backends.slab_files._MAX_OPEN", 3)
    store = opened(64 * MIB)
    records = [make_record(number, 600_000) for number in range(20)]
    assert store.write_many(records) == [OK] * 20
    assert len(store._files._open) <= 3
    for record in records:
        assert is_exact(*fetch(store, record.header.id, 600_000))
    assert len(list(opened.folder.glob("*.seg"))) == 20


def emptied(opened: Any) -> LmdbSlabStore:
    """Return a store of 20 segments, all of them empty."""
    store = opened(16 * MIB, durability="each")
    records = [make_record(number, 600_000) for number in range(20)]
    assert store.write_many(records) == [OK] * 20
    assert store.delete_many([record.header.id for record in records]) == [OK] * 20
    assert len(store._ledger._slabs.empty_segments()) == 20
    return store


def test_files_go_without_the_lock_and_before_their_bytes_are_given_out(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = emptied(opened)
    ledger = store._ledger
    locked: list[tuple[bool, bool]] = []
    remove = SegmentFiles.remove

    def noted(files: SegmentFiles, segment: Segment) -> None:
        locked.append((ledger._lock.locked(), ledger._committing.locked()))
        remove(files, segment)

    monkeypatch.setattr(SegmentFiles, "remove", noted)
    assert store.write_many([make_record(50, 8 * MIB)]) == [OK]
    assert len(locked) > 5
    assert set(locked) == {(False, True)}


def written_while_empty_segments_go(store: LmdbSlabStore) -> Any:
    """Return what is read of a record that is written when the first of them has gone."""
    ledger = store._ledger
    going = ledger._going(())
    assert ledger._let_go(going)
    record = make_record(50, 600_000)
    assert store.write_many([record]) == [OK]
    while ledger._let_go(going):
        pass
    return fetch(store, record.header.id, 600_000)


def test_a_segment_that_is_used_again_does_not_go(opened: Any) -> None:
    assert is_exact(*written_while_empty_segments_go(emptied(opened)))


def test_twin_without_a_second_look_it_does(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, empty_segments = emptied(opened), Slabs.empty_segments

    def looked_at_once(slabs: Slabs) -> list[Segment]:
        found = empty_segments(slabs)
        monkeypatch.setattr(Segment, "empty", property(lambda _: True))
        return found

    monkeypatch.setattr(Slabs, "empty_segments", looked_at_once)
    read, _ = written_while_empty_segments_go(store)
    assert read.status is Status.ABSENT


def test_segment_names() -> None:
    segment = Segment(7, 8192, 3)
    again = Segment.named(segment.name, 3 * 8192 + 100)
    assert again is not None
    assert (again.number, again.stride, again.slots) == (7, 8192, 3)
    for foreign in ("slab-00000007-8191.seg", "slab-7-8192.seg", "slab-00000007-8192.seg.bak"):
        assert Segment.named(foreign, 8192) is None


def encoded(stored: int, raw: int) -> Header:
    """Return the header of a part of which a codec left so many bytes."""
    sums = {"raw_sum": bytes(16), "stored_sum": bytes(16)}
    return Header(bytes(32), bytes(32), None, 0, PartName(), raw, stored, codec=1, **sums)


def test_sizes_that_a_codec_leaves_share_few_classes() -> None:
    raw = 2_359_296
    strides = Counter(stride_for(encoded(stored, raw)) for stored in range(raw // 2, raw, 1009))
    assert len(strides) <= 24
    for stored in range(5000, raw, 1009):
        stride = stride_for(encoded(stored, raw))
        assert stored + PAGE <= stride <= stored * 17 / 16 + 2 * PAGE
        assert stride % PAGE == 0


def test_twin_with_a_class_a_size_there_would_be_hundreds() -> None:
    raw = 2_359_296
    assert len({stride_of(stored) for stored in range(raw // 2, raw, 1009)}) > 250
