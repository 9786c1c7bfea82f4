"""Configuration: one grammar for URLs and TOML, checked at the door, then frozen.

A tier is ``dram:SIZE`` or ``SCHEME:LOCATION?capacity=SIZE&option=value``; options begin after
the last question mark, since a directory may have one in its name. Stores are found by the entry
points ``kvtier.storage_backends``, policies by ``kvtier.policies``, codecs by ``kvtier.codecs``.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import parse_qsl

from kvtier.catalog.owners import Quota, check_floors
from kvtier.checks import check_kind, check_whole, is_number, read_settings, what_is_wrong
from kvtier.codecs.door import check_codec
from kvtier.errors import ConfigError, check_known, unknown
from kvtier.memory.numa import parse_nodes
from kvtier.policies.door import DEFAULT, check_policy
from kvtier.tiers.store import Store
from kvtier.units import parse_bytes, parse_fraction, parse_seconds

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ADMISSIONS: Final = ("through", "second-touch", "on-evict", "auto")
_LEAVING: Final = ("policy", "ttl")
_DRAM_OPTIONS: Final = (*_LEAVING, "numa")
_OWN_OPTIONS: Final = ("capacity", "admission", "write_budget", "codec", *_LEAVING)
_TABLES: Final = ("tiers", "tenants")
_QUOTA_OPTIONS: Final = ("floor", "ceiling")
_LIKE_UNIX: Final = ("daemon", "socket")
_GROUP: Final = "kvtier.storage_backends"
# What an error must not repeat: a user's password, and what looks like a secret of theirs.
_UNSAID: Final = re.compile(r"(//)[^/?]*(@)|((?:key|token|secret|word)=)[^&]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One tier. capacity: bytes, None for unbounded. options: parsed, all of the Store's.

    admission: None leaves it to the tier: ``auto`` for a durable one of this host,
    ``second-touch`` for a shared one, ``through`` for others.
    write_budget: bytes a day, math.inf for unlimited; None gives a durable tier of this host one
    capacity a day, and others no limit.
    codec: ``lossless`` encodes the KV of 16-bit elements on its way down, ``auto`` where the link
    is slow enough for that to pay, ``raw`` none; or the name of a plug-in. None is ``auto`` for a
    shared tier, ``raw`` for others. Every tier reads what any of them wrote.
    store: one that is open already, in place of the one that scheme and location name.
    policy: the name of the one that says what leaves the tier first. ttl: seconds after which
    what was not used leaves it anyway; None for never.
    """

    scheme: str
    location: str
    capacity: int | None
    admission: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    store: Store | None = None
    write_budget: float | None = None
    policy: str = DEFAULT
    codec: str | None = None
    ttl: float | None = None

    def __post_init__(self) -> None:
        check_kind("a tier's scheme", self.scheme, str, ConfigError)
        check_kind("a tier's location", self.location, str, ConfigError)
        if self.store is not None and not isinstance(self.store, Store):
            raise ConfigError(f"{self.store!r} lacks some of a Store: see kvtier.tiers.store")
        check_kind(f"the options of {self.scheme}", self.options, Mapping, ConfigError)
        if self.capacity is not None:
            check_whole(f"{self.scheme} capacity, in bytes,", self.capacity, 1, error=ConfigError)
        for what, one in (("admission", self.admission), ("codec", self.codec)):
            if one is not None:
                check_kind(f"the {what} of {self.scheme}", one, str, ConfigError)
        if self.admission is not None and self.admission not in ADMISSIONS:
            raise unknown("admission", self.admission, ADMISSIONS)
        if self.codec is not None:
            check_codec(self.codec)
        _check_leaving(self.scheme, self.policy, self.ttl)
        budget = self.write_budget
        if budget is not None and not (is_number(budget) and budget >= 1):
            raise ConfigError(f"{self.scheme} write_budget {budget!r} B is not one byte or more")


@dataclass(frozen=True, slots=True)
class Config:
    """A cache: DRAM first, then slower tiers in their order. quotas: by tenant.

    policy, ttl, numa: of DRAM; numa: the host's memory nodes that it comes from, all where none
    is named.
    """

    dram: int
    tiers: tuple[TierConfig, ...] = ()
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    policy: str = DEFAULT
    ttl: float | None = None
    numa: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_kind("the memory nodes of dram", self.numa, tuple, ConfigError)
        for node in self.numa:
            check_whole("a memory node of dram", node, error=ConfigError)
        check_whole("dram, in bytes,", self.dram, 1, error=ConfigError)
        check_kind("the tiers of a config", self.tiers, tuple, ConfigError)
        for tier in self.tiers:
            check_kind("a tier of a config", tier, TierConfig, ConfigError)
        check_floors(self.quotas)
        _check_leaving("dram", self.policy, self.ttl)

    @classmethod
    def from_urls(cls, urls: Sequence[str]) -> Config:
        """Read tiers as URLs. Raises ConfigError, naming the nearest valid choice."""
        if isinstance(urls, str) or not isinstance(urls, Sequence):
            raise ConfigError(f'tiers are a list of URLs, such as ["dram:8GiB"], not {urls!r}')
        parsed = [parse_tier(url) for url in urls]
        dram = [tier for tier in parsed if tier.scheme == "dram"]
        if len(dram) != 1 or parsed[0] is not dram[0]:
            raise ConfigError("a cache begins with one dram tier, such as dram:8GiB")
        places = [(tier.scheme, tier.location) for tier in parsed[1:]]
        if len(set(places)) < len(places):
            raise ConfigError("two tiers name the same place")
        first = dram[0]
        if first.capacity is None:
            raise ConfigError("dram needs a size, such as dram:8GiB")
        numa = first.options.get("numa", ())
        return cls(
            first.capacity,
            tuple(parsed[1:]),
            policy=first.policy,
            ttl=first.ttl,
            numa=cast("tuple[int, ...]", numa),
        )

    @classmethod
    def from_toml(cls, path: str | Path) -> Config:
        """Read ``tiers = ["dram:8GiB", ...]`` from a TOML file.

        A tenant's quota is a table: ``[tenants.NAME]`` with ``floor = "10%"``, ``ceiling = "50%"``.
        """
        data = read_toml(path, _TABLES)
        return replace(cls.from_urls(urls_of(data, path)), quotas=quotas_of(data, path))


def read_toml(path: str | Path, known: Sequence[str]) -> dict[str, object]:
    """Return what a TOML file has. Raises ConfigError for names that are not among `known`."""
    if not isinstance(path, (str, Path)):
        raise ConfigError(f"a path is needed, and not {path!r}")
    path = Path(path)
    try:
        text = read_settings(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is no path: {error}") from error
    try:
        data: dict[str, object] = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {what_is_wrong(error)}") from error
    check_known("option", data, known)
    return data


def urls_of(data: Mapping[str, object], where: object) -> list[str]:
    """Return the tiers' URLs of a table; where: what an error calls it."""
    urls = data.get("tiers")
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise ConfigError(f'{where} needs tiers = ["dram:8GiB", ...]')
    return urls


def quotas_of(data: Mapping[str, object], where: object) -> dict[str, Quota]:
    """Return the quotas of a table's tenants; where: what an error calls it."""
    tenants = data.get("tenants", {})
    if not isinstance(tenants, dict):
        raise ConfigError(f"tenants of {where} are tables, such as [tenants.NAME]")
    return {tenant: _quota(tenant, table) for tenant, table in tenants.items()}


def hidden(url: str) -> str:
    """Return a tier's URL without what may be a secret in it."""
    return _UNSAID.sub(r"\1\3…\2", url)


def _quota(tenant: str, table: object) -> Quota:
    """Read one tenant's table."""
    if not isinstance(table, dict):
        raise ConfigError(f'tenant {tenant!r} needs a table, such as floor = "10%"')
    check_known(f"option of tenant {tenant!r}", table, _QUOTA_OPTIONS)
    try:
        return Quota(**{name: parse_fraction(value) for name, value in table.items()})
    except ConfigError as error:
        raise ConfigError(f"tenant {tenant!r}: {error}") from error


def parse_tier(url: str) -> TierConfig:
    """Read one tier's URL."""
    check_kind("a tier's URL", url, str, ConfigError)
    scheme, colon, rest = url.partition(":")
    types = store_types()
    if scheme == "unix":
        raise ConfigError(
            "unix: is a daemon, and no tier of another cache; open it alone, such as "
            'kvtier.open("unix:/run/kvtier/kv.sock", ...)'
        )
    if scheme not in types and scheme != "dram":
        if meant := _daemon_meant(url):
            raise ConfigError(
                f"unknown tier {hidden(url)!r}; a daemon is named alone, by its socket: is "
                f"{meant!r} meant?"
            )
        raise unknown("tier", scheme, (*types, "dram"))
    if not colon:
        raise ConfigError(f"tier {scheme!r} needs a colon: {scheme}:...")
    if scheme == "dram":
        return _dram(rest)
    location, mark, query = rest.rpartition("?")
    location, query = (location, query) if mark else (rest, "")
    shown = hidden(url)
    if not location:
        raise ConfigError(f"tier {shown!r} needs a place after the colon")
    given = parse_options(shown, query)
    store = load_store(types[scheme])
    known, secrets = (*store.OPTIONS, *_OWN_OPTIONS), getattr(store, "CREDENTIALS", "")
    check_known(f"option of {scheme}", given, known, secrets)
    if "capacity" not in given:
        raise ConfigError(f"tier {shown!r} has no capacity; add ?capacity=200GiB, say")
    capacity, budget = given["capacity"], given.get("write_budget")
    options = {
        name: option.parse(given[name]) if name in given else option.default
        for name, option in store.OPTIONS.items()
    }
    return TierConfig(
        scheme,
        location,
        None if capacity == "unbounded" else parse_bytes(capacity),
        given.get("admission"),
        options,
        write_budget=_write_budget(budget) if budget is not None else None,
        policy=given.get("policy", DEFAULT),
        codec=given.get("codec"),
        ttl=_ttl(given),
    )


def _daemon_meant(url: str) -> str:
    """Return a daemon's URL where what is none, such as daemon:///PATH, may mean it."""
    scheme, _, path = hidden(url).partition("?")[0].rpartition(":")
    if scheme in _LIKE_UNIX or path.endswith(".sock"):
        return "unix:" + re.sub("^//+", "/", path)
    return ""


def _dram(text: str) -> TierConfig:
    """Read what follows ``dram:``."""
    size, _, query = text.partition("?")
    given = parse_options(f"dram:{text}", query)
    check_known("option of dram", given, _DRAM_OPTIONS)
    policy = given.get("policy", DEFAULT)
    options = {"numa": _nodes(given["numa"])} if "numa" in given else {}
    return TierConfig(
        "dram", "", parse_bytes(size), options=options, policy=policy, ttl=_ttl(given)
    )


def _nodes(text: str) -> tuple[int, ...]:
    try:
        return parse_nodes(text)
    except ValueError as error:
        raise ConfigError(
            f"dram numa={text!r} is no list of memory nodes, such as 0-1,3"
        ) from error


def _ttl(given: Mapping[str, str]) -> float | None:
    return parse_seconds(given["ttl"]) if "ttl" in given else None


def _check_leaving(scheme: str, policy: object, ttl: Any) -> None:
    """Check what says which parts leave a tier, and when."""
    check_kind(f"the policy of {scheme}", policy, str, ConfigError)
    check_policy(str(policy))
    if ttl is not None and not (is_number(ttl) and 0 < ttl < math.inf):
        raise ConfigError(f"{scheme} ttl {ttl!r} s is not above nothing")


def _write_budget(text: str) -> float:
    return math.inf if text == "unlimited" else parse_bytes(text)


def store_types() -> dict[str, EntryPoint]:
    """Return the Stores that are installed, by scheme, without loading them."""
    from importlib.metadata import entry_points  # 20 ms, which `import kvtier` need not take

    return {entry.name: entry for entry in entry_points(group=_GROUP)}


def load_store(entry: EntryPoint) -> type[Store]:
    """Load a Store's class. Raises ConfigError when its own imports fail."""
    try:
        store: type[Store] = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"tier {entry.name!r} cannot be loaded: {error}") from error
    return store


def parse_options(shown: str, query: str, like: str = "?capacity=8GiB&a=b") -> dict[str, str]:
    """Read ``a=b&c=d``, refusing what is malformed or said twice. shown, like: for errors."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise ConfigError(f"the options of {shown!r} must look like {like}") from error
    given = dict(pairs)
    if len(given) < len(pairs):
        raise ConfigError(f"an option of {shown!r} is given twice")
    return given
