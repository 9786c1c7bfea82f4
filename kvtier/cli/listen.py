"""``kvtier status --listen``: a daemon's metrics and health over HTTP, from a process of its own.

So the daemon itself opens no port, and whoever asks too much slows down nobody but this.
"""

from __future__ import annotations

import functools
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import click
import msgspec

from kvtier.daemon.status import ask_status
from kvtier.errors import ConfigError, KvtierError
from kvtier.metrics import exposition

__all__ = ["listen_at"]

_SECONDS: Final = 5.0
_MOST_PORT: Final = 65535
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_JSON: Final = "application/json"


def listen_at(where: str, path: str) -> int:
    """Answer until the process is interrupted. Raises ConfigError for no such place."""
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _MOST_PORT:
        raise ConfigError(f"{where!r} is no HOST:PORT, such as 127.0.0.1:9477")
    host = host.removeprefix("[").removesuffix("]")
    try:
        server = ThreadingHTTPServer((host, int(port)), functools.partial(_Handler, path))
    except OSError as error:  # also of a name that cannot be resolved
        raise ConfigError(
            f"cannot listen at {where}: {error.strerror or error}; choose another"
        ) from error
    with server:
        shown, number = server.server_address[:2]
        click.echo(f"ready: http://{shown!s}:{number}/metrics")
        server.serve_forever()
    return 0


class _Handler(BaseHTTPRequestHandler):
    """One request. path: of the daemon's socket."""

    timeout = _SECONDS  # or who connects and says nothing keeps a thread

    def __init__(self, path: str, *args: Any) -> None:
        self._socket = path
        super().__init__(*args)

    def do_GET(self) -> None:
        """Answer /metrics and /health; 503 where no daemon does, or, of health, a tier ails."""
        if self.path not in ("/metrics", "/health"):
            self._answer(HTTPStatus.NOT_FOUND, _TEXT, "there are /metrics and /health\n")
            return
        try:
            found = ask_status(self._socket, _SECONDS)
        except (KvtierError, OSError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{error}\n")
            return
        if self.path == "/metrics":
            self._answer(HTTPStatus.OK, _TEXT, "\n".join((*exposition(found.figures), "")))
            return
        state = HTTPStatus.SERVICE_UNAVAILABLE if found.troubles else HTTPStatus.OK
        said = {"generation": found.generation, "troubles": found.troubles}
        self._answer(state, _JSON, msgspec.json.encode(said).decode() + "\n")

    def _answer(self, state: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(state)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base's name)
        """Say nothing of what went well."""
