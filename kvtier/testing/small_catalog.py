"""A catalog on a small arena, and parts to put in it, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvtier.catalog.catalog import Catalog, Part, Shelf, Victim
from kvtier.catalog.lease import Lease
from kvtier.catalog.owners import Quota
from kvtier.identity.geometry import Component, Geometry
from kvtier.identity.record import PartName, RecordId, record_id
from kvtier.identity.shape import Shape, chunk_shape
from kvtier.memory.arena import Arena, Slot
from kvtier.metrics import Metrics
from kvtier.policies.door import load_policy
from kvtier.testing.hands import Hands

PART_BYTES: Final = 8192
SHAPE: Final[Shape] = chunk_shape(
    Geometry((Component(1, 1, 256),), dtype="int8", block_tokens=(16,), chunk_tokens=16)
)
"""One part of PART_BYTES a chunk."""

SUM: Final = bytes(16)
LMDB: Final = 1


class SmallCatalog:
    """A catalog with room for `slots` parts in DRAM and one slower tier."""

    def __init__(
        self,
        slots: int,
        capacity: int | None = None,
        quotas: Mapping[str, Quota] | None = None,
        policy: str = "lru",
    ) -> None:
        self.clock = Hands()
        self.metrics = Metrics()
        self.arena = Arena(slots * PART_BYTES, [PART_BYTES])
        shelves = [
            Shelf("dram", load_policy(policy), slots * PART_BYTES),
            Shelf("lmdb", load_policy(policy), capacity),
        ]
        self.catalog = Catalog(self.arena, shelves, self.clock, self.metrics, quotas)

    def save(self, parts: Sequence[Part]) -> int:
        """Save parts as an engine would; return how many were kept."""
        taken, _ = self.catalog.reserve([[part] for part in parts])
        return sum(self.catalog.commit(part.name, slot, SUM) for part, slot in taken)

    def reserve(self, parts: Sequence[Part]) -> list[Slot]:
        """Reserve one-part chunks; return the slots of those that were not there."""
        return [slot for _, slot in self.catalog.reserve([[part] for part in parts])[0]]

    def found(self, parts: Sequence[Part]) -> list[int]:
        """Match one-part chunks; return the tier of each."""
        limit = len(parts) * SHAPE.chunk_tokens
        return self.catalog.match(names(parts), SHAPE, limit).tiers

    def found_chunks(self, chunks: Sequence[Sequence[Part]]) -> list[int]:
        """Match chunks of several shards; return the tier of each."""
        count = len(chunks[0])
        geometry = Geometry(
            (Component(1, count, 256),), dtype="int8", block_tokens=(16,), chunk_tokens=16
        )
        wanted = [[part.name for part in chunk] for chunk in chunks]
        shape = chunk_shape(geometry, count)
        return self.catalog.match(wanted, shape, len(chunks) * shape.chunk_tokens).tiers

    def lease(self, parts: Sequence[Part], seconds: float, *, whole: bool = True) -> Lease | None:
        """Lease the one-part chunks of a prefix that are in DRAM."""
        tokens = len(parts) * SHAPE.chunk_tokens
        return self.catalog.lease(names(parts), SHAPE, 0, tokens, seconds, whole=whole)

    def hold_for_fetch(self, parts: Sequence[Part]) -> tuple[list[tuple[int, ...]], list[int]]:
        """Hold one-part chunks for a fetch."""
        tokens = len(parts) * SHAPE.chunk_tokens
        return self.catalog.hold_for_fetch(names(parts), SHAPE, 0, tokens, parts[0].owner)

    def evict(self, tier: int, nbytes: int, **kwargs: Any) -> list[Victim]:
        """Make room for parts that nobody owns."""
        return self.catalog.evict(tier, {0: nbytes}, **kwargs)

    def rows(self, parts: Sequence[Part]) -> list[int]:
        """Return the index rows of parts."""
        return [self.catalog._index.find(part.name) for part in parts]

    def close(self) -> None:
        """Give the memory back."""
        self.arena.close()


def chain(count: int, seed: int = 0, start: int = 0) -> list[Part]:
    """Return the parts of a prefix of one-part chunks."""
    names = [
        record_id(bytes([seed]) * 16 + depth.to_bytes(16, "big"), PartName())
        for depth in range(count)
    ]
    parents = [None, *names]
    parts = [Part(name, parents[i], i, PART_BYTES) for i, name in enumerate(names)]
    return parts[start:]


def names(parts: Sequence[Part]) -> list[list[RecordId]]:
    """Return the names of one-part chunks, as `match` takes them."""
    return [[part.name] for part in parts]
