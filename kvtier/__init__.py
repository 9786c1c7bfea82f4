"""kvtier keeps the KV cache of a language model alive after it leaves GPU memory.

    cache = kvtier.open("dram:8GiB", "lmdb:/var/lib/kv?capacity=200GiB", namespace=namespace)

Importing this package starts no thread and imports neither torch, numpy nor a storage client:
what needs them is imported when it is first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from kvtier.errors import (
    ConfigError,
    KvtierError,
    MisuseError,
    NamespaceMismatch,
    ProtocolError,
)
from kvtier.identity.geometry import Component, Geometry, Needs
from kvtier.identity.namespace import Namespace, Request, Span

if TYPE_CHECKING:
    from kvtier.cache import Cache, Match
    from kvtier.cache import open_cache as open  # noqa: A004  (kvtier.open, as files are opened)
    from kvtier.catalog.owners import Quota
    from kvtier.config import Config, TierConfig
    from kvtier.daemon.worker import Worker
    from kvtier.desk import Health
    from kvtier.retention import Retention
    from kvtier.upkeep import Removed

__all__ = [
    "Cache",
    "Component",
    "Config",
    "ConfigError",
    "Geometry",
    "Health",
    "KvtierError",
    "Match",
    "MisuseError",
    "Namespace",
    "NamespaceMismatch",
    "Needs",
    "ProtocolError",
    "Quota",
    "Removed",
    "Request",
    "Retention",
    "Span",
    "TierConfig",
    "Worker",
    "open",
]

__version__ = "0.1.0"

_LATER: Final = {
    "Cache": "kvtier.cache:Cache",
    "Config": "kvtier.config:Config",
    "Health": "kvtier.desk:Health",
    "Match": "kvtier.cache:Match",
    "Quota": "kvtier.catalog.owners:Quota",
    "Removed": "kvtier.upkeep:Removed",
    "Retention": "kvtier.retention:Retention",
    "TierConfig": "kvtier.config:TierConfig",
    "Worker": "kvtier.daemon.worker:Worker",
    "open": "kvtier.cache:open_cache",
}


def __getattr__(name: str) -> object:
    """Import a name of `_LATER` when it is first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
    module, _, attribute = _LATER[name].partition(":")
    value: object = getattr(import_module(module), attribute)
    globals()[name] = value
    return value
