"""Requests to an S3 service and their answers, by http.client, over connections that are kept.

boto3 signs, names and parses; what it would send comes here, as do the GETs of ``s3_get``. Its own
sessions know no deadline, and take half a millisecond of a core a request more.

What is tried again: a request that the server refused for now (a 5xx or 429), or dropped before
it answered, once, after a pause of full jitter. Not if pause and a try as long as the first would
end after the batch's Deadline, or after the time that the server may be silent. See "Exponential
Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import contextlib
import functools
import random
import ssl
import threading
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse, IncompleteRead
from typing import Any, Final, NamedTuple, Self
from urllib.parse import SplitResult, unquote, urlsplit

from kvtier.clock import Clock, monotonic
from kvtier.deadline import Deadline, current
from kvtier.errors import ConfigError
from kvtier.events import Causes
from kvtier.storage_backends.s3_errors import BrokenError
from kvtier.storage_backends.s3_wire import Door, Wire, connected

_PAUSE_SECONDS: Final = 0.2  # at most, before the second try
_SLOWEST: Final = 4.0  # silences that one answer may take
_HELD_BYTES: Final = 64 << 20  # of an answer that is held whole: a list, an error
_PORTS: Final = {"http": 80, "https": 443}


class Request(NamedTuple):
    """What is sent: signed, whole. headers: without Host and Content-Length."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: memoryview = memoryview(b"")


class Answer:
    """What the server answers with: its body is read once, then it is closed."""

    def __init__(self, response: HTTPResponse, wire: Wire, keep: Callable[[Wire], None]) -> None:
        self.status = response.status
        self.headers = response.headers
        self.range: str = response.headers.get("Content-Range", "")
        self.etag: str = response.headers.get("ETag", "")
        self._response = response
        self._wire = wire
        self._keep = keep

    def fill(self, into: memoryview) -> None:
        """Read the next bytes. Raises BrokenError when there are not so many, or not in time."""
        with _reading():
            got = self._response.readinto(into) if len(into) else 0
        if got < len(into):
            raise BrokenError(f"the answer ended after {got} of {len(into)} bytes")

    def spread(self, into: Sequence[memoryview]) -> None:
        """Read the next bytes into buffers in turn, with few system calls. Raises as ``fill``."""
        response, wanted = self._response, sum(map(len, into))
        if not wanted or response.length is None or response.length < wanted:
            for view in into:
                self.fill(view)
            return
        with _reading():
            early, late = _cut(into, len(response.fp.peek()))  # what came with the headers
        for view in early:
            self.fill(view)
        if late:
            with _reading():
                got = self._wire.spread(late)
            response.length -= got
            if not response.length:
                response.close()  # as it does itself after its last byte
            if got < sum(map(len, late)):
                raise BrokenError(f"the answer ended {response.length} bytes too early")

    def all(self) -> bytes:
        """Read all of a small body. Raises BrokenError when it does not come whole."""
        with _reading():
            body = self._response.read(_HELD_BYTES)
        if self._response.length:
            raise BrokenError(f"the answer ended after {len(body)} bytes, or has too many")
        return body

    def close(self) -> None:
        """Keep the connection if all was read, or end it. Idempotent."""
        if self._response.isclosed() and not self._response.will_close:
            self._keep(self._wire)
        else:
            self._wire.close()
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut(views: Sequence[memoryview], at: int) -> tuple[list[memoryview], list[memoryview]]:
    """Return what of views is before that byte, and what comes after."""
    before: list[memoryview] = []
    for index, view in enumerate(views):
        if at < len(view):
            return [*before, view[:at]], [view[at:], *views[index + 1 :]]
        before.append(view)
        at -= len(view)
    return before, []


class Sender:
    """Sends to one service. Thread-safe; each call blocks, no longer than the batch's Deadline.

    timeouts: for a connection, and for the silence of the server. most: connections kept. trusted:
    a file with the authorities to trust; empty for the usual ones. proxies: by scheme. clock,
    sleep, draw: what time and chance come from.
    counts: of requests sent, by the kind that is paid for.
    """

    def __init__(
        self,
        timeouts: tuple[float, float],
        most: int,
        trusted: str,
        proxies: Mapping[str, str],
        *,
        clock: Clock = monotonic,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._timeouts = timeouts
        self._most = most
        self._trusted = trusted
        self._proxies = {scheme: _proxy(url) for scheme, url in proxies.items()}
        self.counts = Causes()
        self._clock, self._sleep, self._draw = clock, sleep, draw
        self._lock = threading.Lock()
        self._idle: dict[Door, deque[Wire]] = {}
        self._closed = False

    def send(self, request: Request) -> Answer:
        """Send a request, and return the answer once its headers are there.

        Raises what botocore raises for connections that fail, LateError and BrokenError.
        """
        deadline, begun = current(), self._clock()
        refusal: Answer | None = None
        try:
            answer = self._try(request, deadline)
            if not _refused_for_now(answer.status):
                return answer
            refusal = answer
        except Exception as error:
            if not self._again(deadline, begun, error):
                raise
        else:
            if not self._again(deadline, begun, None):
                return refusal
        if refusal is not None:
            with refusal:
                refusal.all()
        return self._try(request, deadline)

    def _again(self, deadline: Deadline, begun: float, error: Exception | None) -> bool:
        """Say whether to try again, after the pause that this takes."""
        from botocore.exceptions import ConnectionClosedError

        if error is not None and not isinstance(error, ConnectionClosedError):
            return False  # who is silent has had its time
        now = self._clock()
        pause = self._draw(0.0, _PAUSE_SECONDS)  # hosts must not come at once
        if now + pause - begun > self._timeouts[1] or deadline.left(now) < pause + now - begun:
            return False
        self._sleep(pause)
        return True

    def _try(self, request: Request, deadline: Deadline) -> Answer:
        url = urlsplit(request.url)
        proxy = self._proxies.get(url.scheme)
        door, head = _addressed(request, url, proxy)
        self.counts.note(_kind(request, url.query))
        by = f" by the proxy {_host('http', *proxy.place)}" if proxy else ""
        with _connecting(_where(request.url) + by):
            wire = self._taken(door, deadline)
        try:
            with _exchanging(request.url):
                return self._exchanged(wire, door, request, head, deadline)
        except BaseException:
            wire.close()
            raise

    def _exchanged(
        self, wire: Wire, door: Door, request: Request, head: bytes, deadline: Deadline
    ) -> Answer:
        wire.begin(deadline)
        response = HTTPResponse(wire.as_socket(), method=request.method)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            wire.send([memoryview(head), request.body])
        # Who hung up meanwhile may have said why.
        wire.begin(deadline, _SLOWEST * self._timeouts[1])
        response.begin()
        return Answer(response, wire, functools.partial(self._keep, door))

    # ---- connections

    def _taken(self, door: Door, deadline: Deadline) -> Wire:
        while True:
            with self._lock:
                idle = self._idle.get(door)
                wire = idle.pop() if idle else None
            if wire is None:
                return connected(door, deadline, self._timeouts, self._tls, self._clock)
            if not wire.dropped():
                return wire
            wire.close()

    def _keep(self, door: Door, wire: Wire) -> None:
        with self._lock:
            idle = self._idle.setdefault(door, deque())
            if not self._closed and len(idle) < self._most:
                idle.append(wire)
                return
        wire.close()

    @functools.cached_property
    def _context(self) -> ssl.SSLContext:
        from botocore.httpsession import get_cert_path

        context = ssl.create_default_context(cafile=get_cert_path(self._trusted or True))
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # as botocore, for private authorities
        return context

    def _tls(self) -> ssl.SSLContext:
        with self._lock:  # it takes tens of milliseconds to make
            return self._context

    def close(self) -> None:
        """End the connections; those in use when their answer is closed. Idempotent."""
        with self._lock:
            self._closed = True
            wires = [wire for idle in self._idle.values() for wire in idle]
            self._idle.clear()
        for wire in wires:
            wire.close()

    # ---- what boto3 asks

    def serve(self, client: Any) -> None:
        """Send from now on what a boto3 client would; its answers are held whole."""
        client.meta.events.register("before-send.s3", self._sent)

    def _sent(self, request: Any, **_: object) -> Any:
        from botocore.awsrequest import AWSResponse

        headers = {
            name: value.decode("latin-1") if isinstance(value, bytes) else str(value)
            for name, value in request.headers.items()
            if name.lower() not in ("content-length", "expect")  # neither is signed
        }
        body = request.body
        if body is not None and not isinstance(body, (bytes, bytearray)):
            body = body.encode() if isinstance(body, str) else body.read()
        whole = Request(request.method, request.url, headers, memoryview(body or b""))
        with self.send(whole) as answer:
            held = _Held(answer.all())
        return AWSResponse(request.url, answer.status, answer.headers, held)


class _Held:
    """The body of an answer, for botocore."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self) -> Iterator[bytes]:
        yield self.read()

    def read(self, most: int | None = None) -> bytes:
        found, self._body = self._body[:most], b"" if most is None else self._body[most:]
        return found

    def close(self) -> None:
        self._body = b""


class _Proxy(NamedTuple):
    place: tuple[str, int]
    pass_on: tuple[tuple[str, str], ...]


def _proxy(text: str) -> _Proxy:
    """Return where a proxy is. Raises ConfigError, which repeats no password."""
    url = urlsplit(text if "://" in text else f"http://{text}")
    if url.scheme != "http" or not url.hostname:
        raise ConfigError(
            "the proxy that HTTP_PROXY or HTTPS_PROXY names is not used by http: name it like "
            "http://host:port, or name the S3 endpoint in NO_PROXY"
        )
    pass_on: tuple[tuple[str, str], ...] = ()
    if url.username and url.password:
        who = f"{unquote(url.username)}:{unquote(url.password)}".encode()
        pass_on = (("Proxy-Authorization", f"Basic {b64encode(who).decode()}"),)
    return _Proxy((url.hostname, url.port or _PORTS["http"]), pass_on)


def _host(scheme: str, host: str, port: int) -> str:
    name = f"[{host}]" if ":" in host else host
    return name if port == _PORTS[scheme] else f"{name}:{port}"


def _addressed(request: Request, url: SplitResult, proxy: _Proxy | None) -> tuple[Door, bytes]:
    """Return where to connect to for a request, and its head.

    A proxy is told the whole URL, and who asks, in the head; by TLS it only connects.
    """
    tls = url.scheme == "https"
    host, port = url.hostname or "", url.port or _PORTS[url.scheme]
    door = Door(host, port, tls, proxy and proxy.place, proxy.pass_on if proxy and tls else ())
    target = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
    fields = [("Host", _host(url.scheme, host, port)), *request.headers.items()]
    if proxy is not None and not tls:
        target = f"{url.scheme}://{url.netloc}{target}"
        fields += proxy.pass_on
    if request.body or request.method in ("PUT", "POST"):
        fields.append(("Content-Length", str(len(request.body))))
    lines = [f"{request.method} {target} HTTP/1.1", *(f"{key}: {value}" for key, value in fields)]
    return door, "\r\n".join([*lines, "", ""]).encode("latin-1")


def _kind(request: Request, query: str) -> str:
    """Return what a request is paid for as; many are deleted by a POST."""
    if request.method == "GET" and "list-type=" in query:
        return "LIST"
    return "DELETE" if request.method == "POST" else request.method


def _refused_for_now(status: int) -> bool:
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS


@contextlib.contextmanager
def _connecting(where: str) -> Iterator[None]:
    """Let what fails while connecting be called as botocore calls it."""
    from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError, SSLError

    try:
        yield
    except TimeoutError as error:
        raise ConnectTimeoutError(endpoint_url=where, error=error) from error
    except ssl.SSLError as error:
        raise SSLError(endpoint_url=where, error=error) from error
    except (OSError, HTTPException) as error:
        raise EndpointConnectionError(endpoint_url=where, error=error) from error


@contextlib.contextmanager
def _exchanging(url: str) -> Iterator[None]:
    """Do so for what fails before there is an answer."""
    from botocore.exceptions import ConnectionClosedError, ReadTimeoutError

    where = _where(url)
    try:
        yield
    except TimeoutError as error:
        raise ReadTimeoutError(endpoint_url=where, error=error) from error
    except (OSError, HTTPException) as error:
        raise ConnectionClosedError(endpoint_url=where, error=error) from error


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """And for what fails while the body comes."""
    from botocore.exceptions import ReadTimeoutError

    try:
        yield
    except TimeoutError as error:
        raise ReadTimeoutError(endpoint_url="the server", error=error) from error
    except IncompleteRead as error:
        raise BrokenError(f"the answer ended after {len(error.partial)} bytes") from error
    except (OSError, HTTPException) as error:
        raise BrokenError(f"the answer broke off: {error}") from error


def _where(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
