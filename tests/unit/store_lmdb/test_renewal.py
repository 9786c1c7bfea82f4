"""An index that is too large, or full, is written anew within the capacity while it is used."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from kvtier.storage_backends.slab import index_bytes_for
from kvtier.storage_backends.slab_directory import SlabDirectory
from kvtier.storage_backends.slab_files import SegmentFiles
from kvtier.storage_backends.slab_index import Index
from kvtier.storage_backends.slab_ledger import Ledger
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.testing.short_index import short_index
from kvtier.tiers.store import Status, Write

MIB = 1 << 20
OK, FULL, FAILED = Status.OK, Status.FULL, Status.FAILED
SMALL, LARGE = 10, 2 * MIB
CAPACITY = 32 * MIB


def index_bytes(opened: Any) -> int:
    return (opened.folder / "index.lmdb").stat().st_size


def exact(store: Any, records: list[Write]) -> bool:
    return all(is_exact(*fetch(store, one.header.id, one.header.stored_bytes)) for one in records)


def churned(store: Any) -> tuple[list[Write], list[Write]]:
    """Replace as many small records as there is room for by large ones; return what is left."""
    small = [make_record(number, SMALL) for number in range(4000)]
    said = [
        status for at in range(0, 4000, 250) for status in store.write_many(small[at : at + 250])
    ]
    small = small[: said.index(FULL)]
    large: list[Write] = []
    while len(small) > 40:
        record = make_record(5000 + len(large), LARGE)
        (status,) = store.write_many([record])
        if status is OK:
            large.append(record)
            continue
        assert status is FULL
        store.delete_many([one.header.id for one in small[:200]])
        del small[: min(200, len(small) - 20)]
    return small, large


class Sampled:
    """Looks every few milliseconds what the directory takes."""

    def __init__(self, opened: Any) -> None:
        self.most = 0
        self._opened = opened
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._done.is_set():
            self.most = max(self.most, self._opened.disk_bytes())
            time.sleep(0.001)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


@pytest.mark.parametrize("durability", ["none", "each"])
def test_an_index_that_churn_has_left_too_large_gives_its_bytes_back(
    opened: Any, durability: str
) -> None:
    store = opened(CAPACITY, durability=durability)
    with Sampled(opened) as sampled:
        small, large = churned(store)
    assert sampled.most <= CAPACITY
    assert index_bytes(opened) < 1.5 * index_bytes_for(store._ledger._slabs.slots)
    assert len(large) * LARGE > 0.8 * CAPACITY
    assert exact(store, [*small[20:], *large])
    assert not (opened.folder / "index.lmdb.tmp").exists()
    store.close()
    assert exact(opened(CAPACITY, durability=durability), [*small[20:], *large])


def test_twin_without_that_it_keeps_them(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "_renew", lambda *_: False)
    store = opened(CAPACITY, durability="none")
    churned(store)
    assert index_bytes(opened) > 1.8 * index_bytes_for(store._ledger._slabs.slots)


def full(store: Any) -> set[Status]:
    """Write records whose index entries need more than the map, one transaction each."""
    return {
        status
        for number in range(2600)
        for status in store.write_many([make_record(number, SMALL)])
    }


@pytest.fixture
def short() -> Iterator[None]:
    with short_index():
        yield


@pytest.mark.usefixtures("short")
def test_a_full_index_is_written_densely(opened: Any) -> None:
    store = opened(64 * MIB, durability="none")
    assert full(store) == {OK}
    assert len(list(store.scan())) == 2600


@pytest.mark.usefixtures("short")
def test_twin_without_that_writes_fail(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "_renew", lambda *_: False)
    assert FAILED in full(opened(64 * MIB, durability="none"))


def drafts(opened: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Fill an index on a disk that takes no new one; return how often one was tried."""
    tried: list[None] = []

    def refuses(*_: object, **__: object) -> None:
        tried.append(None)
        refused()

    store = opened(64 * MIB, durability="none", clock=opened.clock)
    with monkeypatch.context() as patched:
        patched.setattr("kvtier.storage_backends.slab_space.renewed", refuses)
        assert FAILED in full(store)
    opened.clock.now += 30.0
    assert store.write_many([make_record(9999, SMALL)]) == [OK], "it heals within half a minute"
    return len(tried)


@pytest.mark.usefixtures("short")
def test_a_disk_that_takes_no_new_index_is_not_asked_at_each_commit(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert drafts(opened, monkeypatch) == 1


@pytest.mark.usefixtures("short")
def test_twin_without_the_pause_it_is(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.storage_backends.slab_space._RETRY_SECONDS", 0.0)
    assert drafts(opened, monkeypatch) > 10


# ---- what it needs


def filled(opened: Any, count: int = 40, **options: Any) -> tuple[Any, list[Write]]:
    store = opened(16 * MIB, durability="each", **options)
    records = [make_record(number, 20_000) for number in range(count)]
    assert store.write_many(records) == [OK] * count
    return store, records


def test_without_room_for_two_nothing_is_done_until_records_have_gone(opened: Any) -> None:
    store = opened(4 * MIB, durability="each")
    records = [make_record(number, 20_000) for number in range(200)]
    records = records[: store.write_many(records).index(FULL)]
    before = (opened.folder / "index.lmdb").stat().st_ino
    with Sampled(opened) as sampled:
        assert not store._ledger.renew()
        assert (opened.folder / "index.lmdb").stat().st_ino == before
        assert store.delete_many([one.header.id for one in records[:20]]) == [OK] * 20
        assert store._ledger.renew()
    assert sampled.most <= 4 * MIB
    assert (opened.folder / "index.lmdb").stat().st_ino != before
    assert exact(store, records[20:])


def test_what_is_not_committed_stays_before_the_new_index(opened: Any) -> None:
    store = opened(16 * MIB, clock=opened.clock)  # it stands: no batch is due
    records = [make_record(number, 20_000) for number in range(20)]
    assert store.write_many(records[:10]) == [OK] * 10
    opened.clock.now += 2.0
    assert store.delete_many([records[0].header.id]) == [OK]
    assert store.write_many(records[10:]) == [OK] * 10
    assert store.delete_many([records[1].header.id, records[11].header.id]) == [OK] * 2
    assert store._ledger.renew()
    assert exact(store, [*records[2:11], *records[12:]])
    store.close()
    again = opened(16 * MIB)
    assert sorted(header.depth for header in again.scan()) == [*range(2, 11), *range(12, 20)]


def test_reading_goes_on_meanwhile(opened: Any) -> None:
    store, records = filled(opened)
    done = threading.Event()
    wrong: list[int] = []

    def read() -> None:
        while not done.is_set():
            wrong.extend(at for at, one in enumerate(records) if not exact(store, [one]))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    renewed = [store._ledger.renew() for _ in range(20)]
    done.set()
    for thread in threads:
        thread.join()
    assert renewed == [True] * 20
    assert wrong == []


# ---- what may fail


def refused(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Index, "extend"), (Index, "sync"), (Path, "replace"), (SlabDirectory, "remove_draft")],
)
def test_one_that_cannot_be_written_leaves_the_old_one(
    opened: Any, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    store, records = filled(opened)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, refused)
        assert not store._ledger.renew()
    assert exact(store, records)
    assert store.write_many([make_record(99, 20_000)]) == [OK]
    assert not (opened.folder / "index.lmdb.tmp").exists()
    assert store._ledger.renew()
    assert exact(store, records)


def test_its_name_reaches_the_disk_before_the_next_commit(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, records = filled(opened)
    assert store.delete_many([records[0].header.id]) == [OK]  # so that no segment is made
    with monkeypatch.context() as patched:
        patched.setattr(SlabDirectory, "sync", refused)
        assert store._ledger.renew()
        assert store.write_many([make_record(99, 20_000)]) == [FAILED]
    assert store.write_many([make_record(99, 20_000)]) == [OK]
    assert exact(store, records[1:])


def test_twin_without_that_note_it_would_be_acknowledged(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SegmentFiles, "renamed", lambda _: None)
    store, records = filled(opened)
    assert store.delete_many([records[0].header.id]) == [OK]  # so that no segment is made
    monkeypatch.setattr(SlabDirectory, "sync", refused)
    assert store._ledger.renew()
    assert store.write_many([make_record(0, 20_000, version=1)]) == [OK]


def test_an_index_that_cannot_grow_again_grows_with_the_next_segment(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, records = filled(opened)
    with monkeypatch.context() as patched:
        patched.setattr(Index, "grow", refused)
        patched.setattr("kvtier.storage_backends.slab_space.min", lambda *_: 300_000, raising=False)
        assert store._ledger.renew()
    assert store._ledger._index.size < store._ledger._slabs.index_bytes
    assert store.write_many([make_record(100, 500_000)]) == [OK]
    assert store._ledger._index.size >= index_bytes_for(0)
    assert exact(store, records)
