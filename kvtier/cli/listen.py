"""``kvtier status --listen``: a daemon's metrics and health over HTTP, from a process of its own.

So the daemon itself opens no port. It is asked once a second at most, whoever asks how often.
"""

from __future__ import annotations

import functools
import socket
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import click
import msgspec

from kvtier.daemon.status import Status, ask_status
from kvtier.errors import ConfigError, KvtierError
from kvtier.metrics import exposition

_SECONDS: Final = 5.0
_FRESH_SECONDS: Final = 1.0
_MOST_PORT: Final = 65535
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_JSON: Final = "application/json"


def listen_at(where: str, path: str) -> int:
    """Answer until the process is interrupted. Raises ConfigError for no such place."""
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _MOST_PORT:
        raise ConfigError(f"{where!r} is no HOST:PORT, such as 127.0.0.1:9477")
    try:
        server = Listener(host.removeprefix("[").removesuffix("]"), int(port), path)
    except OSError as error:  # also of a name that cannot be resolved
        raise ConfigError(
            f"cannot listen at {where}: {error.strerror or error}; choose another"
        ) from error
    with server:
        shown, number = server.server_address[:2]
        click.echo(f"ready: http://{shown!s}:{number}/metrics")
        server.serve_forever()
    return 0


class Listener(ThreadingHTTPServer):
    """Listens at `host` and `port` for the daemon whose socket is at `path`. Raises OSError."""

    def __init__(self, host: str, port: int, path: str) -> None:
        self._asking = threading.Lock()
        self._last: tuple[float, Status] | None = None
        self._path = path
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), functools.partial(_Handler, self.status))

    def status(self) -> Status:
        """Return what the daemon said within the last second. Raises KvtierError, OSError."""
        with self._asking:
            if self._last is None or time.monotonic() - self._last[0] > _FRESH_SECONDS:
                self._last = time.monotonic(), ask_status(self._path, _SECONDS)
            return self._last[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has gone, as one does whose time is over."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One request. status: says how the daemon is."""

    timeout = _SECONDS  # or who connects and says nothing keeps a thread

    def __init__(self, status: Callable[[], Status], *args: Any) -> None:
        self._status = status
        super().__init__(*args)

    def do_GET(self) -> None:
        """Answer /metrics, /health and /alive; 503 where no daemon does.

        /health is 503 also where a tier is not served.
        """
        path = self.path.partition("?")[0]
        if path not in ("/metrics", "/health", "/alive"):
            self._answer(HTTPStatus.NOT_FOUND, _TEXT, "there are /metrics, /health and /alive\n")
            return
        try:
            found = self._status()
        except (KvtierError, OSError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{error}\n")
            return
        if path == "/metrics":
            self._answer(HTTPStatus.OK, _TEXT, "\n".join((*exposition(found.figures), "")))
            return
        ails = path == "/health" and found.troubles
        said = {"generation": found.generation, "troubles": found.troubles}
        self._answer(
            HTTPStatus.SERVICE_UNAVAILABLE if ails else HTTPStatus.OK,
            _JSON,
            msgspec.json.encode(said).decode() + "\n",
        )

    def _answer(self, state: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(state)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base's name)
        """Say nothing of what went well."""
