"""Packs: runs of small parts of one chain as one record, so that a request moves megabytes.

A pack holds 2, 4, … 128 parts of consecutive chunks. The run begins at a multiple of its length,
and its cell, the longest one, is about 16 MiB. Its name is that of its last part with the length
in the three high bits of the component: as keys are chained, that name says every byte of it, so
packs are never rewritten, and hosts that write the same run write the same object.

Payload of a pack, version 1::

    the chunk keys of its parts, 32 bytes each
    then for each part its record: header (256 bytes), stored bytes

All parts of such a pack have one stored length, so that a reader that knows the name computes
where each one lies, and reads any run of them by one range, each with the header that proves it.

Where a codec encoded some of its parts, a pack is of version 2, under the same name::

    the chunk keys of its parts, 32 bytes each
    their stored lengths, u32 little-endian each
    then for each part its record: header (256 bytes), stored bytes

Which of both it is, its own header says by the codec number, and its 33rd bytes say too: version 1
has the magic of a header there, which is no length. So a reader that looked for parts where they
are not reads the beginning of the pack, and then knows. A pack of another version has another
number, and is passed over.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvtier.errors import Corrupt, Newer
from kvtier.identity.record import (
    CODEC_RAW,
    HEADER_BYTES,
    KEY_BYTES,
    Header,
    PartName,
    RecordId,
    checksum,
    split_record_id,
)
from kvtier.tiers.store import Write

CODEC_PACK: Final = 0x0101
"""The codec of a pack of version 1 in its record's header."""

CODEC_SIZED_PACK: Final = 0x0102
"""The same of version 2."""

CELL_BYTES: Final = 16 << 20
"""A run is as long as fits these: the client's CPU a byte halves from 2 to 16 MiB an object."""

LONGEST: Final = 7
"""The order of the longest run: 128 parts, as many as are written in one batch."""

_ALONE_BYTES: Final = 8 << 20  # from here on a part is an object of its own
_LENGTH_BYTES: Final = 4
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


def pair_bytes(nbytes: int) -> int:
    """Return the length of the longest payload of a pack of two such parts."""
    return head_bytes(1) + 2 * (HEADER_BYTES + nbytes)


def sized_at(index: int, order: int, lengths: Sequence[int]) -> int:
    """Return the same of a pack of version 2, whose parts have these stored lengths."""
    return head_bytes(order) + HEADER_BYTES * index + sum(lengths[:index])


def head_bytes(order: int) -> int:
    """Return where the records of a pack of version 2 begin."""
    return KEY_BYTES + _LENGTH_BYTES << order


def lengths_in(head: bytes, order: int) -> tuple[int, ...]:
    """Return the lengths in the first ``head_bytes`` of a pack; none if it is of version 1.

    They are what somebody wrote there.
    """
    found = struct.unpack_from(f"<{1 << order}I", head, KEY_BYTES << order)
    return () if max(found) >= _ALONE_BYTES else found


def is_newer(head: memoryview) -> bool:
    """Say whether the header of a pack's own record says that it is of a later version."""
    try:
        codec = Header.unpack(head).codec
    except Newer:
        return True
    except Corrupt:
        return False
    return codec >> 8 == CODEC_PACK >> 8 and codec > CODEC_SIZED_PACK


def pack(records: Sequence[Write], order: int) -> Write:
    """Return the record that holds ``2**order`` records of a chain, in a buffer of its own."""
    nbytes = records[0].header.stored_bytes
    payload = bytearray(members_bytes(order, nbytes))
    into = np.frombuffer(payload, np.uint8)
    for index, (header, data) in enumerate(records):
        payload[KEY_BYTES * index : KEY_BYTES * (index + 1)] = header.key
        at = member_at(index, order, nbytes)
        payload[at : at + HEADER_BYTES] = header.pack()
        at += HEADER_BYTES
        np.copyto(into[at : at + nbytes], np.frombuffer(data[:nbytes], np.uint8))
    return _around(records, order, memoryview(payload), CODEC_PACK)


def pack_sized(
    records: Sequence[Write],
    order: int,
    encode: Callable[[Write, memoryview], Header | None],
) -> tuple[Write, list[Header]]:
    """Return the same of version 2, and the headers of its records.

    encode: writes a record's bytes into a buffer of as many and returns its new header, or None.
    """
    nbytes = records[0].header.raw_bytes
    count = 1 << order
    payload = memoryview(bytearray(head_bytes(order) + count * (HEADER_BYTES + nbytes)))
    payload[: KEY_BYTES << order] = b"".join(one.header.key for one in records)
    headers: list[Header] = []
    at = head_bytes(order)
    for record in records:
        into = payload[at + HEADER_BYTES : at + HEADER_BYTES + nbytes]
        header = encode(record, into)
        if header is None:
            header = _as_it_is(record, into)
        payload[at : at + HEADER_BYTES] = header.pack()
        at += HEADER_BYTES + header.stored_bytes
        headers.append(header)
    lengths = (header.stored_bytes for header in headers)
    struct.pack_into(f"<{count}I", payload, KEY_BYTES << order, *lengths)
    return _around(records, order, payload[:at], CODEC_SIZED_PACK), headers


def repack(whole: Write, anew: Mapping[RecordId, Write]) -> tuple[Write, list[Header]] | None:
    """Return a pack with some of its records anew, the others as they are, and their headers.

    None if it is not a pack with these parts, or another of its records is none.
    """
    name, payload = whole.header.id, whole.data
    order = order_of(name)
    count, tail = 1 << order, unpacked_id(name)[KEY_BYTES:]
    lengths = lengths_in(bytes(payload[: head_bytes(order)]), order)
    at = head_bytes(order) if lengths else KEY_BYTES << order
    each = ((len(payload) - at) >> order) - HEADER_BYTES
    records: list[Write] = []
    for index, nbytes in enumerate(lengths or (each,) * count):
        member = bytes(payload[KEY_BYTES * index : KEY_BYTES * (index + 1)]) + tail
        data = payload[at + HEADER_BYTES : at + HEADER_BYTES + nbytes]
        record = anew.get(member)
        if record is None:
            try:
                record = Write(Header.unpack(payload[at : at + HEADER_BYTES]), data)
            except Corrupt:
                return None
            if record.header.id != member or record.header.stored_bytes != len(data):
                return None
        records.append(record)
        at += HEADER_BYTES + nbytes
    if any(record.header.raw_bytes != records[0].header.raw_bytes for record in records):
        return None
    if all(record.header.codec == CODEC_RAW for record in records):
        return pack(records, order), [record.header for record in records]
    return pack_sized(records, order, _as_it_is)


def _as_it_is(record: Write, into: memoryview) -> Header:
    nbytes = record.header.stored_bytes
    np.copyto(np.frombuffer(into[:nbytes], np.uint8), np.frombuffer(record.data[:nbytes], np.uint8))
    return record.header


def _around(records: Sequence[Write], order: int, whole: memoryview, codec: int) -> Write:
    """Return the record of which a pack's payload is the bytes."""
    first, last = records[0].header, records[-1].header
    total = checksum(whole)
    key, part = split_record_id(pack_id(last.id, order))
    header = Header(
        namespace=first.namespace,
        key=key,
        parent=first.parent,
        depth=first.depth,
        part=PartName(*part),
        raw_bytes=len(whole),
        stored_bytes=len(whole),
        raw_sum=total,
        stored_sum=total,
        codec=codec,
    )
    return Write(header, whole)


def runs_over(chunk: int, stop: int, most: int) -> list[Run]:
    """Return the runs in which a chunk may lie and that end before `stop`, the longest first.

    most: the order of the longest.
    """
    runs = [Run(chunk >> order << order, order) for order in range(most, -1, -1)]
    return [run for run in runs if run.stop <= stop]
