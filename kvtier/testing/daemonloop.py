"""The loop of a daemon's server alone, on sessions that answer in every way there is."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from kvtier.clock import monotonic
from kvtier.daemon.answers import Answer, Progress, Told, Welcome
from kvtier.daemon.limits import Limits
from kvtier.daemon.loop import Server
from kvtier.daemon.messages import (
    Bypass,
    Figures,
    Flush,
    Hello,
    Leave,
    Message,
    Release,
    Renew,
    Unpin,
)
from kvtier.daemon.process import Process
from kvtier.errors import MisuseError, ProtocolError
from kvtier.testing.rawclient import RawClient

_BLOCK = "x" * 60_000


class LoopSessions:
    """Answers at once, later from a thread, never, or far too often."""

    def __init__(self) -> None:
        self.open = 0
        self.dead: list[int] = []
        self.heard: list[str] = []
        self.ticks = 0

    def hello(self, hello: Hello, process: Process) -> bytes:
        """Count the connection."""
        del process
        self.open += 1
        return hello.session

    def handle(self, session: bytes, message: Message, reply: Callable[[Message], None]) -> None:
        """Answer in the way that goes with the message's kind."""
        del session
        self.heard.append(type(message).__name__)
        match message:
            case Figures():
                reply(Answer({"one": 1.0}))
            case Flush():
                threading.Thread(target=lambda: reply(Told(value=True))).start()
            case Leave():
                for _ in range(2000):  # 120 MB
                    reply(Answer({_BLOCK: 1.0}))
            case Unpin():
                other = threading.Thread(target=lambda: reply(Progress(1)))
                other.start()
                other.join()
                reply(Told(value=True))
            case Renew():
                raise MisuseError("no such lease")
            case Bypass():
                raise RuntimeError("a defect")
            case Release(lease=1):
                raise ProtocolError("no such thing")
            case _:
                pass

    def first_plan(self, session: bytes) -> int:
        """Let it copy all."""
        del session
        return 0

    def closed(self, session: bytes) -> None:
        """Count it."""
        del session
        self.open -= 1

    def died(self, process: Process) -> None:
        """Note it."""
        self.dead.append(process.pid)

    def tick(self) -> None:
        """Count it."""
        self.ticks += 1

    def rest(self) -> bool:
        """Have nothing that was put off."""
        return False


class RunningLoop:
    """A loop on a thread, behind a socket in `folder`."""

    def __init__(self, folder: Path, limits: Limits | None = None, uid: int | None = None) -> None:
        self.path = folder / "s"
        self.sessions = LoopSessions()
        self.door = socket.socket(socket.AF_UNIX)
        self.door.bind(str(self.path))
        self.door.listen(128)
        self.door.settimeout(0.0)
        self.arena = os.memfd_create("arena")
        welcome = Welcome(1, 2, 3, ("dram",))
        owner = os.geteuid() if uid is None else uid
        self.server = Server(
            self.door, self.sessions, welcome, self.arena, owner, monotonic, limits
        )
        self._thread = threading.Thread(target=self.server.serve)
        self._thread.start()

    def serves(self) -> bool:
        """Say whether a new client is let in and answered."""
        with RawClient(self.path) as other:
            other.greet()
            return other.ask(Figures(), Answer).figures == {"one": 1.0}

    def end(self) -> None:
        """End in order."""
        self.server.end()
        self._thread.join()
        self.server.close()
        self.door.close()
        os.close(self.arena)
