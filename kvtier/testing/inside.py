"""The inside of a cache of this process, for oracles and tests."""

from __future__ import annotations

from kvtier.cache import Cache
from kvtier.local import LocalDesk


def inside(cache: Cache) -> LocalDesk:
    """Return its desk, with the catalog, moves and depot behind it."""
    if not isinstance(cache._desk, LocalDesk):
        raise TypeError("this cache's inside is in another process")
    return cache._desk
