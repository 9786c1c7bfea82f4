"""Records of one call whose slots follow each other: they are moved with one system call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kvtier.errors import Corrupt
from kvtier.identity.record import Header, RecordId
from kvtier.storage_backends.slab import Segment, stride_for
from kvtier.storage_backends.slab_index import Entry
from kvtier.tiers.store import Status, Write

__all__ = ["Placed", "headers", "readable", "runs", "unrepeated"]

_MOST_BYTES: Final = 2 << 20
"""Of a run. Larger parts reach the device's speed one by one, on several threads."""


class Placed(NamedTuple):
    """A record's place in a call, its slot, and its header as it lies on the disk."""

    at: int
    segment: Segment
    slot: int
    head: bytes


def runs(placed: Iterable[Placed]) -> Iterator[list[Placed]]:
    """Yield the records in groups: one record, or several of adjacent slots, by slot."""
    run: list[Placed] = []
    for one in sorted(placed, key=lambda one: (one.segment.number, one.slot)):
        if run and not _follows(one, run):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def _follows(one: Placed, run: Sequence[Placed]) -> bool:
    last = run[-1]
    adjacent = one.segment is last.segment and one.slot == last.slot + 1
    return adjacent and (len(run) + 1) * one.segment.stride <= _MOST_BYTES


def readable(name: RecordId, segment: Segment, entry: Entry, into: memoryview) -> Header | Status:
    """Return the header that an entry holds, or why its record cannot be read."""
    try:
        header = Header.unpack(entry.head)
    except Corrupt:
        return Status.CORRUPT
    if header.id != name or stride_for(header) != segment.stride:
        return Status.CORRUPT
    return header if len(into) >= header.stored_bytes else Status.FAILED


def unrepeated(records: Sequence[Write]) -> Iterator[Sequence[Write]]:
    """Yield the records in order, in lots in which each name stands once."""
    start = 0
    names: set[RecordId] = set()
    for at, record in enumerate(records):
        name = record.header.id
        if name in names:
            yield records[start:at]
            start, names = at, set()
        names.add(name)
    yield records[start:]


def headers(names: Sequence[RecordId], found: Sequence[Entry | None]) -> Iterator[Header]:
    """Yield the header of each entry that is whole and its name's."""
    for name, entry in zip(names, found, strict=True):
        if entry is None:
            continue
        try:
            header = Header.unpack(entry.head)
        except Corrupt:
            continue
        if header.id == name:
            yield header
