"""The memory store: the Store contract, and that its copies are its own."""

from __future__ import annotations

from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.records import fetch, make_record
from kvtier.testing.store_suite import StoreSuite
from kvtier.tiers.store import Status, Store, Write


class TestBounded(StoreSuite):
    def open_store(self) -> Store:
        return MemoryStore.open("here", self.capacity, {})


class TestUnbounded(StoreSuite):
    def open_store(self) -> Store:
        return MemoryStore.open("here", None, {})

    def test_declares_no_bound(self) -> None:
        assert not self.store.capabilities.bounded


def test_keeps_a_copy() -> None:
    store = MemoryStore()
    record = make_record(1, 5000)
    lent = bytearray(record.data)
    assert store.write_many([Write(record.header, memoryview(lent))]) == [Status.OK]
    lent[:] = bytes(5000)
    assert fetch(store, record.header.id, 5000)[1] == record.data


def test_close_forgets() -> None:
    store = MemoryStore()
    record = make_record(1, 100)
    store.write_many([record])
    store.close()
    assert store.contains_many([record.header.id]) == [Status.ABSENT]


def test_replacing_does_not_count_twice() -> None:
    store = MemoryStore("here", 100_000)
    for version in range(20):
        record = make_record(1, 30_000, version=version)
        assert store.write_many([record]) == [Status.OK]
    assert store.write_many([make_record(2, 30_000)]) == [Status.OK]
