"""A client of a daemon that says what it is told to, and keeps no rule by itself."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Self, TypeVar

from kvtier.daemon.answers import Welcome
from kvtier.daemon.frames import HEADER, decode, encode, open_frame
from kvtier.daemon.messages import Hello, Message
from kvtier.testing.waiting import until

M = TypeVar("M", bound=Message)


def hello(session: bytes = bytes(16), engine: str = "engine") -> Hello:
    """Return a client's first message."""
    return Hello(session, engine, "scheduler")


def greeted(path: str | Path) -> tuple[Welcome, int]:
    """Connect until a server answers; return what it welcomes with, and the arena's inode."""

    def look() -> tuple[Welcome, int] | None:
        with contextlib.suppress(EOFError, ConnectionError), RawClient(path) as client:
            welcome = client.greet()
            return welcome, os.fstat(client.descriptors[0]).st_ino
        return None

    return until(look)


class RawClient:
    """One connection. descriptors: that came with messages; they are closed with it.

    Raises TimeoutError when an answer takes `timeout` seconds, EOFError at the connection's end.
    With 0.0 it raises BlockingIOError instead, and goes on from there when it is asked again.
    """

    def __init__(self, path: str | Path, timeout: float = 20.0) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.descriptors: list[int] = []
        self._data = bytearray()
        self._number = 0
        try:
            self.sock.settimeout(timeout)
            self.sock.connect(str(path))
        except BaseException:
            self.sock.close()
            raise

    def say(self, message: Message, number: int = 0, *, passing: int | None = None) -> None:
        """Send a message, with a descriptor if one is given."""
        frame = encode(message, number)
        if passing is None:
            self.sock.sendall(frame)
        else:
            socket.send_fds(self.sock, [frame], [passing])

    def greet(self, first: Hello | None = None) -> Welcome:
        """Say Hello, with this process's pidfd, and return the answer."""
        self.introduce(first or hello())
        return self.heard(Welcome)

    def introduce(self, first: Hello) -> None:
        """Say Hello, with this process's pidfd."""
        pidfd = os.pidfd_open(os.getpid())
        try:
            self.say(first, self.next_number(), passing=pidfd)
        finally:
            os.close(pidfd)

    def ask(self, message: Message, answer: type[M]) -> M:
        """Send a request, and return its answer, which has to be of that kind."""
        self.say(message, self.next_number())
        return self.heard(answer)

    def heard(self, kind: type[M]) -> M:
        """Read the next message, which has to be of that kind."""
        message, _ = self.read()
        if not isinstance(message, kind):
            raise TypeError(f"{message} is no {kind.__name__}")
        return message

    def read(self) -> tuple[Message, int]:
        """Read the next message, and the number that it answers."""
        kind, length, number = open_frame(self._come(HEADER.size))
        frame = self._come(HEADER.size + length)
        del self._data[: len(frame)]
        return decode(kind, frame[HEADER.size :]), number

    def ended(self) -> bool:
        """Read until the daemon closes; say whether it did, within the time that answers have."""
        with contextlib.suppress(TimeoutError):
            while True:
                try:
                    self.read()
                except (EOFError, ConnectionResetError, BrokenPipeError):
                    return True
        return False

    def next_number(self) -> int:
        """Return a number for a request."""
        self._number += 1
        return self._number

    def close(self) -> None:
        """Close the connection, without a word."""
        self.sock.close()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _come(self, count: int) -> bytes:
        """Wait for so many bytes, and return them without taking them."""
        while len(self._data) < count:
            data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 16, 4)
            self.descriptors += descriptors
            if not data:
                raise EOFError("the daemon closed the connection")
            self._data += data
        return bytes(self._data[:count])
