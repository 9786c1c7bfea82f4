"""The Store contract as tests.

Whoever writes a Store subclasses `StoreSuite` in a test file::

    class TestMyStore(StoreSuite):
        def open_store(self) -> Store:
            return MyStore.open("somewhere new and empty", self.capacity, {})

What is asserted follows the capabilities that the store declares. pytest collects the subclass;
this module needs no pytest itself.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import ClassVar

from msgspec import structs

from kvtier.errors import StoreError
from kvtier.identity.record import PartName, RecordId
from kvtier.testing.records import aligned, fetch, is_exact, make_record
from kvtier.testing.store_deadlines import DeadlineTests
from kvtier.testing.store_versions import VersionTests
from kvtier.tiers.store import Read, Status, Store, Write

SIZES = (1, 255, 4095, 4096, 4097, 65536, 100_003, 1 << 20, 5_898_240, 6_000_001)
ABSENT = make_record(999_999, 1).header.id


class StoreSuite(DeadlineTests, VersionTests):
    """A conformance suite. Override `open_store`, and as much of the rest as applies.

    capacity: bytes that `open_store` gives to the store, 40 MiB at least.
    """

    capacity: ClassVar[int] = 64 << 20
    _store: Store | None = None

    # -------------------------------------------------------------------------------- to override

    def open_store(self) -> Store:
        """Open the store on a new and empty medium."""
        raise NotImplementedError

    def reopen(self) -> Store:
        """Open a store on the medium of the one that was just closed; for durable stores."""
        raise NotImplementedError

    def raw_corrupt(self, record: Write, how: str) -> bool:
        """Alter a record on the medium behind the store's back; say whether that was possible.

        how: ``header`` changes a byte of the header, ``payload`` one of the payload, ``truncate``
        cuts the end off.
        """
        del record, how
        return False

    # ------------------------------------------------------------------------------------ fixture

    @property
    def store(self) -> Store:
        """The store of this test, opened when first asked for."""
        if self._store is None:
            self._store = self.open_store()
        return self._store

    def teardown_method(self) -> None:
        """Close what the test opened."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def put(self, *records: Write) -> None:
        """Write records that must find room."""
        assert self.store.write_many(records) == [Status.OK] * len(records)

    def check(self, record: Write) -> None:
        """Check that a record is there and exact, or has left a store that may evict."""
        read, buffer = fetch(self.store, record.header.id, record.header.stored_bytes)
        if self.store.capabilities.self_evicting and read.status is Status.ABSENT:
            return
        assert read == Read(Status.OK, record.header)
        assert buffer == record.data[: len(buffer)]

    def check_absent(self, *names: RecordId) -> None:
        """Check that no verb finds these records."""
        gone = [Status.ABSENT] * len(names)
        assert self.store.contains_many(names) == gone
        reads = self.store.read_many(names, [aligned(4096) for _ in names])
        assert [read.status for read in reads] == gone
        assert not {header.id for header in self.store.scan()} & set(names)

    # -------------------------------------------------------------------------------------- shape

    def test_follows_the_protocol(self) -> None:
        """The store has every member, of a sensible value."""
        assert isinstance(self.store, Store)
        assert self.store.THREADS >= 1
        assert self.store.ALIGNMENT & (self.store.ALIGNMENT - 1) == 0
        assert self.store.footprint(10_000) >= 10_000
        for option in self.store.OPTIONS.values():
            assert option.help

    def test_takes_empty_batches(self) -> None:
        """A batch of nothing is nothing."""
        assert self.store.contains_many([]) == []
        assert self.store.read_many([], []) == []
        assert self.store.write_many([]) == []
        assert self.store.delete_many([]) == []
        assert list(self.store.scan()) == []

    def test_closes_twice(self) -> None:
        """Closing again does nothing."""
        self.put(make_record(1, 100))
        self.store.close()
        self.store.close()

    # ------------------------------------------------------------------------------ write and read

    def test_returns_what_was_written(self) -> None:
        """Every size comes back byte for byte, with its whole header."""
        for number, size in enumerate(SIZES):
            record = make_record(number, size, part=PartName(number, 1, 2))
            self.put(record)
            self.check(record)
            assert self.store.delete_many([record.header.id]) == [Status.OK]

    def test_keeps_many_sizes_at_once(self) -> None:
        """Records of different sizes do not touch each other."""
        records = [make_record(number, size) for number, size in enumerate(SIZES)]
        self.put(*records)
        for record in records:
            self.check(record)

    def test_absent_members_spoil_no_batch(self) -> None:
        """Statuses are per record, in the order that was asked for."""
        records = [make_record(number, 5000 + number) for number in range(4)]
        self.put(*records)
        names = [records[0].header.id, ABSENT, records[2].header.id, ABSENT]
        buffers = [aligned(8192) for _ in names]
        expected = [Status.OK, Status.ABSENT, Status.OK, Status.ABSENT]
        assert self.store.contains_many(names) == expected
        reads = self.store.read_many(names, buffers)
        assert [read.status for read in reads] == expected
        assert [read.header is None for read in reads] == [False, True, False, True]
        assert buffers[0][:5000] == records[0].data
        assert buffers[2][:5002] == records[2].data
        assert self.store.delete_many(names) == [*expected[:3], Status.ABSENT]

    def test_takes_any_buffer(self) -> None:
        """Aligned or not, exact or longer: the same bytes, and none outside the buffer."""
        for number, size in enumerate((1, 4096, 10_000, 131_072)):
            record = make_record(number, size)
            padded = -(-size // 4096) * 4096
            for start, length in ((0, size), (0, padded), (1, size), (3, size + 7), (4096, padded)):
                source = aligned(start + length + 64)
                source[start : start + size] = record.data
                view = source[start : start + length]
                self.put(Write(record.header, view))
                target = aligned(start + length + 64)
                (read,) = self.store.read_many([record.header.id], [target[start : start + length]])
                assert read == Read(Status.OK, record.header)
                assert target[start : start + size] == record.data
                assert not any(target[:start])
                assert not any(target[start + length :])
                assert self.store.delete_many([record.header.id]) == [Status.OK]

    def test_takes_read_only_data(self) -> None:
        """What is written is only read."""
        record = make_record(1, 12_345)
        self.put(Write(record.header, record.data.toreadonly()))
        self.check(record)

    def test_short_buffer_fails_alone(self) -> None:
        """A buffer that is too short gets FAILED; its neighbours are read."""
        records = [make_record(number, 9000) for number in range(3)]
        self.put(*records)
        buffers = [aligned(9000), aligned(8999), aligned(9000)]
        reads = self.store.read_many([r.header.id for r in records], buffers)
        assert [read.status for read in reads] == [Status.OK, Status.FAILED, Status.OK]

    def test_short_data_fails_alone(self) -> None:
        """A record with less data than its header says is not written; its neighbours are."""
        records = [make_record(number, 9000) for number in range(3)]
        records[1] = Write(records[1].header, records[1].data[:8999])
        assert self.store.write_many(records) == [Status.OK, Status.FAILED, Status.OK]
        self.check_absent(records[1].header.id)
        self.check(records[2])

    # ---------------------------------------------------------------------- replace, delete, scan

    def test_replaces(self) -> None:
        """Under a name only the last bytes are found, whatever the sizes."""
        for version, size in enumerate((5000, 5000, 70_000, 100, 5000)):
            record = make_record(1, size, version=version)
            self.put(record)
            self.check(record)
            assert list(self.store.scan()) == [record.header]

    def test_writes_again(self) -> None:
        """The same record again is OK, and there is still one."""
        record = make_record(1, 50_000)
        for _ in range(3):
            self.put(record)
        self.check(record)
        assert len(list(self.store.scan())) == 1

    def test_deletes(self) -> None:
        """What is deleted is gone for every verb, and can be written again."""
        records = [make_record(number, 5000) for number in range(3)]
        self.put(*records)
        gone = records[1].header.id
        assert self.store.delete_many([gone]) == [Status.OK]
        self.check_absent(gone)
        assert self.store.delete_many([gone]) == [Status.ABSENT]
        self.check(records[0])
        self.put(records[1])
        self.check(records[1])

    def test_scans_all(self) -> None:
        """Scan yields each header once, deletions and replacements considered."""
        records = [make_record(number, 100 + number) for number in range(60)]
        self.put(*records)
        names = [record.header.id for record in records]
        self.store.delete_many(names[:10])
        newer = make_record(20, 200, version=1)
        self.put(newer)
        expected = [record.header for record in records[10:]]
        expected[10] = newer.header
        found = list(self.store.scan())
        assert len(found) == len(expected)
        assert {header.id: header for header in found} == {h.id: h for h in expected}

    def test_namespaces_do_not_meet(self) -> None:
        """Records of two namespaces lie side by side, each with its own."""
        records = [make_record(1, 5000, namespace=bytes([n]) * 32) for n in range(4)]
        self.put(*records)
        for record in records:
            self.check(record)
        assert {header.namespace for header in self.store.scan()} == {
            record.header.namespace for record in records
        }

    def test_parts_do_not_meet(self) -> None:
        """The parts of one chunk are records of their own."""
        records = [make_record(1, 100 * (n + 1), part=PartName(n % 2, n // 2, 2)) for n in range(4)]
        self.put(*records)
        assert self.store.delete_many([records[0].header.id]) == [Status.OK]
        self.check_absent(records[0].header.id)
        for record in records[1:]:
            self.check(record)

    # ----------------------------------------------------------------------------------- capacity

    def test_full_and_again(self) -> None:
        """A bounded store answers FULL within its capacity, keeps what it has, and recovers."""
        if not self.store.capabilities.bounded:
            return
        size, kept = 1_000_000, list[Write]()
        for number in range(2 * self.capacity // size):
            record = make_record(number, size)
            (status,) = self.store.write_many([record])
            if status is Status.FULL:
                break
            assert status is Status.OK
            kept.append(record)
        else:
            raise AssertionError("twice the capacity was written, and it was never FULL")
        assert kept
        assert sum(self.store.footprint(size) for _ in kept) <= self.capacity
        for record in (kept[0], kept[-1]):
            self.check(record)
        assert self.store.delete_many([kept.pop(0).header.id]) == [Status.OK]
        newer = make_record(10_000, size)
        self.put(newer)
        self.check(newer)
        assert len(list(self.store.scan())) == len(kept) + 1

    def test_too_large_for_the_store(self) -> None:
        """What can never fit is FAILED, so that nobody evicts everything for it."""
        if not self.store.capabilities.bounded:
            return
        record = make_record(1, 1)
        size = self.capacity + 1
        header = structs.replace(record.header, raw_bytes=size, stored_bytes=size)
        large = Write(header, aligned(size))
        assert self.store.write_many([large]) == [Status.FAILED]
        self.check_absent(record.header.id)

    # --------------------------------------------------------------------------------- concurrency

    def test_eight_threads(self) -> None:
        """Reads among writes, replacements and deletions are exact or absent."""
        variants = [
            [make_record(number, 20_000 + 4096 * version, version=version) for version in range(3)]
            for number in range(12)
        ]
        store = self.store
        wrong: list[str] = []

        def work(seed: int) -> None:
            choose = random.Random(seed)
            for _ in range(60):
                record = choose.choice(choose.choice(variants))
                name = record.header.id
                verb = choose.choice(("write", "read", "read", "delete"))
                if verb == "write":
                    wrong.extend(_unexpected(store.write_many([record]), "OK FULL"))
                elif verb == "delete":
                    wrong.extend(_unexpected(store.delete_many([name]), "OK ABSENT"))
                else:
                    read, buffer = fetch(store, name, 20_000 + 3 * 4096)
                    wrong.extend(_unexpected([read.status], "OK ABSENT"))
                    if read.status is Status.OK and not is_exact(read, buffer):
                        wrong.append(f"thread {seed} read other bytes than {read.header} says")

        _in_threads(8, work)
        assert not wrong
        for header in list(self.store.scan()):
            read, buffer = fetch(self.store, header.id, header.stored_bytes)
            assert is_exact(read, buffer)

    # ----------------------------------------------------------------------------------- the medium

    def test_reopens(self) -> None:
        """A durable store has after a clean close what it had before, and room for more."""
        if not self.store.capabilities.durable:
            return
        records = [make_record(number, size) for number, size in enumerate(SIZES[:8])]
        self.put(*records)
        newer = make_record(2, 5000, version=1)
        self.put(newer)
        self.store.delete_many([records[0].header.id])
        self.store.close()
        self._store = self.reopen()
        self.check_absent(records[0].header.id)
        for record in (*records[3:], newer, records[1]):
            self.check(record)
        assert len(list(self.store.scan())) == len(records) - 1
        self.put(records[0])
        self.check(records[0])

    def test_other_header_is_corrupt(self) -> None:
        """A record whose header changed on the medium is not that record."""
        record = make_record(1, 50_000)
        self.put(record, make_record(2, 50_000))
        if not self.raw_corrupt(record, "header"):
            return
        read, _ = fetch(self.store, record.header.id, 50_000)
        assert read.status is Status.CORRUPT
        self.check(make_record(2, 50_000))

    def test_other_payload_is_found_out(self) -> None:
        """A record whose bytes changed on the medium fails, or fails its checksum."""
        record = make_record(1, 50_000)
        self.put(record)
        if not self.raw_corrupt(record, "payload"):
            return
        assert not is_exact(*fetch(self.store, record.header.id, 50_000))

    def test_cut_record_is_not_ok(self) -> None:
        """A record that lost its end is no record, and raises at most a StoreError."""
        record = make_record(1, 50_000)
        self.put(record)
        if not self.raw_corrupt(record, "truncate"):
            return
        try:
            read, _ = fetch(self.store, record.header.id, 50_000)
        except StoreError:
            return
        assert read.status is not Status.OK


def _unexpected(statuses: list[Status], allowed: str) -> list[str]:
    return [status.name for status in statuses if status.name not in allowed.split()]


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work(0) to work(count - 1) at once; raise the first exception of any."""
    raised: list[Exception] = []

    def run(number: int) -> None:
        try:
            work(number)
        except Exception as error:  # noqa: BLE001  (raised again below, in the test's thread)
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
