"""What a soak watches from outside: whether the daemon answers, processes, and mapped arenas."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvtier.daemon.answers import Welcome
from kvtier.testing.rawclient import RawClient, hello

_ARENA: Final = "memfd:kvtier-arena"


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
        self._client: RawClient | None = None

    def look(self) -> None:
        """See how it is now. Does not wait."""
        try:
            if self._client is None:
                self._client = RawClient(self._path, 0.0)
                self._client.introduce(hello(self._session, "probe"))
            while True:  # what comes after the Welcome is of no interest
                message, _ = self._client.read()
                if not self.returned:
                    if not isinstance(message, Welcome):
                        raise ConnectionError(f"the daemon said {message} in place of Welcome")
                    self.generation = message.generation
                    self.returned = time.monotonic()
        except BlockingIOError:
            pass
        except (EOFError, OSError):
            self.close()

    def close(self) -> None:
        """Let the connection go."""
        if self._client is not None:
            self._client.close()
        self._client, self.returned = None, 0.0


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
