"""The Store contract: six verbs over records, batched, synchronous, without policy.

A Store keeps records and nothing else: it does not choose what to keep, does not retry for
ever, does not hash payloads. Its Tier above it budgets, evicts, verifies checksums and bounds
the time. Whoever writes a Store passes ``kvtier.testing.StoreSuite``.

Rules, each of which the suite tests:

* Per record a Status; one bad record of a batch never spoils the others.
* ``Unavailable`` is raised only when the medium as a whole does not answer.
* Buffers are filled, never returned. After anything but OK a buffer's content means nothing.
* A record is visible to ``contains_many``, ``read_many`` and ``scan`` only once it is whole, and
  under a name only the bytes that were last written whole under that name are ever OK.
* Every call may be made from several threads at once.
* A Store that says so begins nothing once the Deadline of the batch is over, which
  ``kvtier.deadline.current`` returns, and ends by then what it has begun, as far as its medium lets
  it; what was not done is FAILED.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, Self, runtime_checkable

from kvtier.errors import Corrupt, Newer
from kvtier.events import Causes
from kvtier.identity.record import Header, RecordId


class Status(enum.Enum):
    """What became of one record of a batch."""

    OK = "ok"
    ABSENT = "absent"
    CORRUPT = "corrupt"  # there is something under that name, and it is not that record
    NEWER = "newer"  # there is something of a version that this kvtier does not read yet
    FAILED = "failed"  # an error or a short count; the medium may heal
    FULL = "full"  # no room: evict something, then write again


def unusable(error: Corrupt) -> Status:
    """Return the status that stands for what is no record to this kvtier."""
    return Status.NEWER if isinstance(error, Newer) else Status.CORRUPT


class Read(NamedTuple):
    """Outcome of one read. `header` is there exactly when the status is OK."""

    status: Status
    header: Header | None = None


class Write(NamedTuple):
    """One record to write: `data` holds at least `header.stored_bytes`; the rest is padding.

    Writing a name that exists replaces it, or keeps it when its stored checksum is the same.
    """

    header: Header
    data: memoryview


class Span(NamedTuple):
    """A piece of a record to read: from which of its stored bytes on, into which buffers in turn.

    start: its header is before them, from ``-HEADER_BYTES`` on.

    into: writable, contiguous, format "B"; their lengths together are the length of the piece.
    total: of the stored bytes of the record that is meant; 0 for one of any length.
    """

    id: RecordId
    start: int
    into: Sequence[memoryview]
    total: int = 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a Store promises; the suite asserts accordingly.

    durable: survives the process. shared: other hosts see it. self_evicting: records may vanish
    by themselves. conditional_put: writes only if absent, atomically. ranged: reads part of a
    record. bounded: holds its own capacity in bytes and answers FULL; otherwise the Tier counts.
    deadlines: a call looks at the Deadline of its batch.
    overhead: bytes of the capacity that it takes for itself, besides the records' footprints.
    """

    durable: bool = False
    shared: bool = False
    self_evicting: bool = False
    conditional_put: bool = False
    ranged: bool = False
    bounded: bool = False
    deadlines: bool = False
    overhead: int = 0


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a tier's URL: how its text is read (raises ConfigError), and its default."""

    parse: Callable[[str], object]
    default: object
    help: str


@runtime_checkable
class Store(Protocol):
    """A medium that keeps records.

    OPTIONS: the URL options besides ``capacity``.
    THREADS: how many calls its Tier should have in flight.
    ALIGNMENT: the address and length alignment at which buffers are used without a copy.
    One that needs a secret may have CREDENTIALS: how that is given, for who puts it in a URL.
    """

    OPTIONS: ClassVar[Mapping[str, Option]]
    THREADS: ClassVar[int]
    ALIGNMENT: ClassVar[int]

    @classmethod
    def open(cls, location: str, capacity: int | None, options: Mapping[str, object]) -> Self:
        """Open the medium at `location`, the part of the URL after ``scheme:``.

        capacity: bytes, None for unbounded. options: a value for each of OPTIONS.
        Blocks. Raises ConfigError with cause and remedy when it cannot be used; Unreachable, which
        is one, where the medium does not answer: see LateStore.
        """
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What this Store promises."""
        ...

    def footprint(self, stored_bytes: int) -> int:
        """Return the bytes that a record of this payload takes from the capacity."""
        ...

    def contains_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """Say for each record OK, ABSENT or FAILED; NEWER where its header was looked at."""
        ...

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """Fill each buffer with the stored bytes of a record.

        into: writable, contiguous, format "B"; a buffer shorter than the record gives FAILED.
        """
        ...

    def write_many(self, records: Sequence[Write]) -> list[Status]:
        """Write records in order: OK, FULL or FAILED for each."""
        ...

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """Remove records: OK, ABSENT or FAILED for each."""
        ...

    def scan(self) -> Iterator[Header]:
        """Yield the header of each whole record, oldest access or write first where known.

        Raises Unavailable, at the end at the latest, where some could not be read.
        """
        ...

    def close(self) -> None:
        """Make durable what was promised, and let the medium go. Idempotent."""
        ...


@runtime_checkable
class CountingStore(Store, Protocol):
    """A Store that counts, in a few words of cause, what went wrong; its Tier makes it a metric."""

    causes: Causes


@runtime_checkable
class EncodedStore(Store, Protocol):
    """A Store in which what a codec left of a record takes other room than raw bytes do."""

    def encoded_footprint(self, stored_bytes: int) -> int:
        """Return the bytes that an encoded record of this payload takes from the capacity."""
        ...


class LateStore(Store, Protocol):
    """A Store of which enough is known beforehand: its Tier begins without it if it must.

    Where ``open`` raises Unreachable it is tried again, until it answers.
    PROMISES: its capabilities, whatever it finds when it is opened.
    """

    PROMISES: ClassVar[Capabilities]

    @staticmethod
    def footprint(stored_bytes: int) -> int:
        """See Store."""
        ...


@runtime_checkable
class PaidStore(Store, Protocol):
    """A Store whose service takes money by the request, and counts them, by kind.

    prices: US dollars of one request of each kind.
    """

    requests: Causes
    prices: ClassVar[Mapping[str, float]]


@runtime_checkable
class SpanStore(Store, Protocol):
    """A Store that reads pieces of records: if it is shared, its Tier packs small parts there."""

    def read_spans(self, spans: Sequence[Span]) -> list[Status]:
        """Fill the buffers of each span: OK, ABSENT, CORRUPT (it is shorter) or FAILED.

        A record that has not the `total` of its span is CORRUPT, too, but that is no fault to
        count, and of its bytes as few are read as can be. The header of the record is not looked
        at: whoever asks proves what is in the span.
        """
        ...
