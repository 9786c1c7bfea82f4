"""One connection to a Valkey server: RESP 2, as little of it as a store of large values needs.

Payloads go from the caller's memory to the socket and from the socket into the caller's memory;
only what comes along with the head of a reply is copied once. Client libraries hand out every
value as a new ``bytes`` object, which costs a second copy and the interpreter lock.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from kvtier.clock import monotonic
from kvtier.deadline import current
from kvtier.errors import StoreError

_AHEAD: Final = 16 << 10  # bytes read at once beyond what is asked for, and copied from there
_LONGEST_LINE: Final = 4096
_LONGEST_BULK: Final = 1 << 20  # of a reply that is no record
_MOST_ITEMS: Final = 1 << 16
_SKIPPED: Final = 1 << 18
_MOST_DIGITS: Final = 18

Reply: TypeAlias = "int | bytes | list[Reply] | None"


class BrokenError(StoreError):
    """What came is not a reply to what was asked, or it ended early. The link is of no use."""


class RefusedError(StoreError):
    """The server's own word, such as OOM or NOPERM. The link goes on."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.code = said.partition(" ")[0]


class Place(NamedTuple):
    """Where a server is: a host and a port, or the path of a Unix socket; and which database."""

    host: str
    port: int
    path: str
    database: int

    def __str__(self) -> str:
        """Return it as in a URL."""
        where = self.path or f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
        return f"valkey://{where}" + (f"/{self.database}" if self.database else "")


class Credentials(NamedTuple):
    """Who connects; no password means that none is needed. Never shown."""

    user: str
    password: str

    def __repr__(self) -> str:
        """Return nothing of it."""
        return "Credentials(…)"


class Link:
    """A connection. One call at a time; after any error but RefusedError it must be closed.

    seconds: the longest that one call may wait. connect_seconds: the same for connecting. None
    waits beyond the batch's Deadline.
    Raises OSError, BrokenError and RefusedError.
    """

    def __init__(
        self,
        place: Place,
        credentials: Credentials,
        tls: ssl.SSLContext | None,
        connect_seconds: float,
        seconds: float,
    ) -> None:
        """Connect, say who is there, and choose the database."""
        self._seconds = seconds
        self._held = memoryview(bytearray(_AHEAD))
        self._start = self._end = 0
        self.used = False
        self._late = monotonic() + connect_seconds
        self._socket = _connected(place, tls, min(connect_seconds, _left()))
        try:
            if credentials.password:
                user = [credentials.user] if credentials.user else []
                self.ask("AUTH", *user, credentials.password)
            if place.database:
                self.ask("SELECT", str(place.database))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connection. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.close()

    # ------------------------------------------------------------------------------- sending

    def send(self, *words: str | bytes | Sequence[memoryview]) -> None:
        """Send one command; a word that is a list of views is sent as their concatenation."""
        self._begin()
        head = bytearray(b"*%d\r\n" % len(words))
        for word in words:
            if isinstance(word, (str, bytes)):
                raw = word.encode() if isinstance(word, str) else word
                head += b"$%d\r\n%b\r\n" % (len(raw), raw)
            else:
                head += b"$%d\r\n" % sum(map(len, word))
                self._push([memoryview(head), *word])
                head = bytearray(b"\r\n")
        self._push([memoryview(head)])

    def _push(self, views: list[memoryview]) -> None:
        """Send views, one after the other."""
        if isinstance(self._socket, ssl.SSLSocket):  # it takes one buffer at a time
            for view in views:
                self._wait()
                self._socket.sendall(view)
            return
        while views:
            self._wait()
            sent = self._socket.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    # ----------------------------------------------------------------------------- receiving

    def ask(self, *words: str | bytes) -> Reply:
        """Send a command and return what the server says."""
        self.send(*words)
        return self.reply()

    def reply(self) -> Reply:
        """Return the next reply, which is small."""
        self._begin()
        return self._reply()

    def replies(self, count: int) -> list[Reply]:
        """Return the next replies, which are small; all are taken, also if one refuses."""
        found: list[Reply] = []
        refusal: RefusedError | None = None
        for _ in range(count):
            try:
                found.append(self.reply())
            except RefusedError as error:
                refusal = error
        if refusal is not None:
            raise refusal
        return found

    def bulk(self) -> int | None:
        """Return the length of the next reply, which is a string; None if there is none.

        The bytes of the string are next: they are taken by ``fill`` and ``skip``, then ``end``.
        """
        self._begin()
        kind, rest = self._head()
        if kind != b"$":
            raise BrokenError("a reply of another kind than was asked for")
        length = _number(rest)
        return None if length < 0 else length

    def fill(self, into: memoryview) -> None:
        """Fill a buffer with the bytes that are next."""
        ahead = min(len(into), self._end - self._start)
        into[:ahead] = self._held[self._start : self._start + ahead]
        self._start += ahead
        while ahead < len(into):
            self._wait()
            got = self._socket.recv_into(into[ahead:])
            if not got:
                raise BrokenError("the connection ended in the middle of a reply")
            ahead += got

    def skip(self, count: int) -> None:
        """Pass over bytes that are next."""
        waste = memoryview(bytearray(min(count, _SKIPPED)))
        while count:
            self.fill(waste[:count])
            count -= min(count, len(waste))

    def end(self) -> None:
        """Take the end of a string."""
        if self._line():
            raise BrokenError("a string does not end where it should")

    def _reply(self) -> Reply:
        kind, rest = self._head()
        if kind == b"+":
            return rest
        number = _number(rest)
        if kind == b":":
            return number
        if kind == b"$":
            return self._small(number)
        if kind != b"*" or number > _MOST_ITEMS:
            raise BrokenError("a reply that is none of RESP's")
        return [self._reply() for _ in range(number)] if number >= 0 else None

    def _small(self, length: int) -> bytes | None:
        if length < 0:
            return None
        if length > _LONGEST_BULK:
            raise BrokenError(f"a reply of {length} bytes to a small question")
        found = bytearray(length)
        self.fill(memoryview(found))
        self.end()
        return bytes(found)

    def _head(self) -> tuple[bytes, bytes]:
        line = self._line()
        if line[:1] == b"-":
            raise RefusedError(line[1:].decode("ascii", "replace"))
        return line[:1], line[1:]

    def _line(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\r\n"):
            if self._start == self._end:
                self._wait()
                self._start, self._end = 0, self._socket.recv_into(self._held)
                if not self._end:
                    raise BrokenError("the connection ended where a reply was due")
            held = bytes(self._held[self._start : self._end])
            stop = held.find(b"\n") + 1 or len(held)
            line += held[:stop]
            self._start += stop
            if len(line) > _LONGEST_LINE:
                raise BrokenError("a reply that is none of RESP's")
        self.used = True
        return bytes(line[:-2])

    def _begin(self) -> None:
        """Give the next step its own time."""
        self._late = monotonic() + self._seconds

    def _wait(self) -> None:
        """Let the next call on the socket wait until the step is late, and no longer."""
        left = self._late - monotonic()
        if left <= 0:
            raise TimeoutError(f"no whole reply within {self._seconds:.3g} s")
        self._socket.settimeout(min(left, _left()))


def _left() -> float:
    """Return the seconds until the batch's Deadline. Raises TimeoutError when it is over."""
    left = current().left(monotonic())
    if left <= 0:
        raise TimeoutError("the time that was given is over")
    return left


def _connected(place: Place, tls: ssl.SSLContext | None, seconds: float) -> socket.socket:
    if place.path:
        plain = socket.socket(socket.AF_UNIX)
        try:
            plain.settimeout(seconds)
            plain.connect(place.path)
        except BaseException:
            plain.close()
            raise
        return plain
    plain = socket.create_connection((place.host, place.port), seconds)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return plain if tls is None else tls.wrap_socket(plain, server_hostname=place.host)
    except BaseException:
        plain.close()
        raise


def _number(raw: bytes) -> int:
    text = raw.removeprefix(b"-")
    if not text.isdigit() or len(text) > _MOST_DIGITS:
        raise BrokenError("a reply that is none of RESP's")
    return int(raw)
