"""Records of one call whose slots follow each other: they are moved with one system call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from kvtier.errors import Corrupt
from kvtier.identity.record import Header, RecordId, name_in
from kvtier.storage_backends.slab import Segment, stride_for
from kvtier.storage_backends.slab_files import Placed
from kvtier.storage_backends.slab_index import Entry
from kvtier.storage_backends.slab_ledger import Ledger
from kvtier.tiers.store import Status

_PAGE: Final = 4096
_MOST_BYTES: Final = 4 << 20
"""Of a run, and 1,024 buffers: two for each record of two pages. Larger parts reach the device's
speed one by one, on several threads."""


def runs(placed: Iterable[Placed]) -> list[list[Placed]]:
    """Return the records in groups: one record, or several of adjacent slots, by slot."""
    found: list[list[Placed]] = []
    for one in sorted(placed, key=_where):
        if found and _follows(one, found[-1]):
            found[-1].append(one)
        else:
            found.append([one])
    return found


def _where(one: Placed) -> tuple[int, int]:
    return one.segment.number, one.slot


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
    if name_in(entry.head) != name or stride_for(header) != segment.stride:
        return Status.CORRUPT
    return header if len(into) >= header.stored_bytes else Status.FAILED


def unrepeated(names: Sequence[RecordId]) -> list[slice]:
    """Return the parts of a call, in order, in which each name stands once."""
    parts: list[slice] = []
    start = 0
    seen: set[RecordId] = set()
    for at, name in enumerate(names):
        if name in seen:
            parts.append(slice(start, at))
            start, seen = at, set()
        seen.add(name)
    return [*parts, slice(start, len(names))]


def in_order(ledger: Ledger) -> list[RecordId]:
    """Return the names of all records, oldest write first."""
    fresh = ledger.uncommitted()  # before the rest: meanwhile they may be committed
    names: list[RecordId] = []
    sequences = [np.empty(0, np.uint64)]
    after = b""
    while (page := ledger.page(after, _PAGE)).names:
        after = page.names[-1]
        names += page.names
        sequences.append(page.where["sequence"])
    order = np.argsort(np.concatenate(sequences), kind="stable").tolist()
    committed = [names[at] for at in order if names[at] not in fresh]
    return committed + sorted(fresh, key=lambda name: fresh[name].sequence)


def headers(names: Sequence[RecordId], found: Sequence[Entry | None]) -> Iterator[Header]:
    """Yield the header of each entry that is whole and its name's."""
    for name, entry in zip(names, found, strict=True):
        if entry is None:
            continue
        try:
            header = Header.unpack(entry.head)
        except Corrupt:
            continue
        if name_in(entry.head) == name:
            yield header
