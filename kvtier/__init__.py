"""kvtier keeps the KV cache of a language model alive after it leaves GPU memory.

    cache = kvtier.open("dram:8GiB", "lmdb:/var/lib/kv?capacity=200GiB", namespace=namespace)

Importing this package starts no thread, and imports nothing else of it: each name is imported when
it is first named. So the command line is there at once, to hear an interrupt.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvtier.cache import Cache, Match
    from kvtier.cache import open_cache as open  # noqa: A004  (kvtier.open, as files are opened)
    from kvtier.catalog.owners import Quota
    from kvtier.config import Config, TierConfig
    from kvtier.daemon.worker import Worker
    from kvtier.desk import Health
    from kvtier.errors import (
        ConfigError,
        KvtierError,
        MisuseError,
        NamespaceMismatch,
        ProtocolError,
    )
    from kvtier.identity.geometry import Component, Geometry, Needs
    from kvtier.identity.namespace import Namespace, Request, Span
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
    "Component": "kvtier.identity.geometry:Component",
    "Config": "kvtier.config:Config",
    "ConfigError": "kvtier.errors:ConfigError",
    "Geometry": "kvtier.identity.geometry:Geometry",
    "Health": "kvtier.desk:Health",
    "KvtierError": "kvtier.errors:KvtierError",
    "Match": "kvtier.cache:Match",
    "MisuseError": "kvtier.errors:MisuseError",
    "Namespace": "kvtier.identity.namespace:Namespace",
    "NamespaceMismatch": "kvtier.errors:NamespaceMismatch",
    "Needs": "kvtier.identity.geometry:Needs",
    "ProtocolError": "kvtier.errors:ProtocolError",
    "Quota": "kvtier.catalog.owners:Quota",
    "Removed": "kvtier.upkeep:Removed",
    "Request": "kvtier.identity.namespace:Request",
    "Retention": "kvtier.retention:Retention",
    "Span": "kvtier.identity.namespace:Span",
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
