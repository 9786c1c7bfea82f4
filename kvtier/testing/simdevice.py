"""The engine's device in a simulated world: copies that end by themselves, late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final

import numpy as np

from kvtier.cache import Cache
from kvtier.copyplan import CopyPlan
from kvtier.identity.record import Part, RecordId, record_id
from kvtier.memory.arena import Slot
from kvtier.prefix import Prefix
from kvtier.testing.oracle import Oracle, payload
from kvtier.testing.simloop import SimLoop
from kvtier.transfer import CopyResult, CopyStatus

__all__ = ["SimDevice", "pause"]

_GARBAGE: Final = 0xEE


class SimDevice:
    """Executes plans. A copy, once planned, ends by itself, whatever becomes of its request.

    after: called with what has happened, after each plan has settled.
    """

    def __init__(
        self, loop: SimLoop, cache: Cache, oracle: Oracle, after: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._cache = cache
        self._oracle = oracle
        self._after = after
        self._copies: list[asyncio.Task[None]] = []

    def save(
        self, rng: random.Random, plan: CopyPlan, prefix: Prefix, *, good: bool
    ) -> asyncio.Task[None]:
        """Start to fill slots from the engine's blocks; not `good`, the copy fails."""
        return self._start(self._copy_in(rng, plan, prefix, good=good))

    def load(self, rng: random.Random, plan: CopyPlan, prefix: Prefix) -> asyncio.Task[None]:
        """Start to read slots into the engine's blocks."""
        return self._start(self._copy_out(rng, plan, prefix))

    async def idle(self) -> None:
        """Return when every copy has ended."""
        for copy in self._copies:
            await copy

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=f"copy-{len(self._copies)}")
        self._copies.append(task)
        return task

    async def _copy_in(
        self, rng: random.Random, plan: CopyPlan, prefix: Prefix, *, good: bool
    ) -> None:
        """Fill slots in two pieces, and settle."""
        parts = self._parts(plan, prefix)
        for half in (0, 1):
            await pause(rng)
            for name, slot, size in parts:
                middle = size // 2
                low, high = (0, middle) if not half else (middle, size)
                data = payload(name, size)[low:high] if good else bytes([_GARBAGE]) * (high - low)
                place = self._cache._depot.arena.memory[slot.offset + low : slot.offset + high]
                np.copyto(place, np.frombuffer(data, np.uint8))
        await pause(rng)
        if good:
            for name, slot, size in parts:
                self._oracle.expect_bytes(name, slot, size, "saved")
        self._cache.settle(plan, CopyResult(CopyStatus.OK if good else CopyStatus.FAILED))
        self._after("settle save")

    async def _copy_out(self, rng: random.Random, plan: CopyPlan, prefix: Prefix) -> None:
        """Read slots twice, late, and settle."""
        for _ in range(2):
            await asyncio.sleep(rng.choice((0.0, 0.001, 0.03)))
            for name, slot, size in self._parts(plan, prefix):
                self._oracle.expect_bytes(name, slot, size, "loaded")
        self._cache.settle(plan, CopyResult(CopyStatus.OK))
        self._after("settle load")

    def _parts(self, plan: CopyPlan, prefix: Prefix) -> list[tuple[RecordId, Slot, int]]:
        """Return name, slot and bytes of each part; block ids are places in the prompt."""
        found = []
        shape = self._cache.shape
        per_chunk = shape.chunk_tokens // shape.block_tokens
        sizes = dict(zip(shape.names, shape.nbytes, strict=True))
        for part in plan.parts:
            which = Part(part.component, part.shard, part.shards, part.stage, part.stages)
            key = prefix.keys[part.blocks[0] // per_chunk]
            slot = Slot(part.offset, part.nbytes, part.serial)
            found.append((record_id(key, which), slot, sizes[which]))
        return found


async def pause(rng: random.Random) -> None:
    """Let others run, sometimes for a while."""
    longest = rng.choice((0.0, 0.0, 0.0, 0.003, 0.003, 0.03))
    await asyncio.sleep(rng.uniform(0, longest))
