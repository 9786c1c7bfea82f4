"""Connections to an S3 service on which no wait outlasts the deadline of the batch.

A socket's own timeout bounds one wait only, so that a server that sends a byte now and then is
never late. Here each wait has what is left of the silence that is allowed, of the time for the
whole answer, and of the batch's Deadline, whichever ends first: for status, headers and body.
"""

from __future__ import annotations

import contextlib
import io
import math
import select
import socket
import ssl
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.client import HTTPResponse
from typing import Any, Final, NamedTuple, TypeVar

from kvtier.clock import Clock, monotonic
from kvtier.deadline import Deadline
from kvtier.storage_backends.s3_errors import BrokenError, LateError

A = TypeVar("A")

_SENT: Final = 1 << 18  # bytes between two looks at the clock
_AT_ONCE: Final = 256  # views of one system call; Linux takes up to 1024


class Door(NamedTuple):
    """Where a connection leads: to a host's port, through a proxy or not.

    tls: whether what is behind it speaks TLS. pass_on: headers for a proxy that tunnels.
    """

    host: str
    port: int
    tls: bool
    proxy: tuple[str, int] | None = None
    pass_on: tuple[tuple[str, str], ...] = ()


class Wire:
    """A connection, for one exchange at a time.

    silence: the longest wait for the next bytes, in seconds.
    """

    def __init__(self, sock: Any, silence: float, clock: Clock = monotonic) -> None:
        self._heard = False  # since the exchange began
        self._sock = sock
        self._silence = silence
        self._clock = clock
        self._deadline = Deadline()
        self._latest = math.inf

    def begin(self, deadline: Deadline, seconds: float = math.inf) -> None:
        """Begin an exchange, or its next half; it is over by then, and in so many seconds."""
        self._deadline = deadline
        self._latest = self._clock() + seconds
        self._heard = False

    def _wait(self) -> None:
        """Let the next call on the socket wait as long as it may. Raises when it may not."""
        now = self._clock()
        left = self._deadline.left(now)
        if left <= 0:
            raise LateError("the time that was given is over")
        if now >= self._latest:
            raise BrokenError("the server is too slow to answer")
        self._sock.settimeout(min(left, self._silence, self._latest - now))

    def receive(self, into: memoryview) -> int:
        """Wait for bytes and take what is there. Raises OSError, LateError and BrokenError."""
        return self._taken(self._sock.recv_into, into)

    def spread(self, views: Sequence[memoryview]) -> int:
        """Fill views in turn, several by one system call, and return how many bytes came.

        They are fewer only where the other end has hung up. Raises as ``receive`` does.
        """
        left = [view for view in reversed(views) if len(view)]  # the last one is next
        filled = 0
        while left:
            if isinstance(self._sock, ssl.SSLSocket):  # which takes one view
                got = self.receive(left[-1])
            else:
                got = self._taken(self._receive_each, left[: -_AT_ONCE - 1 : -1])
            if not got:
                break
            filled += got
            while left and got >= len(left[-1]):
                got -= len(left.pop())
            if got:
                left[-1] = left[-1][got:]
        return filled

    def _receive_each(self, views: list[memoryview]) -> int:
        got: int = self._sock.recvmsg_into(views)[0]
        return got

    def _taken(self, receive: Callable[[A], int], into: A) -> int:
        self._wait()
        try:
            got = receive(into)
        except TimeoutError:
            if self._heard:
                self._wait()  # which says what of its time is over
            raise
        self._heard = True
        return got

    def send(self, views: Sequence[memoryview]) -> None:
        """Send all bytes of all views. Raises as ``receive`` does."""
        for view in views:
            left = view
            while left:
                self._wait()
                left = left[self._sock.send(left[:_SENT]) :]

    def as_socket(self) -> Any:
        """Return it where a socket is expected of which only ``makefile`` is used."""
        return self

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return a reader of one answer; the connection outlives it."""
        del mode
        return io.BufferedReader(_Reader(self))

    def dropped(self) -> bool:
        """Say whether the other end has hung up, or talks unasked: it is of no use then."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        """Hang up. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.close()


class _Reader(io.RawIOBase):
    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        return self._wire.receive(into)


def connected(
    door: Door,
    deadline: Deadline,
    timeouts: tuple[float, float],
    tls: Callable[[], ssl.SSLContext],
    clock: Clock = monotonic,
) -> Wire:
    """Return a new connection. timeouts: for all of that, and of silence afterwards.

    The look-up of the host's name is the system's, which takes as long as it takes.
    Raises OSError, LateError and BrokenError.
    """
    connecting, silence = timeouts
    sock = _reached(door.proxy or (door.host, door.port), deadline, clock() + connecting, clock)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if door.tls:
            if door.proxy:
                _tunnel(Wire(sock, silence, clock), door, deadline, connecting)
            _until(sock, deadline, clock() + connecting, clock)
            sock = tls().wrap_socket(sock, server_hostname=door.host)
    except BaseException:
        sock.close()
        raise
    return Wire(sock, silence, clock)


def _reached(
    place: tuple[str, int], deadline: Deadline, latest: float, clock: Clock
) -> socket.socket:
    """Connect to the first address of a host that takes it."""
    found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
    failed: OSError = OSError(f"{place[0]} has no address")
    for at, (family, kind, protocol, _, address) in enumerate(found):
        sock = socket.socket(family, kind, protocol)
        try:
            now = clock()
            share = (latest - now) / (len(found) - at)  # or the first would leave the others none
            _until(sock, deadline, now + share, clock)
            sock.connect(address)
        except OSError as error:
            sock.close()
            failed = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failed


def _until(sock: socket.socket, deadline: Deadline, latest: float, clock: Clock) -> None:
    """Let a socket wait until then, and not beyond the deadline."""
    now = clock()
    if deadline.left(now) <= 0:
        raise LateError("the time that was given is over")
    sock.settimeout(max(min(deadline.left(now), latest - now), 1e-3))


def _tunnel(wire: Wire, door: Door, deadline: Deadline, seconds: float) -> None:
    """Ask a proxy for the way to a host."""
    where = f"{door.host}:{door.port}"
    lines = [f"CONNECT {where} HTTP/1.1", f"Host: {where}"]
    lines += [f"{name}: {value}" for name, value in door.pass_on]
    wire.begin(deadline, seconds)
    wire.send([memoryview("\r\n".join([*lines, "", ""]).encode("latin-1"))])
    answer = HTTPResponse(wire.as_socket(), method="CONNECT")
    answer.begin()
    if answer.status != HTTPStatus.OK:
        raise ConnectionRefusedError(f"the proxy says {answer.status} {answer.reason}")
