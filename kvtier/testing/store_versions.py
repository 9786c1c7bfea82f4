"""What a Store says of records that a later kvtier wrote, as tests: a part of ``StoreSuite``."""

from __future__ import annotations

from typing import Protocol

from kvtier.testing.records import fetch, make_record, newer_record
from kvtier.tiers.store import CountingStore, Read, Status, Store, Write


class _Suite(Protocol):
    """What of the suite these tests use."""

    @property
    def store(self) -> Store: ...

    def put(self, *records: Write) -> None: ...

    def check(self, record: Write) -> None: ...


class VersionTests:
    """See the module."""

    def test_record_of_a_newer_version_is_told_from_a_spoilt_one(self: _Suite) -> None:
        """What a later kvtier wrote to a shared store is not there for this one, and stays."""
        if not self.store.capabilities.shared:
            return
        records = [make_record(1, 50_000), newer_record(2, 50_000)]
        names = [record.header.id for record in records]
        self.put(*records)
        read, _ = fetch(self.store, names[1], 50_000)
        assert read == Read(Status.NEWER)
        self.check(records[0])
        assert self.store.contains_many(names)[1] in (Status.OK, Status.NEWER)
        assert [header.id for header in self.store.scan()] == names[:1]
        if isinstance(self.store, CountingStore):
            counts = self.store.causes.counts()
            assert counts.get("newer version", 0) >= 1
            assert "corrupt" not in counts
