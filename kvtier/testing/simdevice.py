"""The engine's device in a simulated world: copies that end by themselves, late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final

import numpy as np

from kvtier.cache import Cache
from kvtier.copyplan import CopyPlan, PlanPart
from kvtier.identity.geometry import Component, Needs
from kvtier.identity.record import PartName, RecordId, record_id
from kvtier.memory.arena import Slot
from kvtier.plans import ABSENT, BlockTable
from kvtier.prefix import Prefix
from kvtier.testing.inside import inside
from kvtier.testing.oracle import Oracle, payload
from kvtier.testing.simloop import SimLoop
from kvtier.testing.simmodel import BLOCK, CHUNK, Model
from kvtier.testing.simtask import SimError
from kvtier.transfer import CopyResult, CopyStatus

_KEPT_STATES: Final = 0.7
_GARBAGE: Final = 0xEE


class SimDevice:
    """Executes plans. A copy, once planned, ends by itself, whatever becomes of its request.

    after: called with what has happened, after each plan has settled. name: of its copies' tasks.
    """

    def __init__(
        self, loop: SimLoop, cache: Cache, oracle: Oracle, after: Callable[[str], None], name: str
    ) -> None:
        self._loop = loop
        self._cache = cache
        self._oracle = oracle
        self._model = oracle.model
        self._after = after
        self._name = name
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
        task = self._loop.create_task(work, name=f"{self._name}-{len(self._copies)}")
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
                memory = inside(self._cache).arena.memory
                place = memory[slot.offset + low : slot.offset + high]
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

    def expect_all(self, plan: CopyPlan, prefix: Prefix, start: int, stop: int) -> None:
        """Check that a load of tokens [start, stop) copies what a prefix of `stop` needs there."""
        copied = sorted({name for name, _, _ in self._parts(plan, prefix)})
        if copied != sorted(self._model.needed(prefix.names, stop, start // CHUNK)):
            raise SimError(f"a load of tokens {start} to {stop} does not copy what they need")

    def chunks(self, plan: CopyPlan) -> int:
        """Return of how many chunks a plan copies parts."""
        return len({self._chunk(part) for part in plan.parts})

    def _chunk(self, part: PlanPart) -> int:
        """Return the chunk of a part: a block's id is its place in the prompt. See Tables."""
        state = self._model.components[part.component].needs is Needs.LAST
        return part.blocks[0] if state else part.blocks[0] // (CHUNK // BLOCK)

    def _parts(self, plan: CopyPlan, prefix: Prefix) -> list[tuple[RecordId, Slot, int]]:
        """Return name, slot and bytes of each part."""
        found = []
        shape = self._cache.shape
        sizes = dict(zip(shape.names, shape.nbytes, strict=True))
        for part in plan.parts:
            which = PartName(part.component, part.shard, part.shards, part.stage, part.stages)
            key = prefix.keys[self._chunk(part)]
            slot = Slot(part.offset, part.nbytes, part.serial)
            found.append((record_id(key, which), slot, sizes[which]))
        return found


class Tables:
    """The block tables of a model's requests: the id of a block is its place in the prompt.

    That of a state is the number of the chunk after which it stands.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    def of(self, rng: random.Random, chunks: int) -> BlockTable:
        """Return tables of a prompt; of windows and states the engine has kept some, or all."""
        return [self._kept(rng, one, chunks) for one in self._model.components]

    def into(self, rng: random.Random, start: int, stop: int) -> BlockTable:
        """Return tables for a load of tokens [start, stop), without some that nothing needs."""
        return [self._wanted(rng, one, start, stop) for one in self._model.components]

    @staticmethod
    def _kept(rng: random.Random, component: Component, chunks: int) -> list[int]:
        if component.needs is Needs.LAST:
            return [n if rng.random() < _KEPT_STATES else ABSENT for n in range(chunks)]
        blocks = list(range(chunks * CHUNK // BLOCK))
        if component.needs is Needs.TRAILING and rng.random() < 0.5:
            gone = max(0, chunks * CHUNK - component.window) // BLOCK
            blocks[:gone] = [ABSENT] * gone
        return blocks

    @staticmethod
    def _wanted(rng: random.Random, component: Component, start: int, stop: int) -> list[int]:
        if component.needs is Needs.LAST:
            return [stop // CHUNK - 1]
        blocks = list(range(start // BLOCK, stop // BLOCK))
        if component.needs is Needs.TRAILING and rng.random() < 0.5:
            gone = max(0, stop - component.window - start) // BLOCK
            blocks[:gone] = [ABSENT] * gone
        return blocks


async def pause(rng: random.Random) -> None:
    """Let others run, sometimes for a while."""
    longest = rng.choice((0.0, 0.0, 0.0, 0.003, 0.003, 0.03))
    await asyncio.sleep(rng.uniform(0, longest))
