"""Where a daemon listens: the socket's folder, a lock so that there is one, and the socket.

The lock is a POSIX lock on ``PATH.lock``: the system drops it when its process ends, however it
ends. So what a dead daemon left behind is known, and a live one's is never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import select
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError

MOST_PATH: Final = 107  # bytes of a socket's path: unix(7), sun_path
_BACKLOG: Final = 4096
_FLOCK: Final = struct.Struct("hhqqi4x")  # fcntl(2), struct flock on 64-bit Linux
_PEER: Final = struct.Struct("iII")  # unix(7), struct ucred
_DYING_POLLS: Final = 100
_DYING_SECONDS: Final = 0.05
_ENGINE: Final = "engine-"
_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")

_held: dict[str, None] = {}  # a POSIX lock does not keep out the process that has it
_held_lock = threading.Lock()


def check_path(path: str | Path) -> Path:
    """Return a socket's path, absolute. Raises ConfigError for one that the system cannot take."""
    whole = Path(path).absolute()
    count = len(os.fsencode(whole))
    if not os.fspath(path) or "\0" in str(path):
        raise ConfigError(f"{str(path)!r} is no path of a socket")
    if count > MOST_PATH:
        raise ConfigError(
            f"the socket path {whole} has {count} bytes, and the system takes {MOST_PATH}; "
            "choose a shorter one, such as /run/kvtier/kv.sock"
        )
    return whole


def real_path(path: Path) -> str:
    """Return a socket's path without links in its folder's; one that is a loop stays as it is."""
    return os.path.join(os.path.realpath(path.parent), path.name)  # noqa: PTH118  (no Path: loops)


def user_folder() -> Path:
    """Return where the folder of this user's sockets is, or would be. Nothing is made.

    It is ``kvtier`` in $XDG_RUNTIME_DIR, or ``kvtier-UID`` in /tmp where that is not set or
    cannot be written.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base and os.access(base, os.W_OK | os.X_OK):
        return Path(base) / "kvtier"
    return Path("/tmp") / f"kvtier-{os.getuid()}"  # noqa: S108  (owner and mode are checked)


def runtime_folder() -> Path:
    """Return the folder of this user's sockets for a daemon: made if need be, for the user alone.

    Raises ConfigError when somebody else could write there.
    """
    folder = user_folder()
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        _check_private(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be used ({error.strerror}); set XDG_RUNTIME_DIR to a folder that can"
        ) from error
    return folder


def check_own(path: str) -> None:
    """Look, before a client trusts a socket in this user's folder, whether that is still so.

    Paths elsewhere are as whoever named them says. Raises OSError where no daemon has made the
    folder, and ConfigError when somebody else could write there.
    """
    folder = user_folder()
    if Path(path).parent == folder:
        _check_private(folder)


def _check_private(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is no folder of this user's alone; remove it, or set XDG_RUNTIME_DIR"
        )


def rendezvous(engine: str) -> Path:
    """Return where the private daemon of an engine listens, by the engine's id. Nothing is made."""
    name = engine
    if not _PLAIN.fullmatch(engine):
        name = hashlib.sha256(engine.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return check_path(user_folder() / f"{_ENGINE}{name}.sock")


def clear_dead(folder: Path) -> None:
    """Remove what daemons that are dead have left in a folder of this user's alone."""
    for lock in sorted(folder.glob("*.sock.lock")):
        with contextlib.suppress(ConfigError):  # it is alive
            Place(lock.with_suffix("")).close()


class Place:
    """A path on which this process alone listens. uid: whose socket it is to be.

    Raises ConfigError when another daemon listens there, naming its process, and for a folder
    that cannot be used. For another's uid this process must be root's, and have one thread.
    """

    def __init__(self, path: str | Path, uid: int | None = None) -> None:
        self.path = check_path(path)
        self.uid = os.geteuid() if uid is None else uid
        self._key = real_path(self.path)
        with _held_lock:
            if self._key in _held:
                raise _taken(self.path, os.getpid())
            _held[self._key] = None
        with contextlib.ExitStack() as undo:
            undo.callback(_held.pop, self._key)
            self._theirs = True
            self._made = False  # the folder, here
            undo.callback(self._remove_folder)
            self._folder = self._open_folder()
            undo.callback(os.close, self._folder)
            self._theirs = self._others_write()
            with self._as_user():
                self._lock = self._take_lock()
                undo.callback(os.close, self._lock)
                undo.callback(self._remove_lock)
                self.socket, self._inode = self._listen()
            undo.pop_all()

    def remove(self) -> None:
        """Take the socket out of its folder, so that clients see that the daemon ends."""
        with contextlib.suppress(OSError):
            found = os.stat(self.path.name, dir_fd=self._folder, follow_symlinks=False)
            if found.st_ino == self._inode:
                os.unlink(self.path.name, dir_fd=self._folder)

    def close(self) -> None:
        """Stop listening, and let the path go."""
        self.remove()
        self.socket.close()
        self._remove_lock()
        self._remove_folder()
        self.let_go()

    def let_go(self) -> None:
        """Close what is open here, and leave all as it is: a forked child does."""
        self.socket.close()
        os.close(self._lock)
        os.close(self._folder)
        _held.pop(self._key, None)

    def _remove_lock(self) -> None:
        with contextlib.suppress(OSError):  # while the lock is held: nobody else's is removed
            os.unlink(self._lock_name, dir_fd=self._folder)

    def _remove_folder(self) -> None:
        """Remove a folder that was made here, unless others use it by now."""
        if self._made:
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()

    @property
    def _lock_name(self) -> str:
        return f"{self.path.name}.lock"

    def _open_folder(self) -> int:
        """Open the folder, made if need be. Nobody but its user may put files there."""
        folder = self.path.parent
        try:
            self._make_folder(folder)
            number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"the socket's folder {folder} cannot be used ({error.strerror}); make it, or "
                "choose another path"
            ) from error
        found = os.fstat(number)
        open_to_all = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if open_to_all or found.st_uid not in {self.uid, os.geteuid(), 0}:
            os.close(number)
            remedy = "chmod 700 it" if open_to_all else f"give it to root, not user {found.st_uid}"
            raise ConfigError(
                f"others may put files into the socket's folder {folder}, and so take the "
                f"daemon's place; {remedy}, or choose another path"
            )
        return number

    def _others_write(self) -> bool:
        """Say whether the user, or anybody but this process, can put files into the folder."""
        found = os.fstat(self._folder)
        return found.st_uid != os.geteuid() or bool(found.st_mode & 0o022)

    def _make_folder(self, folder: Path) -> None:
        if folder.exists():
            return
        try:
            with self._as_user():
                folder.mkdir(0o700)
        except PermissionError:  # such as a folder in /run, for another user
            folder.mkdir(0o700)
            os.chown(folder, self.uid, -1, follow_symlinks=False)
        self._made = True

    @contextlib.contextmanager
    def _as_user(self) -> Iterator[None]:
        """Act with the rights of the socket's user where others put files: no link fools us."""
        own = os.geteuid()
        if self.uid == own or not self._theirs:
            yield
            return
        try:
            os.seteuid(self.uid)
        except PermissionError as error:
            raise ConfigError(
                f"a socket for the user {self.uid} needs a daemon of root's, not of {own}'s"
            ) from error
        try:
            yield
        finally:
            os.seteuid(own)

    def _take_lock(self) -> int:
        """Lock the path for this process, and return the lock file's descriptor."""
        name, flags = self._lock_name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            try:
                number = os.open(name, flags, 0o600, dir_fd=self._folder)
            except OSError as error:
                raise ConfigError(
                    f"cannot write {self.path}.lock ({error.strerror}); choose another path"
                ) from error
            try:
                fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
                if found.st_ino == os.fstat(number).st_ino:
                    _check_lock(self.path, number)
                    return number
            except FileNotFoundError:
                pass  # the daemon before removed it just now: lock the next one
            except OSError:
                owner = _lock_owner(number)
                os.close(number)
                raise _taken(self.path, owner) from None
            os.close(number)

    def _listen(self) -> tuple[socket.socket, int]:
        """Return the listening socket, for this user alone, and the number of its file."""
        self._clear_stale()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(listening.fileno(), 0o600)  # before: the file is made with this mode
            listening.bind(str(self.path))
            if not self._theirs:  # it was made as this process's
                os.chown(self.path.name, self.uid, -1, dir_fd=self._folder, follow_symlinks=False)
            listening.listen(_BACKLOG)
            found = os.stat(self.path.name, dir_fd=self._folder, follow_symlinks=False)
        except OSError as error:
            listening.close()
            raise ConfigError(
                f"cannot listen on {self.path} ({error.strerror}); choose another path"
            ) from error
        listening.settimeout(0.0)
        return listening, found.st_ino

    def _clear_stale(self) -> None:
        """Remove the socket of a daemon that is dead. Raises ConfigError for all else there."""
        name = self.path.name
        try:
            found = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise ConfigError(f"{self.path} is no socket; remove it, or choose another path")
        for _ in range(_DYING_POLLS):
            owner = _listener(self.path)
            if owner is None:  # nobody listens, and nobody will
                os.unlink(name, dir_fd=self._folder)
                return
            if not owner or Path(f"/proc/{owner}").exists():
                raise _taken(self.path, owner)
            select.select((), (), (), _DYING_SECONDS)  # its server is not quite gone
        raise _taken(self.path, owner or 0)


def _listener(path: Path) -> int | None:
    """Return the process that made a socket listen, 0 if it cannot be told, None for none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.0)
        try:
            probe.connect(str(path))
            found: tuple[int, ...] = _PEER.unpack(
                probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            )
        except ConnectionRefusedError:
            return None
        except OSError:  # its queue is full, or it is another user's
            return 0
        return found[0]


def _check_lock(path: Path, number: int) -> None:
    """Raise ConfigError, and close it, for what is no daemon's: it would be removed at the end."""
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode) or found.st_size:
        os.close(number)
        raise ConfigError(
            f"{path}.lock is no lock of a daemon's; remove it, or choose another socket"
        )


def _lock_owner(number: int) -> int:
    """Return the process that has a lock, 0 when it cannot be told."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, owner = _FLOCK.unpack(fcntl.fcntl(number, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else max(owner, 0)


def _taken(path: Path, owner: int) -> ConfigError:
    who = f"process {owner}" if owner else "another process"
    what = "engine's id" if path.name.startswith(_ENGINE) else "socket"
    return ConfigError(f"{path} is in use by {who}; stop it, or choose another {what}")


os.register_at_fork(after_in_child=_held.clear)
