"""Records in an S3-compatible object store: one object a record, header first, then the bytes.

The name of an object is the prefix, the chunk key and the part, both in hex. Its first 256 bytes
are the record's header, so one ranged GET of them tells what the object is and whether it is
whole; no user metadata and no conditional PUT is needed. A PUT is atomic in S3: a record is
there whole or not at all.

A record is read in ranges of 4 MiB, or more where many are read at once. The first brings the
header; the others start as soon as it is there, each tied to the same version of the object by its
ETag.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from kvtier.clock import monotonic
from kvtier.errors import ConfigError, Corrupt, Newer, Unavailable, Unreachable
from kvtier.events import Causes, Reporter
from kvtier.identity.record import HEADER_BYTES, Header, RecordId
from kvtier.seams import Future
from kvtier.storage_backends.s3_batch import Batches
from kvtier.storage_backends.s3_errors import (
    ABSENT_CODES,
    CREDENTIALS,
    AbsentError,
    BrokenError,
    contents,
    error_code,
    explain,
    unreached,
    weather,
)
from kvtier.storage_backends.s3_get import Getter, bucket_url, sender_for
from kvtier.storage_backends.s3_medium import KEEPS_VERSIONS, S3Medium
from kvtier.storage_backends.s3_ranges import Ranges, following, stop, together
from kvtier.storage_backends.s3_send import Answer
from kvtier.storage_backends.s3_service import (
    PRICES,
    Place,
    Settings,
    connect,
    object_name,
    parse_addressing,
    parse_endpoint,
    parse_location,
    record_of,
)
from kvtier.storage_backends.scanning import headers_of
from kvtier.storage_backends.scratch import copy
from kvtier.tiers.store import Capabilities, Option, Read, Span, Status, Write
from kvtier.units import parse_timeout

A = TypeVar("A")

_IN_FLIGHT: Final = 16  # requests of this process at once, and connections kept
_LOOK_FIRST: Final = 1 << 20  # a PUT of more bytes is worth a look whether it is there already
_SCAN_BATCH: Final = 256  # headers asked for before the first of them is yielded

_TOTAL: Final = re.compile(r"bytes \d+-\d+/(\d+)")


class S3Store:
    """A Store on an S3-compatible service, shared by all that know the bucket.

    Credentials come from the usual AWS chain only: environment, profile, instance role. Over
    TLS the payload of a PUT is not signed, since its Tier checks every record by checksum; over
    plain http it is.

    Calls block on the network, on threads of one bounded pool; a call that the server leaves
    hanging ends after the timeouts, and none holds up the exit of the process.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = MappingProxyType(
        {
            "region": Option(str, "", "AWS region; empty: from the AWS environment or profile"),
            "endpoint": Option(parse_endpoint, "", "URL of an S3-compatible service; empty: AWS"),
            "addressing": Option(
                parse_addressing, "", "of buckets: path or virtual; empty: virtual on AWS"
            ),
            "connect_timeout": Option(parse_timeout, 2.0, "longest wait for a connection"),
            "read_timeout": Option(parse_timeout, 5.0, "longest silence of the server"),
        }
    )
    THREADS: ClassVar[int] = 16
    PROMISES: ClassVar[Capabilities] = Capabilities(
        durable=True, shared=True, ranged=True, deadlines=True
    )
    CREDENTIALS: ClassVar[str] = CREDENTIALS
    prices: ClassVar[Mapping[str, float]] = PRICES
    ALIGNMENT: ClassVar[int] = 1

    def __init__(self, client: Any, place: Place, settings: Settings) -> None:
        self.causes, self.requests = Causes(), Causes()
        self._client = client
        self._place = place
        self._sender = sender_for(
            bucket_url(client, place.bucket), settings, _IN_FLIGHT + self.THREADS
        )
        self._getter = Getter(client, place, self._sender)
        self._sender.serve(client)
        self._batches = Batches(f"s3://{place.bucket}", _IN_FLIGHT, self.causes)
        self._ranges = Ranges(_IN_FLIGHT)

    @classmethod
    def open(cls, location: str, capacity: int | None, options: Mapping[str, object]) -> S3Store:
        """Open ``//bucket/prefix`` and list one object to see that it answers. See Store."""
        del capacity  # its Tier counts
        place = parse_location(location)
        settings = Settings.read(options, cls.OPTIONS)
        bad: tuple[type[Exception], ...] = (*weather(), ValueError)
        client = store = None
        try:
            client = connect(settings)
            store = cls(client, place, settings)
            contents(client.list_objects_v2(Bucket=place.bucket, Prefix=place.prefix, MaxKeys=1))
            if store.medium().keeps_versions():
                Reporter(monotonic).warn(f"s3://{place.bucket}", KEEPS_VERSIONS)
            store._sender.counts = store.requests  # from now on
        except BaseException as error:
            for each in (store, client):
                if each is not None:
                    each.close()
            if not isinstance(error, bad):
                raise
            where = settings.endpoint or f"region {settings.region or 'of the AWS environment'}"
            kind = Unreachable if unreached(error) else ConfigError
            raise kind(f"cannot use s3://{place.bucket}: {explain(error, where)}") from error
        return store

    @property
    def capabilities(self) -> Capabilities:
        """Durable, shared and ranged; calls end by their Deadline. The Tier counts the bytes."""
        return self.PROMISES

    @staticmethod
    def footprint(stored_bytes: int) -> int:
        """Return the size of the object in bytes."""
        return HEADER_BYTES + stored_bytes

    def contains_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store. One ranged GET of a header each, in parallel."""
        found = self._settled(self._header, ids)
        # What is not whole is not there.
        return [Status.ABSENT if status is Status.CORRUPT else status for status in found]

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """See Store. Records and their ranges are read in parallel, straight into the buffers."""
        jobs = [_Job(name, buffer, []) for name, buffer in zip(ids, into, strict=True)]
        try:
            with self._ranges.reading(len(jobs)):
                results: list[Header | Exception] = self._batches.attempt(self._lead, jobs)
        finally:
            # The buffers are the caller's again only when every range has ended.
            errors = [self._batches.errors(job.others) for job in jobs]
        for place, late in enumerate(errors):
            for error in late:
                if not isinstance(error, weather()):
                    raise error
                results[place] = error
        return [
            Read(status, result if isinstance(result, Header) else None)
            for status, result in zip(self._batches.settle(results), results, strict=True)
        ]

    def read_spans(self, spans: Sequence[Span]) -> list[Status]:
        """See SpanStore. By ranged GETs in parallel, one for several that follow each other."""
        runs = following(spans)
        with self._ranges.reading(len(runs)):
            lots = self._ranges.lots(runs)
            results = self._batches.attempt(self._span, [together(lot) for lot in lots])
        statuses = self._batches.settle(results)
        return [
            Status.CORRUPT if found is False else status
            for lot, found, status in zip(lots, results, statuses, strict=True)
            for _ in lot
        ]

    def write_many(self, records: Sequence[Write]) -> list[Status]:
        """See Store. One after the other, so that ancestors are there before what needs them."""
        return self._settled(self._put, records, in_order=True)

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store. S3 does not say whether a deleted object was there, so it is asked first."""
        return self._settled(self._delete, ids)

    def scan(self) -> Iterator[Header]:
        """See Store. Oldest write first; holds about 90 bytes a record while it runs."""
        listed: list[bytes] = []
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._place.bucket, Prefix=self._place.prefix
            )
            for item in itertools.chain.from_iterable(map(contents, pages)):
                name = self._id_of(item["Key"])
                if name is not None and item["Size"] >= HEADER_BYTES:
                    written = int(item["LastModified"].timestamp() * 1e3)
                    listed.append(written.to_bytes(8, "big") + name)
        except weather() as error:
            raise Unavailable(f"s3://{self._place.bucket}: {explain(error)}") from error
        listed.sort()
        lots = (
            [entry[8:] for entry in listed[start : start + _SCAN_BATCH]]
            for start in range(0, len(listed), _SCAN_BATCH)
        )
        yield from headers_of(lots, self._headers, f"s3://{self._place.bucket}")

    def medium(self) -> S3Medium:
        """See Collectable."""
        read = (self._headers, self.read_spans)
        named = (self._id_of, self._key)
        return S3Medium(self._client, self._place, self.requests, *read, *named)

    def close(self) -> None:
        """Let calls under way finish, and end threads and connections. Idempotent."""
        self._batches.close()
        self._sender.close()
        self._client.close()

    def _settled(
        self, call: Callable[[A], object], items: Sequence[A], *, in_order: bool = False
    ) -> list[Status]:
        return self._batches.settle(self._batches.attempt(call, items, in_order=in_order))

    # ------------------------------------------------------------------------------- one record

    def _headers(self, ids: Sequence[RecordId]) -> list[Header | Status]:
        results = self._batches.attempt(self._header, ids)
        both = zip(results, self._batches.settle(results), strict=True)
        return [one if isinstance(one, Header) else status for one, status in both]

    def _header(self, name: RecordId) -> Header:
        header, answer = self._begin(name, HEADER_BYTES)
        answer.close()
        return header

    def _lead(self, job: _Job) -> Header:
        """Read header and first range of a record, and set its other ranges going."""
        name, into, others = job
        step = self._ranges.step(len(into))
        first = stop(0, len(into), step)
        header, answer = self._begin(name, HEADER_BYTES + first)
        with answer:
            size = header.stored_bytes
            if size > len(into):
                raise BrokenError(f"the buffer has {len(into)} bytes, the record {size}")
            start = first
            while start < size:
                rest = into[start : (end := stop(start, size, step))]
                others.append(self._batches.submit(self._follow, name, answer.etag, start, rest))
                start = end
            answer.fill(into[: min(first, size)])
        return header

    def _follow(self, name: RecordId, etag: str, start: int, into: memoryview) -> None:
        with self._get(name, HEADER_BYTES + start, len(into), etag) as answer:
            asked = f"bytes {HEADER_BYTES + start}-{HEADER_BYTES + start + len(into) - 1}/"
            if not answer.range.startswith(asked) or answer.etag != etag:
                raise BrokenError("a range is not the one that was asked for")
            answer.fill(into)

    def _span(self, span: Span) -> bool:
        """Read a span; False, and nothing is read, if the record is not of the length meant."""
        first, length = HEADER_BYTES + span.start, sum(map(len, span.into))
        try:
            answer = self._get(span.id, first, length)
        except Corrupt:  # it ends before that
            if span.total:
                return False
            raise
        with answer:
            total = _TOTAL.fullmatch(answer.range)
            if span.total and total and int(total[1]) != HEADER_BYTES + span.total:
                return False
            if not answer.range.startswith(f"bytes {first}-{first + length - 1}/"):
                if total:
                    raise Corrupt("the object is shorter than its name says")
                raise BrokenError("a range is not the one that was asked for")
            answer.spread(span.into)
        return True

    def _begin(self, name: RecordId, length: int) -> tuple[Header, Answer]:
        """Ask for the first `length` bytes of an object and read its header off them.

        The caller closes the answer. Raises Corrupt for an object that is not the whole record
        of that name.
        """
        answer = self._get(name, 0, length)
        try:
            return self._checked(name, answer), answer
        except BaseException:
            answer.close()
            raise

    def _checked(self, name: RecordId, answer: Answer) -> Header:
        total = _TOTAL.fullmatch(answer.range)
        if total is None:  # an answer to some other question, an error in a 200 perhaps
            raise BrokenError("the server did not answer with the range that was asked for")
        head = bytearray(min(HEADER_BYTES, int(total[1])))
        answer.fill(memoryview(head))
        header = Header.unpack(memoryview(head))
        if header.id != name:
            raise Corrupt("another record lies under that name")
        if int(total[1]) != HEADER_BYTES + header.stored_bytes:
            raise Corrupt("the object has not the length that its header says")
        return header

    def _get(self, name: RecordId, start: int, length: int, etag: str = "") -> Answer:
        try:
            return self._getter.get(object_name(name), start, length, etag)
        except weather() as error:
            if error_code(error) in ABSENT_CODES:
                raise AbsentError from None
            if error_code(error) == "InvalidRange":
                raise Corrupt("the object ends before that range") from None
            raise

    def _put(self, record: Write) -> None:
        header, data = record
        size = header.stored_bytes
        if len(data) < size:
            raise BrokenError(f"there are {len(data)} bytes for a record of {size}")
        if size > _LOOK_FIRST and self._has(header):
            return
        # One buffer and one send: a body in two parts would cost a copy per 16 KiB under the GIL.
        body = bytearray(HEADER_BYTES + size)
        body[:HEADER_BYTES] = header.pack()
        copy(memoryview(body)[HEADER_BYTES:], data[:size])
        self._client.put_object(**self._object(header.id), Body=body)

    def _has(self, header: Header) -> bool:
        """Say whether that very record is there. Raises Newer for one that is to stay as it is."""
        try:
            return self._header(header.id) == header
        except Newer:
            raise
        except (Corrupt, AbsentError):
            return False

    def _delete(self, name: RecordId) -> None:
        try:
            self._client.head_object(**self._object(name))
        except weather() as error:
            if error_code(error) in ABSENT_CODES:
                raise AbsentError from None
            raise
        self._client.delete_object(**self._object(name))

    def _object(self, name: RecordId) -> dict[str, str]:
        return {"Bucket": self._place.bucket, "Key": self._key(name)}

    def _key(self, name: RecordId) -> str:
        return self._place.prefix + object_name(name)

    def _id_of(self, key: str) -> RecordId | None:
        return record_of(key.removeprefix(self._place.prefix))


class _Job(NamedTuple):
    """A record to read, and the ranges of it that follow the first."""

    name: RecordId
    into: memoryview
    others: list[Future[None]]
