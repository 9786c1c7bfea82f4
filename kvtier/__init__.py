"""kvtier keeps the KV cache of a language model alive after it leaves GPU memory.

    cache = kvtier.open("dram:8GiB", "lmdb:/var/lib/kv?capacity=200GiB", namespace=namespace)

Importing this package starts no thread and imports neither torch nor a storage client.
"""

from __future__ import annotations

from kvtier.cache import Cache, Match
from kvtier.cache import open_cache as open  # noqa: A004  (kvtier.open, as files are opened)
from kvtier.config import Config, TierConfig
from kvtier.errors import (
    ConfigError,
    KvtierError,
    MisuseError,
    NamespaceMismatch,
    ProtocolError,
)
from kvtier.identity.geometry import Component, Geometry, Needs
from kvtier.identity.namespace import Namespace, Request, Span

__all__ = [
    "Cache",
    "Component",
    "Config",
    "ConfigError",
    "Geometry",
    "KvtierError",
    "Match",
    "MisuseError",
    "Namespace",
    "NamespaceMismatch",
    "Needs",
    "ProtocolError",
    "Request",
    "Span",
    "TierConfig",
    "open",
]

__version__ = "0.1.0"
