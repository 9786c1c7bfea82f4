"""What a Store does about Deadlines, as tests: a part of ``StoreSuite``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvtier.clock import monotonic
from kvtier.deadline import Deadline, under
from kvtier.errors import Unavailable
from kvtier.identity.record import RecordId
from kvtier.testing.records import aligned, make_record
from kvtier.tiers.store import Span, SpanStore, Status, Store, Write


class _Suite(Protocol):
    """What of the suite these tests use."""

    @property
    def store(self) -> Store: ...

    def put(self, *records: Write) -> None: ...

    def check(self, record: Write) -> None: ...

    def check_absent(self, *names: RecordId) -> None: ...


class DeadlineTests:
    """See the module."""

    def test_begins_nothing_after_its_deadline(self: _Suite) -> None:
        """Once the Deadline is over nothing is read, written or deleted, and nothing raises else.

        A Store that does not heed Deadlines must not mind one.
        """
        heeds = self.store.capabilities.deadlines
        there, new = make_record(1, 50_000), make_record(2, 50_000)
        self.put(there)
        calls: list[Callable[[], list[Status]]] = [
            lambda: self.store.contains_many([there.header.id, make_record(3, 1).header.id]),
            lambda: [self.store.read_many([there.header.id], [aligned(50_000)])[0].status],
            lambda: self.store.write_many([new]),
            lambda: self.store.delete_many([there.header.id]),
        ]
        if isinstance(self.store, SpanStore):
            store, span = self.store, Span(there.header.id, 0, [aligned(10)])
            calls.append(lambda: store.read_spans([span]))
        for call in calls if heeds else calls[:3]:
            with under(Deadline(monotonic() - 1.0)):
                try:
                    said = call()
                except Unavailable:
                    said = [Status.FAILED]
            assert not heeds or set(said) == {Status.FAILED}
        self.check(there)
        if heeds:
            self.check_absent(new.header.id)

    def test_a_deadline_that_is_far_changes_nothing(self: _Suite) -> None:
        """Nor does one that does not matter any more: threads and connections are as before."""
        record = make_record(1, 1 << 20)
        with under(Deadline(monotonic() + 30.0)):
            self.put(record)
            self.check(record)
        self.check(record)
        with under(Deadline(monotonic() + 30.0)):
            assert self.store.delete_many([record.header.id]) == [Status.OK]
        self.check_absent(record.header.id)
