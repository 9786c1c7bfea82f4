"""The index of a slab store: which slot holds which record. LMDB, without writemap.

LMDB maps its file, and a mapping of a file that became shorter kills the process with SIGBUS. So
the file is preallocated to the size of the map, and its length is checked before each transaction;
before it is opened it is read whole (see slab_sound). A truncation between that check and the
access still kills; no program that maps files can close this gap.

LMDB's own table of readers is not used: whoever stands in it, dead or alive, keeps pages from being
used again until the map is full. The directory has one owner, and others read the index without
LMDB (slab_pages), so this module keeps its own readers and its own transactions apart.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from kvtier.errors import Unavailable
from kvtier.identity.record import HEADER_BYTES, RECORD_ID_BYTES, RecordId

_WHERE: Final = struct.Struct("<QII")
VALUE_BYTES: Final = _WHERE.size + HEADER_BYTES
"""Of each record."""

_MIN_OPERATIONS: Final = 128
"""In one transaction. Each may copy a leaf, and the copied pages of two transactions before are not
free yet. A map that is wholly full does not even take deletions, so this stays far below."""

_MAX_OPERATIONS: Final = 4096
_BYTES_AN_OPERATION: Final = 64 << 10
"""Of the map, for each operation beyond the least. Where 1 KiB is charged for an entry that takes
680 bytes at worst, this leaves five pages over: three generations of nearly two."""


WHERE: Final = np.dtype([("sequence", "<u8"), ("segment", "<u4"), ("slot", "<u4")])
"""Where a record lies: how each value begins."""

_NOWHERE: Final = bytes(_WHERE.size)  # segment 0 never exists: the entry leads nowhere


class Page(NamedTuple):
    """Names of records, and where each lies: WHERE, as many."""

    names: list[RecordId]
    where: NDArray[np.void]


class Entry(NamedTuple):
    """Where a record lies and what its header is, as the 256 bytes that stand on the disk too.

    sequence: grows with each write to the store, so that it gives the order of the records, and is
    the time of the write, in microseconds since 1970, wherever the machine's clock did not go back.
    """

    segment: int
    slot: int
    sequence: int
    head: bytes


class IndexFull(Unavailable):
    """There is no page left for so much as one operation."""


class Index:
    """An open index file.

    Any thread may call `find` and `page`. `commit`, `grow` and `close` exclude each other by a lock
    of the caller, and during `grow` and `close` nothing else is called.
    All methods block and raise Unavailable when LMDB, or the file's length, says no.
    """

    def __init__(self, path: Path, size: int, *, synced: bool) -> None:
        """Open or create the file, `size` bytes long at least; synced: commits reach the disk."""
        self._path = path
        self._synced = synced
        self._reading = threading.Lock()
        self._broken = False
        self._env = self._opened(size)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.size = self._env.info()["map_size"]
        try:
            os.posix_fallocate(self._descriptor, 0, self.size)
        except OSError:
            self.close()
            raise

    def _opened(self, size: int) -> lmdb.Environment:
        with _failing("cannot be opened"):
            return lmdb.Environment(
                str(self._path),
                map_size=size,
                subdir=False,
                sync=self._synced,
                metasync=False,  # what commit() syncs at its end
                mode=0o600,
                readahead=False,
                lock=False,
            )

    def find(self, names: Sequence[RecordId]) -> list[Entry | None]:
        """Return the entry of each record, None where there is none."""
        self._check()
        try:
            with self._reading, self._env.begin() as txn:
                if len(names) == 1:
                    value = txn.get(names[0])
                    return [None if value is None else unpack_entry(value)]
                found = dict(txn.cursor().getmulti(names))  # no loop in Python
        except lmdb.Error as error:
            raise Unavailable(f"the index cannot be read: {error}") from error
        return [unpack_entry(found[name]) if name in found else None for name in names]

    def page(self, after: RecordId, limit: int) -> Page:
        """Return up to `limit` entries that follow `after`, by name; b"" begins."""
        lot = self.lot(after, limit)
        where = b"".join(where_of(value) for _, value in lot)
        return Page([name for name, _ in lot], np.frombuffer(where, WHERE))

    def lot(self, after: RecordId, limit: int) -> list[tuple[RecordId, bytes]]:
        """Return the same as it is in the file: names and values."""
        self._check()
        with self._reading, _failing("cannot be read"), self._env.begin() as txn:
            cursor = txn.cursor()
            more = cursor.set_range(after) if after else cursor.first()
            if more and cursor.key() == after:
                more = cursor.next()
            return list(itertools.islice(cursor.iternext(), limit)) if more else []  # all in C

    def commit(self, operations: Mapping[RecordId, Entry | None]) -> None:
        """Put each entry and remove each name whose entry is None, in order.

        In transactions of 128 or, in a large map, up to 4096; of fewer where it is too full for
        that. After a failure some of them may be in force.
        """
        todo = list(operations.items())
        done = 0
        step = min(_MIN_OPERATIONS + self.size // _BYTES_AN_OPERATION, _MAX_OPERATIONS)
        while done < len(todo):
            self._check()
            try:
                with _failing("cannot be written"):
                    self._transact(todo[done : done + step])
            except Unavailable:
                self._break()
                raise
            except lmdb.MapFullError as error:
                if step == 1:
                    raise IndexFull(f"index {self._path} is full") from error
                step = max(1, min(step, len(todo) - done) // 2)
            else:
                done += step
        if todo and self._synced:
            self.sync()

    def extend(self, lot: Sequence[tuple[RecordId, bytes]]) -> None:
        """Put entries that follow all that there are, by name, into pages that become full."""
        self._check()
        try:
            with _failing("cannot be written"), self._env.begin(write=True) as txn:
                txn.cursor().putmulti(lot, append=True)
        except lmdb.MapFullError as error:
            raise IndexFull(f"index {self._path} is full") from error

    def _transact(self, operations: Sequence[tuple[RecordId, Entry | None]]) -> None:
        # A transaction writes to pages that were free before the one before it. So whoever began
        # to read before this one has to be done; who begins from now on is safe until the next.
        with self._reading:
            pass
        with self._env.begin(write=True) as txn:
            for name, entry in operations:
                if entry is None:
                    txn.delete(name)
            put = [(name, pack_entry(entry)) for name, entry in operations if entry is not None]
            txn.cursor().putmulti(put)

    def grow(self, size: int) -> None:
        """Make the file and its map `size` bytes long. No transaction may be open."""
        if size <= self.size:
            return
        os.posix_fallocate(self._descriptor, 0, size)
        with _failing("cannot grow"):
            self._env.set_mapsize(size)
        self.size = size

    def moved(self, path: Path) -> None:
        """Note that the file has another name now."""
        self._path = path

    def sync(self) -> None:
        """Bring all commits to the disk."""
        with _failing("cannot be synced"):
            self._env.sync(True)  # noqa: FBT003  (the C function has no keywords)

    def close(self) -> None:
        """Close the file. Later calls raise Unavailable. Idempotent."""
        self._env.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _check(self) -> None:
        if self._descriptor < 0:
            raise Unavailable(f"index {self._path} is closed")
        length = os.fstat(self._descriptor).st_size
        if length < self.size:
            raise Unavailable(f"index {self._path} was cut from {self.size} to {length} bytes")
        if self._broken:
            self._mend()

    def _break(self) -> None:
        """Close what a commit has failed in: after some errors LMDB refuses all else for ever."""
        with self._reading:
            self._env.close()
            self._broken = True

    def _mend(self) -> None:
        """Open it anew, as it was committed last."""
        with self._reading:
            if self._broken:
                self._env = self._opened(self.size)
                self._broken = False


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """Turn LMDB's errors into Unavailable, except a full map, which has a remedy."""
    try:
        yield
    except lmdb.MapFullError:
        raise
    except lmdb.Error as error:
        raise Unavailable(f"the index {what}: {error}") from error


def where_of(value: bytes) -> bytes:
    """Return where the record of a value lies, as WHERE; one of another length leads nowhere."""
    return value[: _WHERE.size] if len(value) == VALUE_BYTES else _NOWHERE


def pack_entry(entry: Entry) -> bytes:
    """Return the value that an entry is in the index."""
    return _WHERE.pack(entry.sequence, entry.segment, entry.slot) + entry.head


def unpack_entry(value: bytes) -> Entry:
    """Return the entry that a value of the index is; one of another length leads nowhere."""
    if len(value) != VALUE_BYTES:
        return Entry(0, 0, 0, b"")  # as _NOWHERE
    sequence, segment, slot = _WHERE.unpack_from(value)
    fields = segment, slot, sequence, value[_WHERE.size :]
    return tuple.__new__(Entry, fields)  # no Python frame for each


assert WHERE.itemsize == _WHERE.size  # noqa: S101
assert RECORD_ID_BYTES <= 511  # noqa: S101, PLR2004
