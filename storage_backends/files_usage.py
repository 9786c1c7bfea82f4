"""What the files of a store take, counted by all hosts that write there, under one lock.

A file ``usage`` holds the count. Each change of it is made under a lock on that file which the
filesystem gives to one process on one host at a time. Bytes are counted before a file takes them
and forgotten after they are free, so that a writer that dies in between leaves a count that is too
high, never one that is too low; what the files take is counted anew at opening, and when the
store seems to be full. Where somebody has removed that file, or all files, hosts agree on a new
one: a lock on a file that has no name any more keeps nobody out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvtier.clock import Clock
from kvtier.errors import ConfigError, Unavailable
from kvtier.identity.record import HEADER_BYTES, checksum
from kvtier.storage_backends.files_folder import GONE, Folder

OVERHEAD: Final = 2 << 20
"""Bytes charged for the directories and the small files, whatever the records."""

SHELVES: Final = tuple(f"{number:02x}" for number in range(256))
"""The directories that records lie in, each in that of its key's first byte."""

NAME: Final = re.compile(r"[0-9a-f]{64}-[0-9a-f]{20}\.kv")
DRAFT: Final = re.compile(r"[0-9a-f]{64}-[0-9a-f]{20}\.[0-9a-f]{16}\.new")

_FILE: Final = "usage"
_PAGE: Final = 4096
_ENTRY_CHARGE: Final = 512  # a name takes 96 bytes of its directory, and a draft's name 120
_LOCK_SECONDS: Final = 5.0  # the longest wait for another writer
_POLL_SECONDS: Final = (0.0005, 0.02)
_COUNT_AGAIN_SECONDS: Final = 60.0
_DRAFT_SECONDS: Final = 3600.0  # after which a draft's writer is taken for dead
_FLOCK: Final = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_COUNT: Final = struct.Struct("<Q")
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def footprint(stored_bytes: int) -> int:
    """Return the bytes that a record takes: header and payload in whole pages, and its name."""
    return -(-(HEADER_BYTES + stored_bytes) // _PAGE) * _PAGE + _ENTRY_CHARGE


class Usage:
    """The count of one directory. Thread-safe; blocks on the filesystem.

    capacity: bytes, None for unbounded.
    """

    def __init__(self, folder: Folder, capacity: int | None, clock: Clock) -> None:
        """Count what is there. Raises OSError, Unavailable, and ConfigError without locks."""
        self._folder = folder
        self._room = None if capacity is None else capacity - OVERHEAD
        self._clock = clock
        self._guard = threading.Lock()
        self._counted = -_COUNT_AGAIN_SECONDS
        self._descriptor = folder.keep(_FILE)
        with self.held():
            self._count()

    def fits(self, nbytes: int) -> bool:
        """Say whether so many bytes would fit if there were nothing else."""
        return self._room is None or nbytes <= self._room

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep all other writers out meanwhile.

        Raises Unavailable after five seconds, and where the directory is gone.
        """
        late = time.monotonic() + _LOCK_SECONDS
        if not self._guard.acquire(timeout=_LOCK_SECONDS):
            raise Unavailable(f"{self._folder.path}: a writer of this process holds its lock")
        try:
            self._lock(late)
            try:
                yield
            finally:
                lock(self._descriptor, fcntl.F_UNLCK, self._folder.path)
        finally:
            self._guard.release()

    def take(self, nbytes: int) -> bool:
        """Count bytes that are about to be taken, if there is room. Under ``held``."""
        used = self._read()
        if self._room is not None and used + nbytes > self._room:
            return False
        self._write(used + nbytes)
        return True

    def give(self, nbytes: int) -> None:
        """Forget bytes that are free. Under ``held``."""
        used = self._read()
        if nbytes > used:  # somebody else has removed files
            self._count()
        elif nbytes:
            self._write(used - nbytes)

    def count_again(self) -> bool:
        """Count what is there, unless that was done within the last minute; say whether it was.

        Under ``held``.
        """
        due = self._clock() - self._counted >= _COUNT_AGAIN_SECONDS
        if due:
            self._count()
        return due

    def _read(self) -> int:
        raw = os.pread(self._descriptor, _COUNT.size + 16, 0)
        if not _whole(raw):
            return self._count()
        (used,) = _COUNT.unpack_from(raw)
        return int(used)

    def _write(self, used: int) -> None:
        raw = _COUNT.pack(used)
        os.pwrite(self._descriptor, raw + checksum(raw), 0)

    def _count(self) -> int:
        """Count the files, remove drafts of writers that died, and write the sum down."""
        used = 0
        # No count while this one is made: who dies here leaves the next one to count. And the
        # time of this change is the filesystem's own.
        os.pwrite(self._descriptor, bytes(_COUNT.size + 16), 0)
        late = os.fstat(self._descriptor).st_mtime - _DRAFT_SECONDS
        for shelf in SHELVES:
            for name, size, changed in self._folder.listed(shelf):
                draft = bool(DRAFT.fullmatch(name))
                if draft and changed < late:
                    with contextlib.suppress(OSError):
                        self._folder.unlink(f"{shelf}/{name}")
                        continue
                if draft or NAME.fullmatch(name):
                    used += footprint(max(0, size - HEADER_BYTES))
        self._write(used)
        self._counted = self._clock()
        return used

    def _lock(self, late: float) -> None:
        pause, longest = _POLL_SECONDS
        while not self._locked():
            if time.monotonic() > late:
                raise Unavailable(
                    f"{self._folder.path}: another writer holds its lock for "
                    f"{_LOCK_SECONDS:.0f} s; nothing is written meanwhile"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _unlock(self) -> None:
        """Let go of a lock that is not the right one, or nobody could write until this one does."""
        with contextlib.suppress(OSError):
            lock(self._descriptor, fcntl.F_UNLCK, self._folder.path)

    def _locked(self) -> bool:
        """Take the lock of the file that has its name now; False while another has it."""
        try:
            if not lock(self._descriptor, fcntl.F_WRLCK, self._folder.path):
                return False
            if self._folder.is_at(self._descriptor, _FILE):
                return True
        except OSError as error:
            if error.errno not in GONE:
                self._unlock()
                raise
        self._unlock()  # of a file without a name, whatever comes of the next one
        old = self._descriptor
        try:
            self._descriptor = self._folder.keep(_FILE)  # who reads no count there makes one
        except OSError as error:
            if error.errno not in GONE:
                raise
            raise Unavailable(
                f"{self._folder.path}: it was removed while it is in use "
                f"({errno.errorcode.get(error.errno or 0)}); open the tier again once it is there"
            ) from error
        self._folder.drop(old)
        return False


def is_count(folder: Folder) -> bool:
    """Say whether what lies where the count does may be one, or is not there. Raises OSError."""
    try:
        descriptor = folder.look(_FILE)
    except FileNotFoundError:
        return True
    try:
        raw = os.pread(descriptor, _COUNT.size + 17, 0)
    finally:
        os.close(descriptor)
    return not raw.strip(b"\0") or _whole(raw)


def _whole(raw: bytes) -> bool:
    return len(raw) == _COUNT.size + 16 and checksum(raw[: _COUNT.size]) == raw[_COUNT.size :]


def lock(descriptor: int, kind: int, path: Path) -> bool:
    """Take (F_WRLCK) or let go of (F_UNLCK) the lock of an open file; False while another has it.

    It belongs to the open file, not to the process, so that two stores of one process keep each
    other out as well. Raises ConfigError where there are no locks.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno in _NO_LOCKS:
            raise ConfigError(
                f"{path}: its filesystem has no locks that all hosts keep "
                f"({os.strerror(error.errno)}); mount it with them (NFS 4, or Lustre with "
                f"-o flock)"
            ) from error
        raise
    return True
