"""A Store that misbehaves on purpose, by a seeded stream: for tests of whatever stands above it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, Self, TypeVar

from kvtier.errors import MisuseError, Unavailable
from kvtier.identity.record import Header, RecordId
from kvtier.tiers.store import (
    Capabilities,
    Option,
    Read,
    Span,
    SpanStore,
    Status,
    Store,
    Write,
)

T = TypeVar("T")
_NOISE: Final = 0xEE


@dataclass(frozen=True, slots=True)
class Rates:
    """How probable each fault is: the first two for a call, the others for a record.

    unavailable: the medium does not answer. defect: the Store raises what no Store should, or
    answers for fewer records than it was asked for. failed: a record fails, untouched.
    lost_ack: a write or delete takes effect and is reported as failed. lost_write: a write is
    acknowledged and forgotten. absent: a record is not found this time. short: a read fills part
    of the buffer and says FAILED. wrong: it says OK and the bytes, or the header, are not those.
    """

    unavailable: float = 0.0
    defect: float = 0.0
    failed: float = 0.0
    lost_ack: float = 0.0
    lost_write: float = 0.0
    absent: float = 0.0
    short: float = 0.0
    wrong: float = 0.0

    @classmethod
    def all(cls, rate: float) -> Rates:
        """Return every fault at one rate."""
        return cls(rate, rate, rate, rate, rate, rate, rate, rate)


class FaultyStore:
    """Wraps an open Store. ``rates`` may be changed at any time; ``counts`` says what happened.

    Besides the faults it counts, as ``again``, writes of records that were there. peak_bytes: the
    most that was ever within.

    Calls must come one at a time, in an order that follows from the seed.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {}
    THREADS: ClassVar[int] = 2
    ALIGNMENT: ClassVar[int] = 1

    @classmethod
    def open(cls, location: str, capacity: int | None, options: Mapping[str, object]) -> Self:
        """Not a Store of its own: raises MisuseError."""
        del location, capacity, options
        raise MisuseError("wrap a Store that is open")

    def __init__(self, inner: Store, rng: random.Random, rates: Rates) -> None:
        self.inner = inner
        self.rates = rates
        self.counts: Counter[str] = Counter()
        self.peak_bytes = 0
        self._rng = rng
        self._last: Header | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Those of the Store within."""
        return self.inner.capabilities

    def footprint(self, stored_bytes: int) -> int:
        """Return that of the Store within."""
        return self.inner.footprint(stored_bytes)

    def contains_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store."""
        self._call()
        return self._cut([self._look(name) for name in ids])

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """See Store."""
        self._call()
        return self._cut([self._read(*one) for one in zip(ids, into, strict=True)])

    def write_many(self, records: Sequence[Write]) -> list[Status]:
        """See Store."""
        self._call()
        return self._cut([self._write(record) for record in records])

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store."""
        self._call()
        return self._cut([self._change(partial(self._delete, name)) for name in ids])

    def kept_bytes(self) -> int:
        """Return the bytes that all records within take from the capacity."""
        return sum(self.footprint(header.stored_bytes) for header in self.inner.scan())

    def scan(self) -> Iterator[Header]:
        """See Store. Without faults."""
        return self.inner.scan()

    def close(self) -> None:
        """See Store. Without faults."""
        self.inner.close()

    # ---- one record

    def _look(self, name: RecordId) -> Status:
        if self._hit("failed"):
            return Status.FAILED
        return Status.ABSENT if self._hit("absent") else self.inner.contains_many([name])[0]

    def _read(self, name: RecordId, into: memoryview) -> Read:
        if self._hit("failed"):
            return Read(Status.FAILED)
        if self._hit("absent"):
            return Read(Status.ABSENT)
        (read,) = self.inner.read_many([name], [into])
        if read.header is None:
            return read
        last, self._last = self._last, read.header
        half = read.header.stored_bytes // 2
        if self._hit("short"):
            _fill(into[half:])
            return Read(Status.FAILED)
        if self._hit("wrong"):
            return self._spoil(read.header, last, into)
        return read

    def _spoil(self, header: Header, last: Header | None, into: memoryview) -> Read:
        """Return a read that claims to be whole and is not."""
        kind = self._rng.randrange(3)
        if kind == 0 and last is not None and last.id != header.id:
            return Read(Status.OK, last)
        if kind == 1:
            _fill(into[header.stored_bytes // 2 :])
        else:
            into[self._rng.randrange(header.stored_bytes)] ^= 1 << self._rng.randrange(8)
        return Read(Status.OK, header)

    def _write(self, record: Write) -> Status:
        if self._hit("lost_write"):
            return Status.OK
        self.counts["again"] += self.inner.contains_many([record.header.id]) == [Status.OK]
        status = self._change(lambda: self.inner.write_many([record])[0])
        self.peak_bytes = max(self.peak_bytes, self.kept_bytes())
        return status

    def _delete(self, name: RecordId) -> Status:
        return self.inner.delete_many([name])[0]

    def _change(self, act: Callable[[], Status]) -> Status:
        if self._hit("failed"):
            return Status.FAILED
        status = act()
        return Status.FAILED if self._hit("lost_ack") else status

    # ---- chance

    def _call(self) -> None:
        if self._hit("unavailable"):
            raise Unavailable("injected")
        if self._hit("defect") and self._rng.random() < 0.5:
            raise ZeroDivisionError("injected")

    def _cut(self, answers: list[T]) -> list[T]:
        return answers[:-1] if self._hit("defect") else answers

    def _hit(self, fault: str) -> bool:
        """Say whether a fault happens now. Every rate draws, so that streams stay in step."""
        hit = self._rng.random() < float(getattr(self.rates, fault))
        self.counts[fault] += hit
        return hit


class FaultySpanStore(FaultyStore):
    """One around a Store that reads pieces of records; a piece is one record to its rates."""

    def read_spans(self, spans: Sequence[Span]) -> list[Status]:
        """See SpanStore."""
        self._call()
        return self._cut([self._read_span(span) for span in spans])

    def _read_span(self, span: Span) -> Status:
        if self._hit("failed"):
            return Status.FAILED
        if self._hit("absent"):
            return Status.ABSENT
        assert isinstance(self.inner, SpanStore)
        (status,) = self.inner.read_spans([span])
        if status is not Status.OK:
            return status
        if self._hit("short"):
            _fill(span.into[-1])
            return Status.FAILED
        if self._hit("wrong"):
            spoilt = span.into[self._rng.randrange(len(span.into))]
            spoilt[self._rng.randrange(len(spoilt))] ^= 1 << self._rng.randrange(8)
        return status


def faulty(inner: Store, rng: random.Random, rates: Rates) -> FaultyStore:
    """Wrap a Store in one that misbehaves, and reads pieces of records if that one does."""
    kind = FaultySpanStore if isinstance(inner, SpanStore) else FaultyStore
    return kind(inner, rng, rates)


def _fill(buffer: memoryview) -> None:
    buffer[:] = bytes([_NOISE]) * len(buffer)
