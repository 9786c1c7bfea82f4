"""Which daemons one ``kvtier serve`` runs: one, or one for each principal of a config file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvtier.catalog.owners import Quota
from kvtier.checks import check_kind, check_whole
from kvtier.config import parse_tier, quotas_of, read_toml, urls_of
from kvtier.daemon.place import check_path, real_path, runtime_folder
from kvtier.daemon.settings import Settings
from kvtier.errors import ConfigError, check_known
from kvtier.recorder import RECORD_BYTES, Recording
from kvtier.units import parse_bytes

_RECORD: Final = ("record", "record_size", "record_salt")
_TABLES: Final = ("tiers", "tenants", "socket", "principals", *_RECORD)
_PRINCIPAL: Final = ("uid", "socket", "tiers")
_MOST_SALT: Final = 1 << 20
_MOST_UID: Final = (1 << 32) - 2
_NOTHING: Final[Mapping[str, object]] = {}


@dataclass(frozen=True, slots=True)
class Principal:
    """One trust domain, with a socket, an arena and a server of its own. name: as configured."""

    name: str
    path: Path
    settings: Settings


def default_path() -> Path:
    """Return where a daemon listens that is not told: ``kv.sock`` in this user's folder."""
    return check_path(runtime_folder() / "kv.sock")


def of_urls(
    urls: Sequence[str], path: str | Path | None, record: Mapping[str, object] = _NOTHING
) -> Principal:
    """Return this user's own daemon. record: as in the file. Raises ConfigError."""
    settings = Settings(tuple(urls), os.geteuid(), record=_recording(record, "this daemon"))
    settings.config()
    return Principal("", check_path(path) if path is not None else default_path(), settings)


def of_file(
    file: Path, path: str | Path | None, record: Mapping[str, object] = _NOTHING
) -> list[Principal]:
    """Read the daemons of a TOML file; path, record: what goes before the file's.

    It has ``tiers``, ``tenants``, ``socket``, ``record``, ``record_size`` and ``record_salt``, or
    a table ``[principals.NAME]`` for each principal, with ``uid``, ``socket`` and ``tiers``, and
    what is to be recorded. Raises ConfigError.
    """
    data = read_toml(file, _TABLES)
    quotas = quotas_of(data, file)
    recorded = {name: data[name] for name in _RECORD if name in data}
    if "principals" not in data:
        at = path if path is not None else _socket(data, file)
        one = of_urls(urls_of(data, file), at, recorded | dict(record))
        return [Principal("", one.path, _with(one.settings, quotas))]
    tables = data["principals"]
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(f"principals of {file} are tables, such as [principals.NAME]")
    both: list[str] = [name for name in ("tiers", "socket", *_RECORD) if name in data]
    both += ["--socket"] * (path is not None)
    both += [f"--{name.replace('_', '-')}" for name in record]
    if both:
        raise ConfigError(
            f"{file} has principals, so each of them has its own tiers, socket and recording; take "
            f"{' and '.join(both)} away"
        )
    found = [_principal(name, table, quotas) for name, table in tables.items()]
    _check_apart(found)
    return found


def _principal(name: str, table: object, quotas: Mapping[str, Quota]) -> Principal:
    where = f"principal {name!r}"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} needs a table with uid, socket and tiers")
    check_known(f"option of {where}", table, (*_PRINCIPAL, *_RECORD))
    for option in _PRINCIPAL:
        if option not in table:
            raise ConfigError(f"{where} has no {option}; it needs uid, socket and tiers")
    check_whole(f"the uid of {where}", table["uid"], 0, _MOST_UID, ConfigError)
    socket = _socket(table, where)
    settings = Settings(tuple(urls_of(table, where)), table["uid"], record=_recording(table, where))
    return Principal(name, check_path(socket or ""), _with(settings, quotas))


def _recording(table: Mapping[str, object], where: str) -> Recording | None:
    """Return what is to be recorded where; None where nothing is. Raises ConfigError."""
    given = {name: table[name] for name in _RECORD if name in table}
    for name, value in given.items():
        check_kind(f"{name} of {where}", value, str, ConfigError)
    path, size, salt = (str(given.get(name, "")) for name in _RECORD)
    if "record" not in given:
        if given:
            raise ConfigError(f"{min(given)} of {where} is of a recording; name its file: record")
        return None
    salted = "record_salt" in given
    return Recording(
        os.path.abspath(path),  # noqa: PTH100  (resolve would follow links)
        parse_bytes(size) if "record_size" in given else RECORD_BYTES,
        _salt(salt) if salted else b"",
        os.path.abspath(salt) if salted else "",  # noqa: PTH100
    ).check()


def _salt(path: str) -> bytes:
    """Return what a file holds, whatever white space is around it. Raises ConfigError."""
    try:
        with Path(path).open("rb") as file:
            found = file.read(_MOST_SALT).strip()
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"the salt of the recording cannot be read from {path} ({cause}); make the file, such "
            f"as by: openssl rand -hex 16 > {path}"
        ) from error
    if not found:
        raise ConfigError(f"{path} is empty, and no salt: openssl rand -hex 16 > {path}")
    return found


def _with(settings: Settings, quotas: Mapping[str, Quota]) -> Settings:
    """Return settings with quotas, checked."""
    whole = msgspec.structs.replace(settings, quotas=quotas)
    whole.config()
    return whole


def _socket(table: Mapping[str, object], where: object) -> str | None:
    path = table.get("socket")
    if path is None or isinstance(path, str):
        return path
    raise ConfigError(f"the socket of {where} is a path, not {path!r}")


def _check_apart(found: Sequence[Principal]) -> None:
    """Raise ConfigError for two principals that would meet."""
    users: dict[int, str] = {}
    paths: dict[str, str] = {}
    recorders: dict[str, str] = {}
    for one in found:
        user = users.setdefault(one.settings.uid, one.name)
        path = paths.setdefault(real_path(one.path), one.name)
        record = one.settings.record
        recorder = recorders.setdefault(record.path, one.name) if record else one.name
        for what, other in (("uid", user), ("socket", path), ("record", recorder)):
            if other != one.name:
                raise ConfigError(
                    f"principals {other!r} and {one.name!r} have the same {what}; give each its own"
                )
    places: dict[tuple[str, str], str] = {}
    for one in found:
        for url in one.settings.tiers:
            tier = parse_tier(url)
            where = (tier.scheme, tier.location)
            if tier.location and (other := places.setdefault(where, one.name)) != one.name:
                raise ConfigError(
                    f"principals {other!r} and {one.name!r} have the same {tier.scheme} tier; "
                    "give each its own"
                )
