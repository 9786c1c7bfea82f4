"""What a soak watches from outside: whether the daemon answers, processes, and mapped arenas."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvtier.daemon.answers import Welcome
from kvtier.daemon.frames import HEADER, decode, encode, open_frame
from kvtier.daemon.messages import Hello

_ARENA: Final = "memfd:kvtier-arena"
_READ: Final = 64 << 10


class Probe:
    """A connection that tells when the daemon goes, and when it answers again.

    returned: when it last did, in seconds of the monotonic clock, 0.0 while it does not.
    session: 16 bytes, or one of its own.
    """

    def __init__(self, path: Path, session: bytes = b"") -> None:
        self.generation = 0
        self.returned = 0.0
        self._path = path
        self._session = session or os.urandom(16)
        self._socket: socket.socket | None = None
        self._read = b""

    def look(self) -> None:
        """See how it is now. Does not wait."""
        try:
            if self._socket is None:
                self._connect()
            while self._socket is not None:
                data, fds, _, _ = socket.recv_fds(self._socket, _READ, 4)
                for fd in fds:
                    os.close(fd)
                if not data:
                    self.close()
                self._take(data)
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def close(self) -> None:
        """Let the connection go."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._read, self.returned = None, b"", 0.0

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(0)
        self._socket.connect(str(self._path))
        pidfd = os.pidfd_open(os.getpid())
        try:
            hello = encode(Hello(self._session, "probe", "scheduler"), 1)
            socket.send_fds(self._socket, [hello], [pidfd])
        finally:
            os.close(pidfd)

    def _take(self, data: bytes) -> None:
        """Read the Welcome; what else comes is of no interest."""
        self._read += data
        if self.returned or len(self._read) < HEADER.size:
            return
        kind, length, _ = open_frame(self._read[: HEADER.size])
        end = HEADER.size + length
        if len(self._read) >= end:
            welcome = decode(kind, self._read[HEADER.size : end])
            if not isinstance(welcome, Welcome):
                raise ConnectionError(f"the daemon said {welcome} in place of Welcome")
            self.generation = welcome.generation
            self.returned = time.monotonic()
            self._read = b""


def state(pid: int) -> str:
    """Return the state of a process as the kernel names it, "T" when stopped; "X" for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2][0]
    except (OSError, UnicodeDecodeError):
        return "X"


def arenas_mapped(pids: Iterable[int]) -> set[int]:
    """Return the inode numbers of the arenas that some of these processes have mapped."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
                if _ARENA in line:
                    found.add(int(line.split()[4]))
    return found
