"""The open files of a slab store: records in and out of slots."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvtier.errors import MisuseError
from kvtier.identity.record import HEADER_BYTES
from kvtier.seams import IoPool
from kvtier.storage_backends.scratch import ScratchPool, copy, is_aligned
from kvtier.storage_backends.slab import PAGE, FileIO, Segment
from kvtier.storage_backends.slab_directory import SlabDirectory

_MAX_OPEN: Final = 256
_SCRATCHES: Final = 8
_SYNCED_ALONE: Final = 3


_HELD: Final = 64  # files at a time, of each thread
_LOT_BYTES: Final = 4 << 20

_Move = Callable[[int, Sequence[memoryview], int], int]


class Placed(msgspec.Struct, frozen=True):
    """A record's place in a call, its slot, its header as it lies on the disk, and its memory.

    size: its stored bytes. data: they, or the buffer that they are to fill.
    """

    at: int
    segment: Segment
    slot: int
    head: bytes
    size: int
    data: memoryview


Run = Sequence[Placed]
"""Records whose slots follow each other."""


class _Laid(msgspec.Struct, frozen=True):
    """A run as it is moved.

    pieces: of each record, the scratch memory that it goes through: the page of its header, and
    the payload if its memory is not aligned. buffers: they, and the records' memory.
    """

    run: Run
    pieces: list[memoryview]
    buffers: list[memoryview]
    offset: int
    nbytes: int


@dataclass(slots=True)
class _Open:
    descriptor: int
    users: int = 0
    error: OSError | None = None  # it could not be opened


class SegmentFiles:
    """Reads, writes, makes and removes segments. Thread-safe; no lock is held during I/O.

    A store may have more segments than a process may have open files: the 256 last used are kept
    open. All methods raise OSError.
    """

    def __init__(self, directory: SlabDirectory, io: FileIO) -> None:
        self._directory = directory
        self._io = io
        self._guard = threading.Lock()
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._closed = False
        self._made = False
        self._leftover: list[Path] = []
        self._scratch = ScratchPool(_SCRATCHES)
        self._syncs = IoPool("lmdb-sync", io.syncs)

    def write(self, runs: Sequence[Run]) -> list[OSError | None]:
        """Write records, each run with one call: pages with headers, each before its payload.

        data: exactly the stored bytes, or more of them in an aligned buffer. Returns what failed
        of each run.
        """
        out: list[OSError | None] = []
        for lot, need in _lots(runs):
            scratch = self._scratch.take(need)
            try:
                laid = _lay(lot, scratch.view)
                for each in laid:
                    for one, piece in zip(each.run, each.pieces, strict=True):
                        piece[:PAGE] = one.head.ljust(PAGE, b"\0")
                        if len(piece) > PAGE:
                            _pad(piece[PAGE:], one.data)
                out += self._move(self._io.pwrite, laid)
            finally:
                self._scratch.give(scratch)
        return out

    def read(self, runs: Sequence[Run]) -> list[list[bytes] | OSError]:
        """Fill buffers with the payloads of records, each run with one call.

        An aligned buffer is filled up to the end of its last page, another one exactly. Returns of
        each run what stands in its records' header pages, or what failed.
        """
        out: list[list[bytes] | OSError] = []
        for lot, need in _lots(runs):
            scratch = self._scratch.take(need)
            try:
                laid = _lay(lot, scratch.view)
                for each, error in zip(laid, self._move(self._io.pread, laid), strict=True):
                    if error is not None:
                        out.append(error)
                        continue
                    for one, piece in zip(each.run, each.pieces, strict=True):
                        if len(piece) > PAGE:
                            copy(one.data[: one.size], piece[PAGE : PAGE + one.size])
                    out.append([bytes(piece[:HEADER_BYTES]) for piece in each.pieces])
            finally:
                self._scratch.give(scratch)
        return out

    def _move(self, call: _Move, laid: Sequence[_Laid]) -> list[OSError | None]:
        """Move one run after the other, with nothing done between them.

        What ran before a payload passed through the processor's caches is no longer in them.
        """
        out: list[OSError | None] = []
        held = self._hold([each.run[0].segment for each in laid])
        try:
            for file, each in zip(held, laid, strict=True):
                error = file.error
                if error is None:
                    try:
                        count = call(file.descriptor, each.buffers, each.offset)
                        if count != each.nbytes:
                            error = OSError(errno.EIO, f"moved {count} of {each.nbytes} bytes")
                    except OSError as raised:
                        error = raised.with_traceback(None)  # which would keep the buffers
                out.append(error)
        finally:
            self._let_go(held)
        return out

    def sync(self, segments: Iterable[Segment]) -> None:
        """Bring what was written to segments to the disk, and that new ones exist."""
        with self._guard:
            made, self._made = self._made, False
        written = list(segments)
        try:
            if self._io.syncs > 1 and len(written) > _SYNCED_ALONE:
                self._sync_together(written)
            else:
                self._sync_each(written)
            if made:
                self._directory.sync()
        except OSError:
            self._made = self._made or made
            raise

    def renamed(self) -> None:
        """Note that a file has a new name: the next sync brings that to the disk, too."""
        self._made = True

    def _sync_together(self, segments: Sequence[Segment]) -> None:
        """Sync on several threads: the device merges flushes that wait at the same time."""
        shares = [segments[first :: self._io.syncs] for first in range(self._io.syncs)]
        try:
            self._syncs.map(self._sync_each, shares)
        except MisuseError as error:
            raise OSError(errno.EBADF, "the store is closed") from error

    def _sync_each(self, segments: Sequence[Segment]) -> None:
        for start in range(0, len(segments), _HELD):
            held = self._hold(segments[start : start + _HELD])
            try:
                for file in held:
                    if file.error is not None:
                        raise file.error
                    self._io.fdatasync(file.descriptor)
            finally:
                self._let_go(held)

    def create(self, segment: Segment) -> None:
        """Make the file of a segment, all allocated; `sweep` removes what a failure leaves."""
        path = self._directory.path / segment.name
        descriptor = self._io.open(path, self._directory.flags | os.O_CREAT | os.O_EXCL)
        try:
            self._io.fallocate(descriptor, segment.length)
        except OSError:
            self._unlink(path)
            raise
        finally:
            self._io.close(descriptor)
        self._made = True

    def remove(self, segment: Segment) -> None:
        """Remove the file of an empty segment, now or by a later `sweep`."""
        with self._guard:
            held = self._open.pop(segment.number, None)
        if held is not None:
            self._io.close(held.descriptor)
        self._unlink(self._directory.path / segment.name)

    def _unlink(self, path: Path) -> None:
        """Remove a file, or keep in mind that it is to be removed."""
        try:
            path.unlink(missing_ok=True)
        except OSError:
            self._leftover.append(path)

    def sweep(self) -> None:
        """Remove what could not be removed before: its bytes are not charged, so it goes first."""
        while self._leftover:
            self._leftover[-1].unlink(missing_ok=True)
            self._leftover.pop()

    def close(self) -> None:
        """Close all files: those in use when their last call ends."""
        with self._guard:
            self._closed = True
        self._close_surplus()
        self._syncs.close()

    def _hold(self, segments: Sequence[Segment]) -> list[_Open]:
        """Return the files of segments, open or with the error why not, to be let go."""
        held: list[_Open] = []
        while len(held) < len(segments):
            with self._guard:
                for segment in segments[len(held) :]:
                    file = self._open.get(segment.number)
                    if file is None or self._closed:
                        break
                    self._open.move_to_end(segment.number)
                    file.users += 1
                    held.append(file)
            if len(held) < len(segments):
                held.append(self._opened(segments[len(held)]))
        self._close_surplus()
        return held

    def _opened(self, segment: Segment) -> _Open:
        """Open a file for one user, unless another thread has done so when that is done."""
        path = self._directory.path / segment.name
        try:
            file = _Open(self._io.open(path, self._directory.flags), users=1)
        except OSError as error:
            return _Open(-1, users=1, error=error.with_traceback(None))
        with self._guard:
            there = None if self._closed else self._open.setdefault(segment.number, file)
            if there is file:
                return file
            if there is not None:
                there.users += 1
        self._io.close(file.descriptor)
        return there or _Open(-1, users=1, error=OSError(errno.EBADF, "the store is closed"))

    def _let_go(self, held: Sequence[_Open]) -> None:
        with self._guard:
            for file in held:
                file.users -= 1
        self._close_surplus()

    def _close_surplus(self) -> None:
        """Close the idle files that are too many."""
        most = 0 if self._closed else _MAX_OPEN
        if len(self._open) <= most:
            return
        with self._guard:
            idle = [number for number, one in self._open.items() if not one.users]
            surplus = [self._open.pop(number) for number in idle[: max(0, len(self._open) - most)]]
        for file in surplus:
            self._io.close(file.descriptor)


def _lots(runs: Sequence[Run]) -> Iterator[tuple[list[tuple[Run, list[int]]], int]]:
    """Yield runs in lots that need few files and little scratch memory.

    With each run, how much each of its records needs, and with each lot, how much all of it does.
    """
    lot: list[tuple[Run, list[int]]] = []
    need = 0
    for run in runs:
        stride = run[0].segment.stride
        sizes = [
            PAGE if len(one.data) >= stride - PAGE and is_aligned(one.data) else stride
            for one in run
        ]
        more = sum(sizes)
        if lot and (len(lot) == _HELD or need + more > _LOT_BYTES):
            yield lot, need
            lot, need = [], 0
        lot.append((run, sizes))
        need += more
    if lot:
        yield lot, need


def _lay(lot: Sequence[tuple[Run, list[int]]], scratch: memoryview) -> list[_Laid]:
    """Lay runs out for the system: scratch memory and that of the records in turn."""
    laid: list[_Laid] = []
    at = 0
    for run, sizes in lot:
        segment = run[0].segment
        buffers: list[memoryview] = []
        pieces: list[memoryview] = []
        for one, size in zip(run, sizes, strict=True):
            piece = scratch[at : at + size]
            at += size
            pieces.append(piece)
            buffers.append(piece)
            if size < segment.stride:
                buffers.append(one.data[: segment.stride - PAGE])
        place = segment.offset(run[0].slot)
        laid.append(_Laid(run, pieces, buffers, place, segment.stride * len(run)))
    return laid


def _pad(target: memoryview, data: memoryview) -> None:
    """Copy a payload, and zeros up to the end."""
    taken = min(len(data), len(target))
    copy(target[:taken], data[:taken])
    target[taken:] = bytes(len(target) - taken)
