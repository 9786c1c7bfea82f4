"""The directory of a files store: the system calls in it, relative to one open descriptor.

That descriptor is why an unmounted filesystem is an error, and never an empty directory on the
disk below it. Tests replace ``Folder`` to inject faults.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvtier.errors import Unavailable

GONE: Final = (errno.ENOENT, errno.ESTALE)
"""What a filesystem says of a file that is not there, or that another host removed meanwhile."""

_CHANGE: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
# A queue or a device under a record's name must not block who opens it.
_LOOK: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_PLACE: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Folder:
    """An open directory. All methods block, may be called from any thread, and raise OSError.

    Names are relative to it. A file of ours has mode 0600, a directory 0700.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`, which is made if it is not there; what it lies in must be."""
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        self.path = path
        self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._kept = [self._root]
        self._guard = threading.Lock()
        self._users = 0
        self._closed = False

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Keep the directory open meanwhile. Raises Unavailable once it is closed."""
        with self._guard:
            if self._closed:
                raise Unavailable(f"{self.path} is closed here")
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    def close(self) -> None:
        """Close it, when the last call on it has ended. Idempotent; does not wait."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            self._users += 1
        self._leave()

    def _leave(self) -> None:
        with self._guard:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            self._end()

    def _end(self) -> None:
        # Not while a call runs: a number that is closed could be another file's at once.
        for descriptor in self._kept:
            os.close(descriptor)

    def keep(self, name: str) -> int:
        """Open a file, made if need be, for as long as the directory is open."""
        self._kept.append(self.change(name))
        return self._kept[-1]

    def drop(self, descriptor: int) -> None:
        """Close a file that was kept."""
        self._kept.remove(descriptor)
        os.close(descriptor)

    def is_at(self, descriptor: int, name: str) -> bool:
        """Say whether an open file has that name still."""
        try:
            found = os.stat(name, dir_fd=self._root, follow_symlinks=False)
        except OSError as error:
            if error.errno in GONE:
                return False
            raise
        return os.path.samestat(found, os.fstat(descriptor))

    def look(self, name: str) -> int:
        """Open a file for reading and return its descriptor."""
        return os.open(name, _LOOK, dir_fd=self._root)

    def change(self, name: str, *, new: bool = False) -> int:
        """Open a file for reading and writing, making it if need be; new: it must not exist."""
        flags = _CHANGE | os.O_CREAT | (os.O_EXCL if new else 0)
        return os.open(name, flags, 0o600, dir_fd=self._root)

    def read(self, descriptor: int, buffers: Sequence[memoryview], start: int = 0) -> int:
        """Fill buffers with a file's bytes from `start` on; return how many it had for them."""
        return sum(
            self._whole(os.preadv, descriptor, buffer, start + at)
            for buffer, at in _placed(buffers)
        )

    def write(self, descriptor: int, buffers: Sequence[memoryview]) -> None:
        """Write buffers to the start of a file."""
        for buffer, at in _placed(buffers):
            if self._whole(os.pwritev, descriptor, buffer, at) < len(buffer):
                raise OSError(errno.EIO, "a file takes no more bytes")

    @staticmethod
    def _whole(call: Any, descriptor: int, buffer: memoryview, at: int) -> int:
        done = 0
        while done < len(buffer):
            count = call(descriptor, [buffer[done:]], at + done)
            if count <= 0:
                break
            done += count
        return done

    def extend(self, descriptor: int, length: int) -> None:
        """Give a file its length, so that others who count see what it will take."""
        os.ftruncate(descriptor, length)

    def sync(self, descriptor: int) -> None:
        """Bring a file to stable storage."""
        os.fsync(descriptor)

    def sync_names(self, name: str) -> None:
        """Bring the names in a directory to stable storage."""
        with self._opened(name) as descriptor:
            os.fsync(descriptor)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name; what had it is gone."""
        os.rename(old, new, src_dir_fd=self._root, dst_dir_fd=self._root)

    def unlink(self, name: str) -> None:
        """Remove a file."""
        os.unlink(name, dir_fd=self._root)

    def make(self, name: str) -> None:
        """Make a directory unless it is there."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self._root)

    def size(self, name: str) -> int | None:
        """Return the bytes of a file, None if there is no such plain file."""
        try:
            found = os.stat(name, dir_fd=self._root, follow_symlinks=False)
        except OSError as error:
            if error.errno in GONE:
                return None
            raise
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def listed(self, name: str) -> Iterator[tuple[str, int, float]]:
        """Yield the plain files of a directory: name, bytes, and when each last changed."""
        try:
            with self._opened(name) as descriptor, os.scandir(descriptor) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(found.st_mode):
                            yield entry.name, found.st_size, found.st_mtime
        except OSError as error:
            if error.errno not in (*GONE, errno.ENOTDIR, errno.ELOOP):
                raise

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        descriptor = os.open(name, _PLACE, dir_fd=self._root)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _placed(buffers: Sequence[memoryview]) -> Iterator[tuple[memoryview, int]]:
    at = 0
    for buffer in buffers:
        yield buffer, at
        at += len(buffer)
