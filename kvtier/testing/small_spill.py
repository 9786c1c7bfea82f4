"""A small catalog, and the queue of a tier below it that does what it is told, for tests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvtier.catalog.catalog import Part
from kvtier.catalog.owners import Quota
from kvtier.catalog.spill import Spiller
from kvtier.catalog.strays import Strays
from kvtier.identity.record import Header, RecordId
from kvtier.testing.hands import Hands
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SmallCatalog
from kvtier.tiers.budget import WriteBudget
from kvtier.tiers.store import Capabilities, Status, Write
from kvtier.tiers.tier import Tier, Written

FOOTPRINT: Final = PART_BYTES + 100
"""What a part takes of the tier's budget."""

_TURNS: Final = 1000


class Disk:
    """A Tier and its Store in one.

    fate: how the writes of a record end, in turn; OK without. kept: what was written. calls,
    deletes: the names of each. gate: while it is clear, writes wait. error: raised by writes.
    """

    name = "lmdb"
    admission = "through"
    capabilities = Capabilities()
    available = True
    THREADS = 1
    packs = False
    write_all: Any = Tier.write_all
    _packer = None

    def __init__(self, clock: Hands) -> None:
        self.store = self
        self.writes = WriteBudget(math.inf, clock)
        self.fate: dict[RecordId, list[Status]] = {}
        self.kept: dict[RecordId, None] = {}
        self.calls: list[list[RecordId]] = []
        self.deletes: list[list[RecordId]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    def footprint(self, nbytes: int) -> int:
        """Return the bytes of the budget that a record takes."""
        return nbytes + FOOTPRINT - PART_BYTES

    def charge(self, header: Header) -> int:
        """Return the same of one that was written."""
        return self.footprint(header.stored_bytes)

    async def write(self, writes: Sequence[Write]) -> list[Status]:
        """Keep records, or not, as they are fated."""
        names = [write.header.id for write in writes]
        self.calls.append(names)
        self.writes.spend(sum(self.footprint(one.header.stored_bytes) for one in writes))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        ends = [self.fate[name].pop(0) if self.fate.get(name) else Status.OK for name in names]
        both = zip(names, ends, strict=True)
        self.kept |= dict.fromkeys(name for name, end in both if end is Status.OK)
        return ends

    async def _write(self, writes: Sequence[Write]) -> list[Written]:
        ends = await self.write(writes)
        return [Written(end, one.header) for end, one in zip(ends, writes, strict=True)]

    async def delete(self, names: Sequence[RecordId]) -> list[Status]:
        """Delete records."""
        self.deletes.append(list(names))
        await asyncio.sleep(0)
        gone = [self.kept.pop(name, name) is not None for name in names]
        return [Status.ABSENT if absent else Status.OK for absent in gone]


class SmallSpill:
    """A catalog with room for `slots` parts, and the queue of the tier below it."""

    def __init__(
        self,
        slots: int = 16,
        capacity: int | None = None,
        quotas: Mapping[str, Quota] | None = None,
    ) -> None:
        self.small = SmallCatalog(slots, capacity, quotas)
        self.catalog = self.small.catalog
        self.disk = Disk(self.small.clock)
        tier: Any = self.disk
        self.strays = Strays(tier)
        small = self.small
        self.spiller = Spiller(
            self.catalog, small.arena, LMDB, tier, small.metrics, self.strays, small.clock
        )

    async def offer(self, parts: Sequence[Part]) -> None:
        """Offer parts."""
        await self.spiller.offer([part.name for part in parts])

    def spill(self, *lots: Sequence[Part]) -> None:
        """Save and offer parts, and return when nothing waits; a lot after the other."""

        async def scene() -> None:
            for parts in lots:
                self.small.save(parts)
                await self.offer(parts)
                await self.spiller.drained()

        asyncio.run(scene())

    @staticmethod
    async def until(holds: Callable[[], bool]) -> None:
        """Let others run until a condition holds."""
        for _ in range(_TURNS):
            if holds():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never came to pass")

    def dropped(self, reason: str) -> float:
        """Return how many parts were dropped for a reason."""
        return self.small.metrics.get("dropped_spills", tier="lmdb", reason=reason)

    @property
    def numbers(self) -> list[list[int]]:
        """The calls, each as the places that its records have in their chain."""
        return [[int.from_bytes(name[16:32], "big") for name in call] for call in self.disk.calls]

    def close(self) -> None:
        """Check that nothing is held, and give the memory back."""
        assert self.catalog._index.held_rows == 0
        assert self.spiller._queued_bytes == 0
        self.small.close()
