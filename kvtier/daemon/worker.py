"""A rank's own side of a daemon: the arena, mapped when it is first needed, and what it reports.

The scheduler's process asks the catalog and sends plans by the engine's own channel. A rank only
copies. Its connection tells the daemon that this process may, and when it does so no more: what
it can still write to is given to nobody else.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from pathlib import Path
from typing import Any, Final

from kvtier.checks import check_wait
from kvtier.copier import Pages
from kvtier.daemon.frames import encode
from kvtier.daemon.mapped import MappedArena
from kvtier.daemon.messages import Ended, Hello
from kvtier.daemon.place import check_own, check_path, rendezvous
from kvtier.daemon.tether import Tether
from kvtier.daemon.wire import Wire, connect, wait_for_daemon
from kvtier.device.base import Device
from kvtier.errors import ConfigError, MisuseError
from kvtier.identity.geometry import Geometry

_SAID: Final = 4096  # more than a socket holds


class Worker:
    """One rank's process on the daemon of its engine. Safe under fork and spawn.

    engine: the id that the scheduler's cache was opened with. path: of the daemon's socket; that
    of the engine's private daemon by default. Making one opens nothing: that happens when it is
    first bound, in whichever process that is.
    """

    def __init__(self, engine: str, path: str | Path | None = None) -> None:
        if not engine or not isinstance(engine, str):
            raise ConfigError("a rank needs the id of its engine, as the scheduler gave it")
        self.engine = engine
        self.path = str(rendezvous(engine) if path is None else check_path(path))
        self.arena = MappedArena()
        self._session = b""
        self._pid = 0
        self._wire: Wire | None = None
        self._unsaid: deque[Ended] = deque()
        self._said: deque[Ended] = deque(maxlen=_SAID)  # which the server may not have read
        self._lock = threading.Lock()  # of the wire and what it has to say
        self._tether: Tether | None = None

    def bind(
        self,
        geometry: Geometry,
        tensors: Any,
        device: Device,
        *,
        rank: tuple[int, int, int, int] = (0, 1, 0, 1),
        timeout: float = 60.0,
    ) -> Pages:
        """Bind this rank's KV tensors, one for each component, to the daemon's arena.

        rank: its shard, of so many, and its stage, of so many. Blocks until the daemon is there,
        `timeout` seconds at most, the first time. Raises ConfigError when it does not come, and
        for tensors that are not of the geometry.
        """
        check_wait("a timeout", timeout)
        self._open(timeout)
        many = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        return Pages(geometry, self.arena, many, device, rank)

    def ended(self, plan: int) -> None:
        """Say that this process copies a plan no more, or never will. Never waits for the daemon.

        plan: its id. Where several ranks are in one process, it is said when none of them does.
        What cannot be said now is said when the daemon is back.
        """
        if os.getpid() != self._pid:
            raise MisuseError("a rank's connection does not cross fork; bind in the child")
        with self._lock:
            self._unsaid.append(Ended(plan))
            self._say()
            if self._unsaid and self._tether is not None:
                self._tether.poke()

    def close(self) -> None:
        """Close the connection, and let the arena go. Idempotent."""
        if os.getpid() != self._pid or self._tether is None:
            return
        self._tether.end()
        with self._lock:
            wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        self.arena.unmap()

    # ---- the connection

    def _open(self, timeout: float) -> None:
        """Connect in this process, unless that was done."""
        if os.getpid() == self._pid:
            if self._tether is None or self._tether.closing:
                raise MisuseError("this rank is closed")
            return
        self._session = os.urandom(16)
        self._lock = threading.Lock()  # a parent's may have been held as it forked
        self._unsaid, self._wire, self.arena = deque(), None, MappedArena()
        self._said.clear()
        wait_for_daemon(self.path, self._come_up, timeout)
        self._tether = Tether(
            self.path,
            "kvtier-rank",
            watch=self._watch,
            come_up=self._come_up,
            gone=self.arena.unmap,
        )
        self._tether.start()
        self._pid = os.getpid()

    def _come_up(self, until: float) -> None:
        """Say hello, and map the arena if it is another. Raises OSError and KvtierError."""
        check_own(self.path)
        hello = Hello(self._session, self.engine, "worker")
        wire, welcome, fd = connect(self.path, hello, until)
        if welcome.arena == self.arena.id:
            os.close(fd)
        else:
            try:
                self.arena.map(fd, welcome.first)
            except BaseException:
                wire.close()
                raise
        with self._lock:
            self._unsaid.extendleft(reversed(self._said))  # nobody knows what the last one read
            self._said.clear()
            self._wire = wire
            self._say()

    def _say(self) -> None:
        """Send what was not said. Called under the lock."""
        wire = self._wire
        try:
            if wire is not None:
                while self._unsaid and wire.put(b"", 0.0):
                    wire.put(encode(self._unsaid[0]), 0.0)
                    self._said.append(self._unsaid.popleft())
        except OSError:
            wire = None  # the thread sees it, too

    def _watch(self) -> bool:
        """Wait until the connection is lost, or this is closed."""
        wire, tether = self._wire, self._tether
        if wire is None or tether is None:
            return False
        poll = select.poll()
        poll.register(tether.wake, select.POLLIN)
        while not tether.closing:
            poll.register(wire, select.POLLIN | (select.POLLOUT if wire.unsent else 0))
            poll.poll()
            tether.heard()
            try:
                wire.take(0.0)
                with self._lock:
                    wire.put(b"", 0.0)
                    self._say()
            except Exception as error:  # noqa: BLE001  (a defect, too: the daemon's end is noticed)
                tether.lost(error)
                with self._lock:
                    self._wire = None
                wire.close()
                break
        return True
