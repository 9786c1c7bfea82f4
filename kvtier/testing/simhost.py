"""Another host in a simulated world: it has written to the shared tiers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from kvtier.cache import Cache
from kvtier.catalog.catalog import Part
from kvtier.identity.keys import TokenIds
from kvtier.identity.record import Header, checksum, split_record_id
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.oracle import payload
from kvtier.tiers.store import Capabilities, Store, Write

__all__ = ["SharedMemory", "write_as_another_host"]


class SharedMemory(MemoryStore):
    """A MemoryStore that other hosts write to as well."""

    @property
    def capabilities(self) -> Capabilities:
        """Shared, and whatever is in it may vanish."""
        return replace(super().capabilities, shared=True, self_evicting=True)


def write_as_another_host(
    cache: Cache, store: Store, prompts: Iterable[TokenIds], rng: random.Random
) -> None:
    """Put the beginnings of some prompts into a shared store."""
    for tokens in prompts:
        prefix = cache.prefix(tokens)
        count = rng.randrange(len(prefix.names) + 1)
        parts = [part for chunk in prefix.parts(0, count) for part in chunk]
        store.write_many([_record(cache, part) for part in parts])


def _record(cache: Cache, part: Part) -> Write:
    data = payload(part.name, part.nbytes)
    total = checksum(data)
    key, which = split_record_id(part.name)
    header = Header(
        namespace=cache.namespace.digest,
        key=key,
        parent=part.parent,
        depth=part.depth,
        part=which,
        raw_bytes=part.nbytes,
        stored_bytes=part.nbytes,
        raw_sum=total,
        stored_sum=total,
    )
    return Write(header, memoryview(bytearray(data)))
