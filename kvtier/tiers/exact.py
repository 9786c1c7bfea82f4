"""What a Tier asks of a Store, and how it proves the answer: exact bytes, or a status."""

from __future__ import annotations

from typing import NamedTuple

from kvtier.identity.record import CODEC_RAW, Header, RecordId, checksum
from kvtier.tiers.store import Read, Status

__all__ = ["Fetched", "Wanted", "is_exact", "verify"]


class Wanted(NamedTuple):
    """One record to read: its name, what it must be, and the buffer to fill."""

    id: RecordId
    namespace: bytes
    raw_bytes: int
    into: memoryview


class Fetched(NamedTuple):
    """Outcome of a read. `raw_sum` is the checksum of the exact bytes when the status is OK."""

    status: Status
    raw_sum: bytes = b""


def verify(read: Read, wanted: Wanted) -> Fetched:
    """Turn a Store's read into exact bytes or a status."""
    if read.status is not Status.OK or read.header is None:
        return Fetched(Status.FAILED if read.status is Status.OK else read.status)
    if not is_exact(read.header, wanted):
        return Fetched(Status.CORRUPT)
    return Fetched(Status.OK, read.header.raw_sum)


def is_exact(header: Header, wanted: Wanted) -> bool:
    """Say whether a record is the wanted one, and its bytes are those that were written."""
    return (
        header.id == wanted.id
        and header.namespace == wanted.namespace
        and header.codec == CODEC_RAW
        and header.raw_bytes == header.stored_bytes == wanted.raw_bytes
        and checksum(wanted.into[: header.stored_bytes]) == header.stored_sum == header.raw_sum
    )
