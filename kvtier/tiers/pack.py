"""Packs: runs of small parts of one chain as one record, so that a request moves megabytes.

A pack holds 2, 4, … 128 parts of consecutive chunks. The run begins at a multiple of its length,
and its cell, the longest one, is about 16 MiB. Its name is that of its last part with the length
in the three high bits of the component: as keys are chained, that name says every byte of it, so
packs are never rewritten, and hosts that write the same run write the same object.

Payload of a pack, version 1::

    the chunk keys of its parts, 32 bytes each
    then for each part its record: header (256 bytes), stored bytes

All parts of a pack have one stored length, so that a reader that knows the name computes where
each one lies, and reads any run of them by one range, each with the header that proves it. A pack
of another version has another codec number, and is passed over.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvtier.identity.record import (
    HEADER_BYTES,
    KEY_BYTES,
    Header,
    Part,
    RecordId,
    checksum,
    split_record_id,
)
from kvtier.tiers.store import Write

__all__ = [
    "CELL_BYTES",
    "CODEC_PACK",
    "LONGEST",
    "Run",
    "cut",
    "longest_order",
    "member_at",
    "members_bytes",
    "order_of",
    "pack",
    "pack_id",
    "runs_over",
    "unpacked_id",
]

CODEC_PACK: Final = 0x0101
"""The codec of a pack of version 1 in its record's header."""

CELL_BYTES: Final = 16 << 20
"""A run is as long as fits these: the client's CPU a byte halves from 2 to 16 MiB an object."""

LONGEST: Final = 7
"""The order of the longest run: 128 parts, as many as are written in one batch."""

_ALONE_BYTES: Final = 8 << 20  # from here on a part is an object of its own
_COMPONENT: Final = struct.Struct("<H")
_SHIFT: Final = 13  # of the order within the component, of which a geometry has few
_MASK: Final = (1 << _SHIFT) - 1


class Run(NamedTuple):
    """The parts of the chunks [start, start + 2**order) of a chain, order 0 for a part alone."""

    start: int
    order: int

    @property
    def stop(self) -> int:
        """The chunk after its last."""
        return self.start + (1 << self.order)


def longest_order(nbytes: int) -> int:
    """Return the order of the cell for parts of that many stored bytes; 0 for no packing."""
    if not 0 < nbytes < _ALONE_BYTES:
        return 0
    return min((CELL_BYTES // nbytes).bit_length() - 1, LONGEST)


def cut(start: int, stop: int, most: int) -> Iterator[Run]:
    """Yield the fewest runs, each at a multiple of its length, that make up [start, stop).

    most: the order of the longest.
    """
    while start < stop:
        order = min((stop - start).bit_length() - 1, most)
        if start:
            order = min(order, (start & -start).bit_length() - 1)
        yield Run(start, order)
        start += 1 << order


def pack_id(last: RecordId, order: int) -> RecordId:
    """Return the name of the run of `2**order` parts that ends with the part `last`."""
    (component,) = _COMPONENT.unpack_from(last, KEY_BYTES)
    tail = last[KEY_BYTES + _COMPONENT.size :]
    return last[:KEY_BYTES] + _COMPONENT.pack(component & _MASK | order << _SHIFT) + tail


def order_of(name: RecordId) -> int:
    """Return the order of the run that a name stands for: 0 for a part alone."""
    return int(_COMPONENT.unpack_from(name, KEY_BYTES)[0]) >> _SHIFT


def unpacked_id(name: RecordId) -> RecordId:
    """Return the name of the last part of a run."""
    return pack_id(name, 0)


def member_at(index: int, order: int, nbytes: int) -> int:
    """Return where in the payload the record of a part begins: its header, then its bytes."""
    return (KEY_BYTES << order) + index * (HEADER_BYTES + nbytes)


def members_bytes(order: int, nbytes: int) -> int:
    """Return the length of the payload of a pack of parts of so many stored bytes."""
    return member_at(1 << order, order, nbytes)


def pack(records: Sequence[Write], order: int) -> Write:
    """Return the record that holds ``2**order`` records of a chain, in a buffer of its own."""
    first, last = records[0].header, records[-1].header
    nbytes = first.stored_bytes
    payload = bytearray(members_bytes(order, nbytes))
    into = np.frombuffer(payload, np.uint8)
    for index, (header, data) in enumerate(records):
        payload[KEY_BYTES * index : KEY_BYTES * (index + 1)] = header.key
        at = member_at(index, order, nbytes)
        payload[at : at + HEADER_BYTES] = header.pack()
        at += HEADER_BYTES
        np.copyto(into[at : at + nbytes], np.frombuffer(data[:nbytes], np.uint8))
    whole = memoryview(payload)
    total = checksum(whole)
    key, part = split_record_id(pack_id(last.id, order))
    header = Header(
        namespace=first.namespace,
        key=key,
        parent=first.parent,
        depth=first.depth,
        part=Part(*part),
        raw_bytes=len(whole),
        stored_bytes=len(whole),
        raw_sum=total,
        stored_sum=total,
        codec=CODEC_PACK,
    )
    return Write(header, whole)


def runs_over(chunk: int, stop: int, most: int) -> list[Run]:
    """Return the runs in which a chunk may lie and that end before `stop`, the longest first.

    most: the order of the longest.
    """
    runs = [Run(chunk >> order << order, order) for order in range(most, -1, -1)]
    return [run for run in runs if run.stop <= stop]
