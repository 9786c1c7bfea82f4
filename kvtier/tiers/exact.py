"""What a Tier asks of a Store, and how it proves the answer: exact bytes, or a status."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from kvtier.codecs.known import KNOWN
from kvtier.errors import Unavailable
from kvtier.identity.record import CODEC_RAW, Header, RecordId, checksum, codec_name
from kvtier.tiers.store import Read, Status

A = TypeVar("A")
T = TypeVar("T")


class Wanted(NamedTuple):
    """One record to read: its name, what it must be, and the buffer to fill."""

    id: RecordId
    namespace: bytes
    raw_bytes: int
    into: memoryview


class Fetched(NamedTuple):
    """Outcome of a read. `raw_sum` is the checksum of the exact bytes when the status is OK.

    unknown: what the record is CORRUPT for to this kvtier alone: its codec, which is another's.
    decoded: a codec made the bytes of fewer.
    late: it failed as the time was over, which says nothing of the record.
    """

    status: Status
    raw_sum: bytes = b""
    unknown: str = ""
    decoded: bool = False
    late: bool = False


def verify(read: Read, wanted: Wanted) -> Fetched:
    """Turn a Store's read into exact bytes or a status. Blocks while a codec decodes."""
    header = read.header
    if read.status is not Status.OK or header is None:
        return Fetched(Status.FAILED if read.status is Status.OK else read.status)
    if not is_known(header):
        return Fetched(Status.CORRUPT, unknown=codec_name(header.codec))
    if not is_exact(header, wanted):
        return Fetched(Status.CORRUPT)
    return Fetched(Status.OK, header.raw_sum, decoded=header.codec != CODEC_RAW)


def is_known(header: Header) -> bool:
    """Say whether the bytes of a record can be told from their stored form."""
    return header.codec in KNOWN


def is_exact(header: Header, wanted: Wanted) -> bool:
    """Say whether a record is the wanted one, and make its exact bytes of the stored ones.

    No byte of the stored ones is looked at before their checksum says that they are what was
    written. How many bytes a codec makes of them was known before: those that are wanted.
    """
    if (
        header.id != wanted.id
        or header.namespace != wanted.namespace
        or header.raw_bytes != wanted.raw_bytes
        or header.stored_bytes > header.raw_bytes
        or not sums_to(wanted.into[: header.stored_bytes], header.stored_sum)
    ):
        return False
    if header.codec == CODEC_RAW:  # they are in their place already
        return header.stored_bytes == header.raw_bytes and header.stored_sum == header.raw_sum
    stored, raw = wanted.into[: header.stored_bytes], wanted.into[: header.raw_bytes]
    return KNOWN[header.codec].decode(stored, raw) and sums_to(raw, header.raw_sum)


def sums_to(data: memoryview, total: bytes) -> bool:
    """Say whether bytes have that checksum."""
    return checksum(data) == total


def guarded(call: Callable[[list[A]], list[T]], items: list[A]) -> list[T]:
    """Call a Store, on a thread of the pool. Whatever it raises becomes one kind of error.

    A plug-in may raise what an event loop takes for its own, such as CancelledError or SystemExit.
    """
    try:
        out = call(items)
        count = len(out)
    except BaseException as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error
    if count != len(items):
        raise Unavailable(f"the store gave {count} answers for {len(items)} records")
    return out
