"""The Copier: executes CopyPlans between an engine's KV blocks and the arena's slots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from kvtier.copyplan import CopyPlan, PlanPart
from kvtier.device.base import Copy, Device, Fence
from kvtier.errors import ConfigError, MisuseError, ProtocolError
from kvtier.identity.geometry import DTYPE_BYTES, Geometry
from kvtier.memory.arena import Arena
from kvtier.transfer import CopyTransfer

__all__ = ["Pages"]

_LOAD_GROUPS: Final = 4


class Pages:
    """One rank's KV blocks, bound to the cache's arena. It copies the parts of its own shard.

    tensors: for each component of the geometry, in its order, the rank's KV tensor, shaped
    [layers, planes, blocks, block tokens, heads, head size] (any leading dimensions whose
    product is layers x planes will do). Calls enqueue and return; they come from one thread.
    """

    def __init__(
        self,
        geometry: Geometry,
        arena: Arena,
        arena_id: int,
        tensors: Sequence[Any],
        device: Device,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        if not 0 <= shard < shards:
            raise ConfigError(f"shard {shard} is not one of {shards}")
        if len(tensors) != len(geometry.components):
            raise ConfigError(
                f"{len(geometry.components)} components need as many KV tensors, not {len(tensors)}"
            )
        self._geometry = geometry
        self._arena = arena
        self._arena_id = arena_id
        self._pid = os.getpid()
        self._device = device
        self._shard = shard
        self._shards = shards
        self._block_tokens = geometry.block_tokens[0]
        self._pages = []
        for component, tensor in zip(geometry.components, tensors, strict=True):
            row = component.heads * component.head_size * DTYPE_BYTES[geometry.dtype]
            block_bytes = self._block_tokens * row // shards
            planes = component.layers * component.planes
            self._pages.append(device.pages(tensor, planes, block_bytes))

    def execute(self, plan: CopyPlan, after: Sequence[Fence]) -> CopyTransfer:
        """Enqueue a plan's copies, ordered after the fences. Does not block.

        after: for a save, the fence of the compute that wrote the blocks; for a load, the fence
        of the last work that read them.
        Raises ProtocolError when the plan does not fit this rank's blocks or arena, and
        MisuseError in a forked child, where the arena's memory is not mapped.
        """
        if os.getpid() != self._pid:
            raise MisuseError("bound KV does not cross fork; open a cache in the child")
        if plan.arena != self._arena_id:
            raise ProtocolError("the plan belongs to another arena")
        copies = [copy for part in plan.parts if (copy := self._copy(part))]
        blocks = tuple(dict.fromkeys(block for part in plan.parts for block in part.blocks))
        tokens = len(blocks) * self._block_tokens
        if plan.kind == "save":
            fence = self._device.gather(self._device.stream("store"), copies, after)
            return CopyTransfer((fence,), tokens, blocks)
        stream = self._device.stream("load")
        groups = self._device.scatter(stream, copies, after, _LOAD_GROUPS)
        return CopyTransfer(groups, tokens, blocks)

    def _copy(self, part: PlanPart) -> Copy | None:
        """Check a part and return its copy; None for the part of another rank's shard."""
        if part.component >= len(self._pages):
            raise ProtocolError(f"the plan names component {part.component}")
        if part.shard >= part.shards or part.shards != self._shards:
            raise ProtocolError(
                f"the plan names shard {part.shard} of {part.shards}; here are {self._shards}"
            )
        if part.shard != self._shard:
            return None
        pages = self._pages[part.component]
        planes, count, block_bytes = pages.shape
        chunk_blocks = self._geometry.chunk_tokens // self._block_tokens
        first, odd = divmod(part.first_token, self._block_tokens)
        raw = planes * chunk_blocks * block_bytes
        if odd or first + len(part.blocks) > chunk_blocks or raw > part.nbytes:
            raise ProtocolError("the plan's tokens do not fit its chunk")
        if part.offset + part.nbytes > self._arena.memory.size:  # none, once it is closed
            raise ProtocolError("the plan's slot lies outside the arena")
        if part.blocks and not 0 <= min(part.blocks) <= max(part.blocks) < count:
            raise ProtocolError(
                f"the plan names blocks {min(part.blocks)} to {max(part.blocks)} of {count}"
            )
        memory = self._arena.memory[part.offset : part.offset + raw]
        slot = memory.reshape(planes, chunk_blocks, block_bytes)
        return Copy(pages, part.blocks, slot[:, first : first + len(part.blocks)])
