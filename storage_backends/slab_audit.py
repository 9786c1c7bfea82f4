"""Slots read and compared with what the index says of them, on a few threads."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, Self

import xxhash

from kvtier.errors import Corrupt
from kvtier.identity.record import CODEC_RAW, HEADER_BYTES, Header, RecordId, checksum
from kvtier.storage_backends.scratch import ScratchPool
from kvtier.storage_backends.slab import PAGE, Segment
from kvtier.storage_backends.slab_index import Entry

PIECE: Final = 4 << 20
"""Bytes of one read: a device is at full speed with a few of these under way."""

_THREADS: Final = 4
_AHEAD: Final = 4 * _THREADS


class Wrong(NamedTuple):
    """What is wrong with a record: header, place, overlap, payload, raw or unreadable; and how."""

    reason: str
    detail: str


class Placed(NamedTuple):
    """A record whose entry leads to a slot of its size."""

    name: RecordId
    entry: Entry
    header: Header


class Run(NamedTuple):
    """Records in neighbouring slots of one segment: at most a piece, or one record."""

    segment: Segment
    records: Sequence[Placed]


class Audit:
    """Reads slots past the page cache, where the file system allows that. For one thread's use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._scratch = ScratchPool(_THREADS)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-audit")
        self._direct = os.O_DIRECT

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def all(self, runs: Iterable[Run]) -> Iterator[tuple[Run, list[Wrong | None]]]:
        """Read runs, several at a time, and yield each with what is wrong with its records."""
        under_way: deque[tuple[Run, Future[list[Wrong | None]]]] = deque()
        for run in runs:
            under_way.append((run, self._pool.submit(self.one, run)))
            if len(under_way) >= _AHEAD:
                done, future = under_way.popleft()
                yield done, future.result()
        for done, future in under_way:
            yield done, future.result()

    def one(self, run: Run) -> list[Wrong | None]:
        """Read a run and say of each record what is wrong with it, if anything."""
        try:
            return self._read(run)
        except OSError as error:
            if len(run.records) == 1:
                return [_unreadable(error)]
        # One bad sector condemns the record that it is in, not those beside it.
        return [wrong for record in run.records for wrong in self.one(Run(run.segment, [record]))]

    def _read(self, run: Run) -> list[Wrong | None]:
        stride = run.segment.stride
        descriptor = self._open(self._path / run.segment.name)
        try:
            begin = run.segment.offset(run.records[0].entry.slot)
            if stride > PIECE:
                return [self._in_pieces(descriptor, begin, stride, run.records[0])]
            with self._scratch.borrow(PIECE) as scratch:
                _fill(descriptor, scratch[: stride * len(run.records)], begin)
                slots = (scratch[at : at + stride] for at in range(0, PIECE, stride))
                return [_judge(one, slot) for one, slot in zip(run.records, slots, strict=False)]
        finally:
            os.close(descriptor)

    def _in_pieces(self, descriptor: int, begin: int, stride: int, record: Placed) -> Wrong | None:
        total = xxhash.xxh3_128()
        left = record.header.stored_bytes
        with self._scratch.borrow(PIECE) as scratch:
            for at in range(0, stride, PIECE):
                piece = scratch[: min(PIECE, stride - at)]
                _fill(descriptor, piece, begin + at)
                if at == 0 and piece[:HEADER_BYTES] != record.entry.head:
                    return _other(piece)
                payload = piece[PAGE if at == 0 else 0 :][:left]
                total.update(payload)
                left -= len(payload)
        return _summed(record.header, total.digest())

    def _open(self, path: Path) -> int:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | self._direct)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = 0
            return self._open(path)


def _fill(descriptor: int, buffer: memoryview, offset: int) -> None:
    count = os.preadv(descriptor, [buffer], offset)
    if count != len(buffer):
        raise OSError(errno.EIO, f"read {count} of {len(buffer)} bytes")


def _judge(record: Placed, slot: memoryview) -> Wrong | None:
    """Compare a slot's content with a record."""
    if slot[:HEADER_BYTES] != record.entry.head:
        return _other(slot)
    payload = slot[PAGE : PAGE + record.header.stored_bytes]
    return _summed(record.header, checksum(payload))


def _other(slot: memoryview) -> Wrong:
    """Say what a slot begins with, instead of the header that the index has."""
    try:
        found = Header.unpack(slot)
    except Corrupt as error:
        return Wrong("payload", f"the slot has no whole header: {error}")
    return Wrong("payload", f"the slot has the record of chunk {found.key.hex()[:16]}")


def _summed(header: Header, stored_sum: bytes) -> Wrong | None:
    if stored_sum != header.stored_sum:
        return Wrong("payload", "the stored bytes fail their checksum")
    if header.codec == CODEC_RAW and (header.raw_bytes, header.raw_sum) != (
        header.stored_bytes,
        header.stored_sum,
    ):
        return Wrong("raw", "the raw bytes fail their checksum")
    return None


def _unreadable(error: OSError) -> Wrong:
    number = error.errno or 0
    return Wrong("unreadable", f"{errno.errorcode.get(number, number)} ({error.strerror})")
