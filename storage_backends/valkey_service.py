"""The Valkey service behind the store: how it is named and opened, and what its words mean."""

from __future__ import annotations

import os
import secrets
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from kvtier.errors import ConfigError, Corrupt, check_known
from kvtier.storage_backends.valkey_link import BrokenError, Credentials, Link, Place, RefusedError
from kvtier.tiers.store import Option, Status, unusable

KEY: Final = "kvtier:"
"""What the names of our keys begin with."""

_PORT: Final = 6379
_MOST_DATABASES: Final = 1 << 16
_USER: Final = "KVTIER_VALKEY_USER"
_PASSWORD: Final = "KVTIER_VALKEY_PASSWORD"  # noqa: S105  (the name of a variable)
CREDENTIALS: Final = f"set {_PASSWORD}, and {_USER} for a user of an ACL"
_EXAMPLE: Final = "valkey://host:6379/0?capacity=64GiB"
_RIGHTS: Final = f"let this user GETRANGE, GET, SET, DEL, STRLEN, SCAN and INFO, on {KEY}*"
_REMEDIES: Final = {
    "NOAUTH": f"it asks for a password: {CREDENTIALS}",
    "WRONGPASS": f"user and password do not belong together: {CREDENTIALS}",
    "NOPERM": _RIGHTS,
    "DENIED": "it takes connections of its own host only: give it a password, or bind it",
    "READONLY": "it is a replica: name its primary",
    "MOVED": "it is part of a cluster: name a server that is alone",
    "CLUSTERDOWN": "it is part of a cluster: name a server that is alone",
    "LOADING": "it reads its data from the disk: wait",
    "MISCONF": "it cannot write its snapshots: see its log",
    "MASTERDOWN": "it is a replica without its primary: name the primary",
    "OOM": "raise its maxmemory, or set maxmemory-policy to allkeys-lru",
}
weather: Final = (OSError, BrokenError, RefusedError, Corrupt)
"""What a network and a server can cause. Any other error is a bug here."""


class Settings(NamedTuple):
    """The values of the store's options. Timeouts are seconds; tls: whether, or a CA's file."""

    timeout: float
    connect_timeout: float
    tls: str

    @classmethod
    def read(cls, values: Mapping[str, Any], known: Mapping[str, Option]) -> Settings:
        """Take the options that were given, and defaults. Raises ConfigError for unknown ones."""
        check_known("option of valkey", values, known, CREDENTIALS)
        return cls(**{name: values.get(name, known[name].default) for name in cls._fields})


class Server(NamedTuple):
    """What a server says of itself; maxmemory: bytes, 0 for no limit, None if it does not say."""

    maxmemory: int | None
    policy: str

    @property
    def evicts(self) -> bool:
        """Say whether keys may go by themselves."""
        return self.policy != "noeviction"


def parse_tls(text: str) -> str:
    """Return ``no``, ``yes``, or the path of a file with the authorities to trust."""
    if text not in ("no", "yes") and not Path(text).is_absolute():
        raise ConfigError(f"tls={text!r} is neither no nor yes nor the path of a CA's file")
    return text


def parse_location(location: str) -> Place:
    """Read ``//host:port/database`` or ``///path``. Raises ConfigError, and repeats no password."""
    if "@" in location:
        raise ConfigError(f"credentials do not belong in a URL; {CREDENTIALS}")
    if location.startswith("///") and len(location) > len("///"):
        return Place("", 0, location.removeprefix("//"), 0)
    try:
        url = urlsplit(location)
        host, port, database = url.hostname, url.port or _PORT, url.path.strip("/") or "0"
    except ValueError:
        host, port, database = None, 0, ""
    number = int(database) if database.isdecimal() and database.isascii() else _MOST_DATABASES
    if not location.startswith("//") or not host or number >= _MOST_DATABASES or url.fragment:
        raise ConfigError(
            f"{location!r} names no server; write the tier like {_EXAMPLE}, or with a socket like "
            f"valkey:///run/valkey.sock?capacity=64GiB"
        )
    return Place(host, port, "", number)


def credentials() -> Credentials:
    """Return what the environment says of who connects."""
    return Credentials(os.environ.get(_USER, ""), os.environ.get(_PASSWORD, ""))


def context(tls: str, place: Place) -> ssl.SSLContext | None:
    """Return how TLS is spoken, None for not at all. Raises ConfigError."""
    if tls == "no":
        return None
    if place.path:
        raise ConfigError("a Unix socket has no TLS; leave tls= out")
    try:
        return ssl.create_default_context(cafile=None if tls == "yes" else tls)
    except OSError as error:
        raise ConfigError(f"tls={tls}: {error}; name a file of certificates in PEM") from error


def connector(place: Place, settings: Settings) -> Any:
    """Return what makes a Link: a call without arguments."""
    who, tls = credentials(), context(settings.tls, place)
    return lambda: Link(place, who, tls, settings.connect_timeout, settings.timeout)


def meet(link: Link, place: Place) -> Server:
    """Look whether a server can be used, and what it says of itself. Raises ConfigError."""
    said = _info(link)
    if said.get("cluster_enabled", "0") != "0":
        raise ConfigError(f"{place}: {_REMEDIES['MOVED']}")
    if said.get("role", "master") != "master":
        raise ConfigError(f"{place}: {_REMEDIES['READONLY']}")
    probe = f"{KEY}selftest:{secrets.token_hex(8)}"
    try:
        link.ask("SET", probe, b"kvtier", "PX", "10000")
    except RefusedError as error:
        if error.code != "OOM":  # it is full, and can be read
            raise
    link.ask("GETRANGE", probe, "0", "255")
    link.ask("STRLEN", probe)
    link.ask("SCAN", "0", "MATCH", probe, "COUNT", "1")
    link.ask("DEL", probe)
    limit = said.get("maxmemory", "")
    return Server(int(limit) if limit.isdigit() else None, said.get("maxmemory_policy", ""))


def _info(link: Link) -> dict[str, str]:
    """Return what the server says of itself; nothing if this user may not ask."""
    try:
        said = link.ask("INFO")
    except RefusedError as error:
        if error.code != "NOPERM":
            raise
        return {}
    if not isinstance(said, bytes):
        raise BrokenError("INFO was not answered with a text")
    pairs = (line.partition(":") for line in said.decode("utf-8", "replace").splitlines())
    return {name: value.strip() for name, mark, value in pairs if mark}


def status_of(error: Exception) -> Status:
    """Return the status that an error stands for."""
    if isinstance(error, Corrupt):
        return unusable(error)
    if isinstance(error, RefusedError):
        return {"OOM": Status.FULL, "WRONGTYPE": Status.CORRUPT}.get(error.code, Status.FAILED)
    return Status.FAILED


def refused(error: Exception) -> bool:
    """Say whether an error is about the server, not about one record."""
    if isinstance(error, RefusedError):
        return error.code in _REMEDIES and error.code != "OOM"
    return isinstance(error, OSError)


def unreached(error: Exception) -> bool:
    """Say whether nobody answered, or a server that is not ready yet: later it may be."""
    if isinstance(error, RefusedError):
        return error.code == "LOADING"
    return isinstance(error, OSError) and not isinstance(error, (ssl.SSLError, PermissionError))


def cause_of(error: Exception) -> str:
    """Return a word or two for an error, of which there are few: a metric has one row for each."""
    if isinstance(error, Corrupt):
        return error.cause
    if isinstance(error, RefusedError):
        return error.code if error.code in _REMEDIES else "refused"
    return "broken answer" if isinstance(error, BrokenError) else type(error).__name__


def explain(error: Exception) -> str:
    """Return cause and, where one is known, remedy, in one line."""
    cause = " ".join(str(error).split()) or type(error).__name__
    remedy = ""
    if isinstance(error, RefusedError):
        remedy = _REMEDIES.get(error.code, "")
    elif isinstance(error, BrokenError):
        remedy = "is it a Valkey or Redis server, and does it want tls=yes?"
    elif isinstance(error, ssl.SSLCertVerificationError):
        remedy = "name the authority that signed its certificate by tls=/path/ca.pem"
    elif isinstance(error, ssl.SSLError) or "handshake" in cause:
        remedy = "nothing that speaks TLS answers there: check the port, or leave tls= out"
    elif isinstance(error, socket.gaierror):
        remedy = "check the name for a typing error"
    elif isinstance(error, OSError):
        remedy = "check host and port, and that the server runs"
    return f"{cause}; {remedy}" if remedy else cause
