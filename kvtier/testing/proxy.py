"""A TCP proxy for HTTP on this host that adds round-trip time, and breaks answers on request."""

from __future__ import annotations

import asyncio
import enum
import random
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Self

_PIECE: Final = 1 << 18
_IN_FLIGHT: Final = 256  # pieces under way in one direction: enough that delay costs no bandwidth
_LENGTH: Final = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_ERROR: Final = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>%b</Code>'
    b"<Message>injected</Message></Error>"
)


class Fault(enum.Enum):
    """What becomes of a request."""

    NONE = "none"
    HANG = "hang"  # it is taken, and never answered
    RESET = "reset"  # the connection is reset in the middle of the body
    DRIP = "drip"  # the answer comes from its first byte on, a byte now and then
    TRICKLE = "trickle"  # the same, after the beginning of the body
    SHORT = "short"  # the connection ends in order after 100 bytes of the body
    UNAVAILABLE = "unavailable"  # 503 SlowDown
    HALF = "half"  # the same for one request of two, drawn by a seed
    DENIED = "denied"  # 403 AccessDenied
    CHANGED = "changed"  # 412 PreconditionFailed
    RACED = "raced"  # 409 ConditionalRequestConflict
    XML_ERROR = "xml-error"  # an XML error under status 200
    LESS = "less"  # status and range are right, and half of the bytes come, said to be all
    WRONG = "wrong"  # the same range of another object


_SAID: Final = {
    Fault.UNAVAILABLE: (b"503 Service Unavailable", _ERROR % b"SlowDown"),
    Fault.DENIED: (b"403 Forbidden", _ERROR % b"AccessDenied"),
    Fault.CHANGED: (b"412 Precondition Failed", _ERROR % b"PreconditionFailed"),
    Fault.RACED: (b"409 Conflict", _ERROR % b"ConditionalRequestConflict"),
    Fault.XML_ERROR: (b"200 OK", _ERROR % b"InternalError"),
}
_OF_AN_OBJECT: Final = (Fault.LESS, Fault.WRONG)
_RANGE: Final = re.compile(rb"\r\nrange:\s*bytes=(\d+)-(\d+)", re.IGNORECASE)
_AT_ONCE: Final = {Fault.DRIP: 0, Fault.TRICKLE: 4000}  # bytes before an answer slows down
_DRIP_SECONDS: Final = 0.02  # between two bytes
_BODY_BYTES: Final = {Fault.SHORT: 100, Fault.RESET: 2000}  # let through before the cut


CHAOS: Final = MappingProxyType(
    {
        Fault.UNAVAILABLE: 0.1,
        Fault.RESET: 0.03,
        Fault.SHORT: 0.03,
        Fault.XML_ERROR: 0.02,
        Fault.DENIED: 0.01,
        Fault.CHANGED: 0.01,
        Fault.RACED: 0.01,
        Fault.WRONG: 0.02,
        Fault.LESS: 0.02,
        Fault.HANG: 0.01,
    }
)
"""How often each fault meets a request in bad weather; three of four go well."""


class DelayProxy:
    """Forwards a loopback port to `target_port`, `delay_s` seconds of round-trip time away.

    The delay is latency: half on the way there, half on the way back, and what follows at once
    is not held up. ``inject`` breaks requests from then on, ``storm`` some of them. Runs an
    asyncio loop on one daemon thread between ``__enter__`` and ``__exit__``; use it from any
    thread.
    listener: a socket to accept at, in place of one on this host; it is closed at the end. tls: how
    it speaks TLS with its clients.
    """

    def __init__(
        self,
        target_port: int,
        delay_s: float = 0.0,
        listener: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.requests = 0
        self.broken: Counter[Fault] = Counter()
        self.host, self.port = "127.0.0.1", 0
        self._listener = listener
        self._tls = tls
        self._clients: dict[asyncio.StreamWriter, None] = {}
        self._target = target_port
        self._half = delay_s / 2
        self._rates: Mapping[Fault, float] = {}
        self._draw = random.Random(0)
        self._only = b""
        self._other = b""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-proxy", daemon=True)

    @property
    def endpoint(self) -> str:
        """The URL to use in place of the server's."""
        return f"{'https' if self._tls else 'http'}://{self.host}:{self.port}"

    def inject(self, fault: Fault, only: str = "", other: bytes = b"") -> None:
        """Apply `fault` to each request whose first line has `only` in it, from now on.

        other: the object that is there in place of the one that is asked for, for LESS and WRONG.
        """
        self.storm({fault: 1.0}, 0, only, other)

    def storm(
        self, rates: Mapping[Fault, float], seed: int, only: str = "", other: bytes = b""
    ) -> None:
        """Let faults meet requests by chance from now on; rates: of each, at most 1 in all."""
        self._rates, self._draw = rates, random.Random(seed)
        self._only, self._other = only.encode(), other

    def slow(self, delay_s: float) -> None:
        """Be so many seconds of round-trip time away, for connections from now on."""
        self._half = delay_s / 2

    def hang_up(self) -> None:
        """End all connections, in order; clients may come again. Blocks until it is done."""
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result(30.0)

    async def _hang_up(self) -> None:
        for writer in tuple(self._clients):
            writer.close()
        await asyncio.sleep(0)  # the loop ends what it was told to close in its next turn
        await asyncio.sleep(0)

    def _fault_of(self, head: bytes) -> Fault:
        """Draw what becomes of a request. On the loop."""
        if self._only not in head.split(b"\r\n", 1)[0]:
            return Fault.NONE
        left, found = self._draw.random(), Fault.NONE
        for fault, rate in self._rates.items():
            left -= rate
            if left < 0:
                found = fault
                break
        if found is Fault.HALF:
            found = Fault.UNAVAILABLE if self._draw.random() < 0.5 else Fault.NONE
        if found in _OF_AN_OBJECT and not _RANGE.search(head):
            found = Fault.NONE
        self.broken[found] += 1
        return found

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(30.0):
            raise RuntimeError("the proxy did not start within 30 s")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30.0)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        listener = self._listener or socket.create_server((self.host, 0))
        server = await asyncio.start_server(
            self._client, sock=listener, limit=_PIECE, ssl=self._tls
        )
        self.host, self.port = listener.getsockname()
        self._ready.set()
        await self._stop.wait()
        # Not wait_closed: clients may hold connections open. The runner cancels their tasks.
        server.close()
        for writer in self._clients:
            writer.transport.abort()  # by TLS a client would have to agree
        await asyncio.sleep(0)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        back: asyncio.Task[None] | None = None
        self._clients[writer] = None
        try:
            answers, there = await asyncio.open_connection("127.0.0.1", self._target, limit=_PIECE)
            link = _Link(self._half, writer)
            back = asyncio.create_task(link.answers(answers))
            await self._requests(reader, there, link)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side, or this proxy, has gone; the others learn of it below
        finally:
            del self._clients[writer]
            if back is not None:
                back.cancel()
            for each in (there, writer):
                if each is not None:
                    each.close()

    async def _requests(
        self, reader: asyncio.StreamReader, there: asyncio.StreamWriter, link: _Link
    ) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            length = _LENGTH.search(head)
            left = int(length[1]) if length else 0
            fault = self._fault_of(head)
            forward = fault is Fault.NONE or fault in _BODY_BYTES or fault in _AT_ONCE
            link.cut(fault)
            await asyncio.sleep(self._half)
            if forward:
                there.write(head)
            while left:
                piece = await reader.read(min(left, _PIECE))
                if not piece:
                    return
                left -= len(piece)
                if forward:
                    there.write(piece)
                    await there.drain()
            if fault in _SAID:
                await asyncio.sleep(self._half)
                await link.say(*_SAID[fault])
            if fault in _OF_AN_OBJECT:
                await link.show(head, self._other, less=fault is Fault.LESS)


class _Link:
    """The way back to one client: answers, held up by the delay and cut where told."""

    def __init__(self, delay_s: float, writer: asyncio.StreamWriter) -> None:
        self._delay = delay_s
        self._writer = writer
        self._fault = Fault.NONE
        self._seen = b""
        self._left = 0

    def cut(self, fault: Fault) -> None:
        """Say what is to become of the next answer."""
        self._fault, self._seen = fault, b""
        self._left = _AT_ONCE.get(fault, 0)

    async def say(self, status: bytes, body: bytes) -> None:
        """Answer in the server's place."""
        head = b"HTTP/1.1 %b\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n"
        self._writer.write(head % (status, len(body)) + body)
        await self._writer.drain()

    async def show(self, asked: bytes, other: bytes, *, less: bool) -> None:
        """Answer a ranged GET with the same range of another object, or with half of it."""
        found = _RANGE.search(asked)
        start, stop = (int(found[1]), int(found[2]) + 1) if found else (0, 0)
        body = other[start:stop].ljust(stop - start, b"?")
        if less:
            body = body[: len(body) // 2]
        total = max(len(other), stop)
        head = (
            b'HTTP/1.1 206 Partial Content\r\nETag: "other"\r\nContent-Length: %d\r\n'
            b"Content-Range: bytes %d-%d/%d\r\n\r\n"
        )
        self._writer.write(head % (len(body), start, stop - 1, total) + body)
        await self._writer.drain()

    async def answers(self, reader: asyncio.StreamReader) -> None:
        """Pass on what the server says until it, or the client, has gone."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_IN_FLIGHT)
        sending = asyncio.create_task(self._send(held))
        try:
            while piece := await reader.read(_PIECE):
                await held.put((time.monotonic() + self._delay, piece))
            await held.put((0.0, b""))
            await sending
        except OSError:
            self._writer.close()
        finally:
            sending.cancel()

    async def _send(self, held: asyncio.Queue[tuple[float, bytes]]) -> None:
        while True:
            due, piece = await held.get()
            await asyncio.sleep(due - time.monotonic())
            if self._fault in _BODY_BYTES:
                self._seen += piece
                head, found, body = self._seen.partition(b"\r\n\r\n")
                length = _LENGTH.search(head)
                most = min(_BODY_BYTES[self._fault], int(length[1]) // 2 if length else 0)
                if found and len(body) >= most:
                    await self._end(head + found + body[:most])
                    return
                continue
            if not piece:
                self._writer.close()
                return
            if self._fault in _AT_ONCE:
                piece = await self._drip(piece)
            self._writer.write(piece)
            await self._writer.drain()

    async def _drip(self, piece: bytes) -> bytes:
        """Send what is beyond the beginning byte by byte; return what comes at once."""
        at_once, rest = piece[: self._left], piece[self._left :]
        self._left -= len(at_once)
        self._writer.write(at_once)
        for byte in rest:
            self._writer.write(bytes((byte,)))
            await self._writer.drain()
            await asyncio.sleep(_DRIP_SECONDS)
        return b""

    async def _end(self, last: bytes) -> None:
        self._writer.write(last)
        await self._writer.drain()
        if self._fault is Fault.RESET:
            await asyncio.sleep(0.01)  # a reset at once would also discard what was just written
            self._writer.transport.abort()
        else:
            self._writer.close()
