"""Where a daemon is, and how to talk to it: ``unix:PATH?option=value``."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from kvtier.config import parse_options
from kvtier.daemon.place import check_path
from kvtier.errors import ConfigError, unknown
from kvtier.units import parse_seconds

SCHEME: Final = "unix:"
PATIENCE: Final = 0.02
TIMEOUT: Final = 10.0
_MOST_NAME: Final = 256


class Address(NamedTuple):
    """path: of the socket. engine: that is served; its ranks name the same.

    patience: seconds that a call on an engine's thread waits for the daemon. timeout: seconds to
    wait for the daemon to be there.
    """

    path: str
    engine: str = ""
    patience: float = PATIENCE
    timeout: float = TIMEOUT


def parse_address(url: str) -> Address:
    """Read a daemon's URL. Raises ConfigError, naming the nearest valid option."""
    rest = url.removeprefix(SCHEME)
    path, mark, query = rest.rpartition("?")
    path, query = (path, query) if mark else (rest, "")
    options: dict[str, Any] = dict(parse_options(url, query))
    for name, text in options.items():
        if name not in Address._fields[1:]:
            raise unknown("option of unix", name, Address._fields[1:])
        if name != "engine":
            options[name] = parse_seconds(text)
    if len(options.get("engine", "").encode()) > _MOST_NAME:
        raise ConfigError(f"an engine's name has {_MOST_NAME} bytes at most")
    return Address(str(check_path(path)), **options)
