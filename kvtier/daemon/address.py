"""Where a daemon is, and how to talk to it: ``unix:PATH?option=value``."""

from __future__ import annotations

import os
from typing import Any, Final, NamedTuple

from kvtier.config import parse_options
from kvtier.errors import ConfigError, unknown
from kvtier.units import parse_seconds

__all__ = ["SCHEME", "Place", "check_path", "parse_place"]

SCHEME: Final = "unix:"
_MOST_BYTES: Final = 107  # sun_path of sockaddr_un, unix(7), less the zero that ends it
_MOST_NAME: Final = 256


class Place(NamedTuple):
    """path: of the socket. engine: that is served; its ranks name the same.

    patience: seconds that a call on an engine's thread waits for the daemon. timeout: seconds to
    wait for the daemon to be there.
    """

    path: str
    engine: str = ""
    patience: float = 0.02
    timeout: float = 10.0


def parse_place(url: str) -> Place:
    """Read a daemon's URL. Raises ConfigError, naming the nearest valid option."""
    rest = url.removeprefix(SCHEME)
    path, mark, query = rest.rpartition("?")
    path, query = (path, query) if mark else (rest, "")
    options: dict[str, Any] = dict(parse_options(url, query))
    for name, text in options.items():
        if name not in Place._fields[1:]:
            raise unknown("option of unix", name, Place._fields[1:])
        if name != "engine":
            options[name] = parse_seconds(text)
    if len(options.get("engine", "").encode()) > _MOST_NAME:
        raise ConfigError(f"an engine's name has {_MOST_NAME} bytes at most")
    check_path(path)
    return Place(path, **options)


def check_path(path: str) -> None:
    """Raise ConfigError for what can be no socket's path."""
    if not path or "\0" in path:
        raise ConfigError(f"unix needs the path of a daemon's socket, not {path!r}")
    size = len(os.fsencode(path))
    if size > _MOST_BYTES:
        raise ConfigError(
            f"a socket's path has {_MOST_BYTES} bytes at most, and this one {size}; use a shorter "
            f"one, such as /run/kvtier/kv.sock: {path}"
        )
