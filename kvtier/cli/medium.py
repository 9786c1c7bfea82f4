"""The lmdb tier's class, for commands that look at its directory without opening it."""

from __future__ import annotations

from typing import Any

from kvtier.config import load_store, store_types
from kvtier.errors import ConfigError
from kvtier.tiers.survey import Surveyed


def slab_medium() -> type[Surveyed]:
    """Return the class. Raises ConfigError where another package took the name lmdb."""
    types = store_types()
    if "lmdb" not in types:
        raise ConfigError("this kvtier has no lmdb tier; install it again")
    kind: type[Any] = load_store(types["lmdb"])
    if not issubclass(kind, Surveyed):
        raise ConfigError(f"the lmdb tier of {kind.__module__} cannot be looked at from outside")
    return kind


def age(seconds: float) -> str:
    """Return how old something is, in the largest unit that keeps it at one or more."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"
