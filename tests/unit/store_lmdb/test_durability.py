"""When the NVMe store commits what, in which order, and its index."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import Unavailable
from kvtier.storage_backends import lmdb_slab, slab_recovery
from kvtier.storage_backends.slab import INDEX_FLOOR, SLOT_CHARGE, FileIO
from kvtier.storage_backends.slab_index import Entry, Index
from kvtier.storage_backends.slab_ledger import Ledger
from kvtier.testing.records import make_record
from kvtier.tiers.settling import Settling
from kvtier.tiers.store import Status

MIB = 1 << 20
PAGE = 4096
OK, ABSENT = Status.OK, Status.ABSENT


def test_batch_is_committed_by_age_and_by_size(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = opened.clock
    monkeypatch.setattr(lmdb_slab, "_BATCH_BYTES", 64 * MIB)
    store = opened(256 * MIB, clock=clock)

    def committed() -> int:
        return len(store._ledger.page(b"", 100).names)

    store.write_many([make_record(1, 5000)])
    assert committed() == 0
    clock.now = 1.1
    store.write_many([make_record(2, 5000)])
    assert committed() == 2
    for number in range(3, 12):
        store.write_many([make_record(number, 8 * MIB)])
    assert committed() == 10


class Quiet:
    """A tier that nobody calls any more; what its store gathers is committed by `turn`."""

    def __init__(self, store: Any, clock: Any) -> None:
        self.store, self.clock = store, clock
        self.settling = Settling("lmdb", store, clock)

    def write(self, number: int) -> None:
        self.store.write_many([make_record(number, 5000)])
        self.settling.note()

    def turn(self, now: float) -> int:
        """Let it be that late; return how many records are committed."""
        self.clock.now = now

        async def call(nothing: Any) -> list[Status]:
            return list(nothing([None]))

        async def settle() -> None:
            self.settling.settle(call)
            await asyncio.sleep(0)

        asyncio.run(settle())
        return len(self.store._ledger.page(b"", 100).names)


def committed_in_a_lull(opened: Any) -> list[int]:
    """Return what is committed at 1.1 s, and later, after a commit for want of slots at 0.8 s."""
    tier = Quiet(opened(256 * MIB, clock=opened.clock), opened.clock)
    tier.write(1)
    tier.clock.now = 0.8
    tier.store._ledger.commit(tier.store._ledger.pending)
    tier.write(2)
    return [tier.turn(1.1), tier.turn(1.7), tier.turn(1.9), tier.turn(9.0)]


def test_what_came_after_a_commit_is_committed_in_a_second_too(opened: Any) -> None:
    assert committed_in_a_lull(opened) == [1, 1, 2, 2]


def test_twin_if_only_the_first_counted_it_would_never_be(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = Settling.note

    def first(settling: Settling) -> None:
        note(settling)
        settling._last = 0.0

    monkeypatch.setattr(Settling, "note", first)
    assert committed_in_a_lull(opened) == [1, 1, 1, 1]


def test_what_came_first_waits_for_no_other(opened: Any) -> None:
    tier = Quiet(opened(256 * MIB, clock=opened.clock), opened.clock)
    tier.write(1)
    tier.clock.now = 0.9
    tier.write(2)
    assert [tier.turn(0.95), tier.turn(1.0), tier.turn(2.0)] == [0, 2, 2]
    assert tier.settling._changed is None


def test_a_write_whose_batch_is_being_committed_has_not_failed(opened: Any) -> None:
    syncing, written = threading.Event(), threading.Event()

    class Slow(FileIO):
        ledger: Any = None
        commits: threading.Thread | None = None

        def pwrite(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
            ledger = self.ledger
            if ledger and ledger.pending.operations:  # the first one, which is committed now
                self.commits = threading.Thread(target=ledger.commit, args=(ledger.pending,))
                self.commits.start()
                assert syncing.wait(20)
            return super().pwrite(descriptor, buffers, offset)

        def fdatasync(self, descriptor: int) -> None:
            syncing.set()
            assert not self.ledger or written.wait(20)
            super().fdatasync(descriptor)

    io = Slow()
    store = opened(io=io)
    io.ledger = store._ledger
    statuses = store.write_many([make_record(1, 5000), make_record(1, 5000, version=1)])
    written.set()
    io.commits.join()
    assert statuses == [OK, OK]


class LosingSync(FileIO):
    """A sync that fails once: what was written before it is lost, and the next one succeeds."""

    during: Any = None

    def fdatasync(self, descriptor: int) -> None:
        during, self.during = self.during, None
        if during:
            during()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fdatasync(descriptor)


def written_during_a_failed_sync(opened: Any) -> tuple[list[Status], list[Status]]:
    """Return what is said of a record that is synced, and of one that is written meanwhile."""
    io = LosingSync()
    store = opened(256 * MIB, durability="each", io=io)
    assert store.write_many([make_record(0, 5000)]) == [OK]
    said: list[list[Status]] = []

    def write(number: int) -> None:
        said.append(store.write_many([make_record(number, 5000)]))

    second = threading.Thread(target=write, args=(2,))

    def meanwhile() -> None:
        second.start()
        deadline = time.monotonic() + 20
        while make_record(2, 5000).header.id not in store._ledger.pending.operations:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    io.during = meanwhile
    first = store.write_many([make_record(1, 5000)])
    second.join()
    assert store.contains_many([make_record(0, 5000).header.id]) == [OK]
    assert store.write_many([make_record(3, 5000)]) == [OK]
    return first, said[0]


def test_what_was_written_during_a_failed_sync_is_not_acknowledged(opened: Any) -> None:
    failed = [Status.FAILED]
    assert written_during_a_failed_sync(opened) == (failed, failed)


def test_twin_the_next_sync_would_acknowledge_it(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "_withdraw_later", lambda *_: None)
    assert written_during_a_failed_sync(opened) == ([Status.FAILED], [OK])


def test_none_is_discarded_after_a_restart(
    opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = make_record(1, 5000)
    store = opened(durability="none")
    store.write_many([record])
    opened.pretend_killed(store)
    store = opened(durability="none")
    assert store.contains_many([record.header.id]) == [OK]
    opened.pretend_killed(store)
    monkeypatch.setattr(slab_recovery, "boot_id", lambda: b"another boot")
    store = opened()
    assert store.contains_many([record.header.id]) == [ABSENT]
    assert "before the machine restarted" in caplog.text


def test_none_closed_cleanly_survives_a_restart(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = make_record(1, 5000)
    store = opened(durability="none")
    store.write_many([record])
    store.close()
    monkeypatch.setattr(slab_recovery, "boot_id", lambda: b"another boot")
    assert opened().contains_many([record.header.id]) == [OK]


def test_none_can_become_each(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record(1, 5000)
    store = opened(durability="none")
    store.write_many([record])
    opened.pretend_killed(store)
    store = opened(durability="each")
    opened.pretend_killed(store)
    monkeypatch.setattr(slab_recovery, "boot_id", lambda: b"another boot")
    assert opened().contains_many([record.header.id]) == [OK]


def test_each_groups_concurrent_writers(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(64 * MIB, durability="each")
    commits: list[int] = []
    whole = Index.commit

    def slow(self: Index, operations: dict[bytes, Entry | None]) -> None:
        commits.append(len(operations))
        time.sleep(0.02)
        whole(self, operations)

    monkeypatch.setattr(Index, "commit", slow)
    statuses: list[Status] = []
    threads = [
        threading.Thread(target=lambda n=n: statuses.extend(store.write_many([make_record(n, 99)])))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [OK] * 8
    assert sum(commits) == 8
    assert len(commits) < 8


def test_scan_is_in_order_of_writing(opened: Any) -> None:
    store = opened(64 * MIB)
    order = list(range(700))
    random.Random(3).shuffle(order)
    for number in order:
        store.write_many([make_record(number, 10)])
    store.write_many([make_record(order[5], 10, version=1)])
    expected = [number for number in order if number != order[5]] + [order[5]]
    assert [header.depth for header in store.scan()] == expected
    store.close()
    store = opened(64 * MIB)
    assert [header.depth for header in store.scan()] == expected
    store.write_many([make_record(9999, 10)])
    assert [header.depth for header in store.scan()] == [*expected, 9999]


def test_writing_again_writes_nothing(opened: Any) -> None:
    class Counting(FileIO):
        writes = 0

        def pwrite(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
            self.writes += 1
            return super().pwrite(descriptor, buffers, offset)

    records = [make_record(number, 1000) for number in range(50)]
    store = opened()
    store.write_many(records)
    store.close()
    io = Counting()
    store = opened(io=io)
    before = io.writes
    assert store.write_many(records) == [OK] * 50
    assert io.writes == before


def test_full_index_is_unavailable_and_keeps_its_entries(tmp_path: Path) -> None:
    index = Index(tmp_path / "index", 40 * PAGE, synced=False)
    names = [number.to_bytes(38, "big") for number in range(500)]
    entry = Entry(1, 2, 3, bytes(256))
    with pytest.raises(Unavailable, match="full"):
        index.commit(dict.fromkeys(names, entry))
    kept = [found for found in index.find(names) if found]
    assert len(kept) > 100
    assert set(kept) == {entry}
    index.grow(400 * PAGE)
    index.commit(dict.fromkeys(names, entry))
    assert index.find(names) == [entry] * 500
    index.close()


def test_index_has_room_for_its_slots(tmp_path: Path) -> None:
    """With every slot in use, large batches of replacements leave the map far from full."""
    slots = 6000
    size = INDEX_FLOOR + slots * SLOT_CHARGE
    index = Index(tmp_path / "index", size, synced=False)
    choose = random.Random(5)
    names = [choose.randbytes(38) for _ in range(slots)]
    entry = Entry(1, 2, 3, bytes(256))
    index.commit(dict.fromkeys(names, entry))
    for _ in range(60):
        operations: dict[bytes, Entry | None] = {}
        for _ in range(600):
            at = choose.randrange(slots)
            operations[names[at]] = None
            names[at] = choose.randbytes(38)
            operations[names[at]] = entry
        index.commit(operations)
    assert (index._env.info()["last_pgno"] + 1) * PAGE < 0.9 * size
    index.close()
