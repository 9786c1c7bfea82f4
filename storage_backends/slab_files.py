"""The open files of a slab store: records in and out of slots."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.errors import MisuseError
from kvtier.identity.record import HEADER_BYTES
from kvtier.seams import IoPool
from kvtier.storage_backends.scratch import ScratchPool, copy, is_aligned
from kvtier.storage_backends.slab import PAGE, FileIO, Segment
from kvtier.storage_backends.slab_directory import SlabDirectory

__all__ = ["SegmentFiles"]

_MAX_OPEN: Final = 256
_SCRATCHES: Final = 8
_SYNCED_ALONE: Final = 3


@dataclass(slots=True)
class _Open:
    descriptor: int
    users: int = 0


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

    def write(self, segment: Segment, slot: int, head: bytes, data: memoryview) -> None:
        """Write a record: a page with its header, then the payload. See write_run."""
        self.write_run(segment, slot, [head], [data])

    def write_run(
        self, segment: Segment, first: int, heads: Sequence[bytes], payloads: Sequence[memoryview]
    ) -> None:
        """Write records into slots that follow each other, with one call.

        payloads: each exactly the stored bytes, or more of them in an aligned buffer.
        """
        payload = segment.stride - PAGE
        direct = [len(data) >= payload and is_aligned(data) for data in payloads]
        need = sum(PAGE if one else segment.stride for one in direct)
        borrowed = self._scratch.take(need)
        try:
            scratch = borrowed.view
            buffers: list[memoryview] = []
            at = 0
            for head, data, aligned in zip(heads, payloads, direct, strict=True):
                end = at + (PAGE if aligned else segment.stride)
                scratch[at : at + PAGE] = head.ljust(PAGE, b"\0")
                buffers.append(scratch[at:end])
                if aligned:
                    buffers.append(data[:payload])
                else:
                    taken = min(len(data), payload)
                    copy(scratch[at + PAGE : at + PAGE + taken], data[:taken])
                    scratch[at + PAGE + taken : end] = bytes(payload - taken)
                at = end
            held = self._hold(segment)
            try:
                count = self._io.pwrite(held.descriptor, buffers, segment.offset(first))
            finally:
                self._let_go(held)
        finally:
            self._scratch.give(borrowed)
        if count != segment.stride * len(heads):
            raise OSError(errno.EIO, f"wrote {count} of {segment.stride * len(heads)} bytes")

    def read_run(
        self, segment: Segment, first: int, sizes: Sequence[int], into: Sequence[memoryview]
    ) -> list[bytes]:
        """Fill buffers with the payloads of slots that follow each other, with one call.

        sizes: of the stored payloads. An aligned buffer is filled up to the end of its last page,
        another one exactly. Returns what stands in each record's header page.
        """
        payload = segment.stride - PAGE
        direct = [len(buffer) >= payload and is_aligned(buffer) for buffer in into]
        need = sum(PAGE if one else segment.stride for one in direct)
        borrowed = self._scratch.take(need)
        try:
            scratch = borrowed.view
            buffers: list[memoryview] = []
            starts: list[int] = []
            at = 0
            for buffer, aligned in zip(into, direct, strict=True):
                starts.append(at)
                end = at + (PAGE if aligned else segment.stride)
                buffers.append(scratch[at:end])
                if aligned:
                    buffers.append(buffer[:payload])
                at = end
            held = self._hold(segment)
            try:
                count = self._io.pread(held.descriptor, buffers, segment.offset(first))
            finally:
                self._let_go(held)
            if count != segment.stride * len(sizes):
                raise OSError(errno.EIO, f"read {count} of {segment.stride * len(sizes)} bytes")
            for at, size, buffer, aligned in zip(starts, sizes, into, direct, strict=True):
                if not aligned:
                    copy(buffer[:size], scratch[at + PAGE : at + PAGE + size])
            return [bytes(scratch[at : at + HEADER_BYTES]) for at in starts]
        finally:
            self._scratch.give(borrowed)

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

    def _sync_each(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            self._sync(segment)

    def _sync(self, segment: Segment) -> None:
        held = self._hold(segment)
        try:
            self._io.fdatasync(held.descriptor)
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
            idle = self._surplus()
        for descriptor in idle:
            self._io.close(descriptor)
        self._syncs.close()

    def _hold(self, segment: Segment) -> _Open:
        """Return the open file of a segment, to be let go."""
        with self._guard:
            if self._closed:
                raise OSError(errno.EBADF, "the store is closed")
            held = self._open.get(segment.number)
            if held is None:
                path = self._directory.path / segment.name
                held = _Open(self._io.open(path, self._directory.flags))
                self._open[segment.number] = held
            held.users += 1
            self._open.move_to_end(segment.number)
            surplus = self._surplus()
        for descriptor in surplus:
            self._io.close(descriptor)
        return held

    def _let_go(self, held: _Open) -> None:
        with self._guard:
            held.users -= 1
            surplus = self._surplus()
        for descriptor in surplus:
            self._io.close(descriptor)

    def _surplus(self) -> list[int]:
        """Forget, and return to be closed, the idle files that are too many."""
        too_many = len(self._open) - (0 if self._closed else _MAX_OPEN)
        if too_many <= 0:
            return []
        idle = [number for number, one in self._open.items() if not one.users]
        surplus = idle[:too_many]
        return [self._open.pop(number).descriptor for number in surplus]
