"""The directory of a slab store: whose it is, what format it has, whether it can be written.

Files of a store, all mode 0600; anything else in the directory is left alone and not counted::

    format           names this layout and its version
    lock             a POSIX lock is held on it while the store is open
    index.lmdb       and index.lmdb-lock: see slab_index
    index.lmdb.tmp   a new index, until it takes the place of the old one: see slab_renewal
    settings         capacity and durability of the last opening, for those who look at it
    unsynced         there while commits do not reach the disk; holds the machine's boot id
    slab-N-S.seg     segment N, slots of S bytes: see slab
    index-REASON.bad an index that could not be read, kept for inspection
    selftest         for a moment, at opening
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import struct
import threading
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.storage_backends.scratch import Scratch
from kvtier.storage_backends.slab import PAGE, FileIO, Segment

FORMAT: Final = b"kvtier slab store, format 2\n"

_SETTINGS: Final = b"capacity %d\ndurability %s\n"

FIXED_BYTES: Final = 64 << 10
"""Charged for the small files, the self-test and the directory itself."""

_logger = logging.getLogger(__name__)
_OWN: Final = re.compile(
    r"format|lock|settings|unsynced|selftest|[\w.]+\.tmp|index\.lmdb(-lock)?|index-\w+\.bad"
    r"|slab-\d{8}-\d{1,15}\.seg"
)
_FLOCK: Final = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_REMEDIES: Final = {
    errno.EEXIST: "it is not a directory: choose another",
    errno.ENOTDIR: "a part of it is not a directory: choose another",
    errno.EACCES: "let the user that runs kvtier write there, or choose another directory",
    errno.EPERM: "let the user that runs kvtier write there, or choose another directory",
    errno.ENOMEM: "raise this process's limit of memory (ulimit -v, LimitAS=)",
    errno.EROFS: "mount it for writing, or choose another directory",
    errno.ENOSPC: "free some space, or lower the capacity",
    errno.EDQUOT: "raise the quota, or lower the capacity",
    errno.EMFILE: "raise the limit on open files (ulimit -n, LimitNOFILE=)",
}
_open_guard = threading.Lock()
_open: dict[tuple[int, int], int] = {}
"""Directories open in this process, by device and inode, with the process id: a POSIX lock does
not keep a process from itself, and a child inherits this table without the locks."""


def config_error(error: OSError, path: Path) -> ConfigError:
    """Return what an operator needs to know about a failed call: errno, path and remedy."""
    number = error.errno or 0
    name = errno.errorcode.get(number, str(number))
    remedy = _REMEDIES.get(number, "choose another directory")
    return ConfigError(f"{path}: {name} ({os.strerror(number)}); {remedy}")


def boot_id() -> bytes:
    """Return what is new with each boot of this machine; empty if the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""


def holder(path: Path) -> str | None:
    """Return the process that has a directory open, None if nobody has. Takes no lock."""
    with _open_guard:  # nobody here opens it meanwhile: closing the file would drop that lock
        found = path.stat()
        if _open.get((found.st_dev, found.st_ino)) == os.getpid():
            return str(os.getpid())
        try:
            descriptor = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return _owner(descriptor)
        finally:
            os.close(descriptor)


def _owner(descriptor: int) -> str | None:
    """Return whose lock a lock file is under, None if there is none."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, owner = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    if kind == fcntl.F_UNLCK:
        return None
    if owner > 0:
        return str(owner)
    # In another pid namespace the kernel does not tell; the owner wrote what it calls itself.
    return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"


def refuse_odd_files(path: Path) -> None:
    """Raise ConfigError where what has the name of a store's file is a link, a pipe, a directory.

    A pipe would be waited for without end, and what a link leads to is not the store's.
    """
    with os.scandir(path) as entries:
        for entry in entries:
            if _OWN.fullmatch(entry.name) and not entry.is_file(follow_symlinks=False):
                raise ConfigError(
                    f"{path / entry.name} is no regular file; remove it, or choose another "
                    f"directory"
                )


class SlabDirectory:
    """A locked, tested directory. `direct` says whether O_DIRECT works there."""

    def __init__(self, path: Path, io: FileIO) -> None:
        """Create the directory if need be, lock it, check its format and write to it.

        Blocks. Raises ConfigError with cause and remedy.
        """
        self.path = path
        self.direct = True
        self._io = io
        self._lock_descriptor = -1
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.stat()
            self._key = (found.st_dev, found.st_ino)
        except OSError as error:
            raise config_error(error, path) from error
        self._register()
        try:
            refuse_odd_files(path)
            self._lock()
            self._check_format()
            self._self_test()
        except OSError as error:
            self.release()
            raise config_error(error, path) from error
        except BaseException:
            self.release()
            raise

    # ------------------------------------------------------------------------------- one writer

    def _register(self) -> None:
        with _open_guard:
            if _open.get(self._key) == os.getpid():
                raise ConfigError(
                    f"{self.path} is already open in this process ({os.getpid()}); "
                    f"share that store, or choose another directory"
                )
            _open[self._key] = os.getpid()

    def _lock(self) -> None:
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock_descriptor = descriptor
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = _owner(descriptor) or "unknown"
            raise ConfigError(
                f"{self.path} is in use by process {owner}; stop it, or choose another directory"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Let go of the lock. Idempotent."""
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1
        with _open_guard:
            _open.pop(self._key, None)

    # ------------------------------------------------------------------------------------ format

    def _check_format(self) -> None:
        path = self.path / "format"
        if not path.exists():
            if self.index.exists() or self.segments():
                raise ConfigError(
                    f"{self.path} holds a store but no file named format; "
                    f"empty it, or choose another directory"
                )
            self.replace("format", FORMAT)
        found = path.read_bytes()
        if found != FORMAT:
            raise ConfigError(
                f"{self.path} has {found[:80]!r}, and this kvtier knows only {FORMAT!r}; "
                f"use the version that wrote it, empty it, or choose another directory"
            )

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file whole or not at all, durably."""
        path = self.path / name
        draft = self.path / f"{name}.tmp"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if os.write(descriptor, content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.replace(path)
        self.sync()

    def sync(self) -> None:
        """Make the creation and removal of files durable."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    # --------------------------------------------------------------------------------- self-test

    @property
    def flags(self) -> int:
        """How segments are opened."""
        return os.O_RDWR | (os.O_DIRECT if self.direct else 0)

    def _self_test(self) -> None:
        try:
            self._write_and_read()
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self.direct = False
            self._write_and_read()
            _logger.warning("%s refuses O_DIRECT; going through the page cache", self.path)

    def _write_and_read(self) -> None:
        path = self.path / "selftest"
        wrote, read = Scratch(PAGE), Scratch(PAGE)
        wrote.view[: len(FORMAT)] = FORMAT
        descriptor = self._io.open(path, self.flags | os.O_CREAT | os.O_TRUNC)
        try:
            self._io.fallocate(descriptor, PAGE)
            count = self._io.pwrite(descriptor, [wrote.view], 0)
            self._io.fdatasync(descriptor)
            if count != PAGE or self._io.pread(descriptor, [read.view], 0) != PAGE:
                raise OSError(errno.EIO, "short count")
            if read.view != wrote.view:
                raise OSError(errno.EIO, "read back something else")
        finally:
            self._io.close(descriptor)
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------- files

    @property
    def index(self) -> Path:
        """Where the index is."""
        return self.path / "index.lmdb"

    @property
    def draft(self) -> Path:
        """Where a new index is written, before it takes the place of the old one."""
        return self.path / "index.lmdb.tmp"

    def remove_draft(self) -> None:
        """Remove what remains of a new index that was not finished."""
        for path in (self.draft, self.draft.with_name(f"{self.draft.name}-lock")):
            path.unlink(missing_ok=True)

    def note(self, capacity: int, durability: str) -> None:
        """Write down how the store was opened, where that has changed."""
        content = _SETTINGS % (capacity, durability.encode())
        path = self.path / "settings"
        if not path.exists() or path.read_bytes() != content:
            self.replace("settings", content)

    def segments(self) -> list[Segment]:
        """Return the segments that lie here, by number, each as long as its file."""
        found = []
        for path in sorted(self.path.iterdir()):
            segment = Segment.named(path.name, path.stat().st_size)
            if segment is not None:
                found.append(segment)
        return found

    def discard(self, reason: str | None = None, keep: int = 0) -> None:
        """Remove index and segments; with a `reason`, keep an index of up to `keep` bytes.

        It is renamed after the reason, and replaces one that was kept earlier.
        """
        for old in self.path.glob("index-*.bad"):
            old.unlink()
        for segment in self.segments():
            (self.path / segment.name).unlink()
        if reason is not None and self.index.stat().st_blocks * 512 <= keep:
            self.index.replace(self.path / f"index-{reason}.bad")
        self.index.unlink(missing_ok=True)
        (self.path / "index.lmdb-lock").unlink(missing_ok=True)
        self.unmark()

    def set_aside_bytes(self) -> int:
        """Return the bytes of a kept unreadable index."""
        return sum(path.stat().st_blocks * 512 for path in self.path.glob("index-*.bad"))

    # ---------------------------------------------------------------- commits that were not synced

    def unsynced_since(self) -> bytes | None:
        """Return the boot id under which commits went unsynced, None if all are synced."""
        with contextlib.suppress(FileNotFoundError):
            return (self.path / "unsynced").read_bytes()
        return None

    def mark(self) -> None:
        """Note durably that commits from now on are not synced."""
        self.replace("unsynced", boot_id())

    def unmark(self) -> None:
        """Note that everything is synced."""
        (self.path / "unsynced").unlink(missing_ok=True)
        self.sync()
