"""The Copier: executes CopyPlans between an engine's KV blocks and the arena's slots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.checks import check_kind, check_whole
from kvtier.copyplan import CopyPlan, PlanPart
from kvtier.device.base import Copy, Device, Fence
from kvtier.errors import ConfigError, MisuseError, ProtocolError
from kvtier.identity.geometry import (
    DTYPE_BYTES,
    Component,
    Geometry,
    Needs,
    component_shards,
    stage_layers,
)
from kvtier.identity.record import Part
from kvtier.memory.arena import Memory
from kvtier.transfer import CopyTransfer

__all__ = ["Pages"]

_LOAD_GROUPS: Final = 4
_ANY_PLAN: Final = (1 << 63) - 1  # none was issued before it


class Pages:
    """One rank's KV blocks, bound to the cache's arena. It copies the parts of its own shard.

    tensors: for each component of the geometry, in its order, the rank's KV tensor, shaped
    [layers, planes, blocks, block tokens, heads, head size] (any leading dimensions whose
    product is layers x planes will do); of states [layers, planes, places, heads, head size].
    Or, where each layer has a tensor of its own, the list of them, in the order of the layers.
    rank: its shard, of so many, and its stage, of so many. Where several ranks hold the same
    bytes, the first of them saves, and all load.
    Calls enqueue and return; they come from one thread.
    """

    def __init__(
        self,
        geometry: Geometry,
        arena: Memory,
        tensors: Sequence[Any],
        device: Device,
        rank: tuple[int, int, int, int] = (0, 1, 0, 1),
    ) -> None:
        shard, shards, stage, stages = rank
        check_whole(f"a shard of {shards}", shard, 0, shards - 1, ConfigError)
        check_whole(f"a stage of {stages}", stage, 0, stages - 1, ConfigError)
        if not isinstance(device, Device):
            raise ConfigError(f"{device!r} is no Device: see kvtier.device.base")
        if len(tensors) != len(geometry.components):
            raise ConfigError(
                f"{len(geometry.components)} components need as many KV tensors, not {len(tensors)}"
            )
        self._arena = arena
        self._pid = os.getpid()
        self._device = device
        self._block_tokens = geometry.block_tokens[0]
        self._chunk_blocks = geometry.chunk_tokens // self._block_tokens
        if arena.id and (memory := arena.of(arena.id, _ANY_PLAN)) is not None:
            device.pin(memory)  # here, where a refusal is the engine's to hear, not at a copy
        self._kinds = [
            _Kind(geometry, component, device, tensor, rank)
            for component, tensor in zip(geometry.components, tensors, strict=True)
        ]

    def execute(self, plan: CopyPlan, after: Sequence[Fence]) -> CopyTransfer:
        """Enqueue a plan's copies, ordered after the fences. Does not block.

        after: for a save, the fence of the compute that wrote the blocks; for a load, the fence
        of the last work that read them.
        The copies of a plan for a daemon's arena that is gone have failed. Raises ProtocolError
        when the plan does not fit this rank's blocks or arena, and MisuseError in a forked child,
        where the arena's memory is not mapped.
        """
        if os.getpid() != self._pid:
            raise MisuseError("bound KV does not cross fork; open a cache in the child")
        check_kind("a plan", plan, CopyPlan)
        check_kind("the fences that copies come after", after, Sequence)
        blocks = tuple(dict.fromkeys(block for part in plan.parts for block in part.blocks))
        memory = self._arena.of(plan.arena, plan.id)
        if memory is None:
            return CopyTransfer((_GONE,), plan.tokens, blocks)
        self._device.pin(memory)  # nothing, unless it came later or anew
        saves = plan.kind == "save"
        copies = [copy for part in plan.parts for copy in self._copies(part, memory, saves=saves)]
        if saves:
            fence = self._device.gather(self._device.stream("store"), copies, after)
            return CopyTransfer((fence,), plan.tokens, blocks)
        stream = self._device.stream("load")
        groups = self._device.scatter(stream, copies, after, _LOAD_GROUPS)
        return CopyTransfer(groups, plan.tokens, blocks)

    def _copies(self, part: PlanPart, memory: NDArray[np.uint8], *, saves: bool) -> list[Copy]:
        """Check a part and return its copies; none for one that is another rank's to copy."""
        if part.component >= len(self._kinds):
            raise ProtocolError(f"the plan names component {part.component}")
        kind = self._kinds[part.component]
        name = Part(part.component, part.shard, part.shards, part.stage, part.stages)
        if (name.shards, name.stages) != (kind.shards, kind.stages) or not _possible(name):
            raise ProtocolError(
                f"the plan names shard {name.shard} of {name.shards}, stage {name.stage} of "
                f"{name.stages}; here are {kind.shards} shards and {kind.stages} stages"
            )
        if (name.shard, name.stage) != (kind.shard, kind.stage) or (saves and not kind.saves):
            return []
        planes, count, block_bytes = kind.planes, kind.count, kind.block_bytes
        chunk_blocks = 1 if kind.state else self._chunk_blocks
        first, odd = divmod(part.first_token, self._block_tokens)
        raw = planes * chunk_blocks * block_bytes
        if odd or first + len(part.blocks) > chunk_blocks or raw > part.nbytes:
            raise ProtocolError("the plan's tokens do not fit its chunk")
        if part.offset + part.nbytes > memory.size:  # none, once it is closed
            raise ProtocolError("the plan's slot lies outside the arena")
        if part.blocks and not 0 <= min(part.blocks) <= max(part.blocks) < count:
            raise ProtocolError(
                f"the plan names blocks {min(part.blocks)} to {max(part.blocks)} of {count}"
            )
        slot = memory[part.offset : part.offset + raw].reshape(planes, chunk_blocks, block_bytes)
        slot = slot[:, first : first + len(part.blocks)]
        each = planes // len(kind.pages)
        return [
            Copy(pages, part.blocks, slot[at * each : (at + 1) * each])
            for at, pages in enumerate(kind.pages)
        ]


class _Gone:
    """See Fence. Of copies into or out of memory that is not there any more, or not yet."""

    def done(self) -> bool:
        """See Fence."""
        return self.wait(0.0)

    def wait(self, timeout: float) -> bool:
        """See Fence."""
        del timeout
        raise ConnectionError(
            "the daemon's memory, which the plan is for, is not mapped here, or is another's by now"
        )


_GONE: Final = _Gone()


class _Kind:
    """One component's blocks on this rank. rank: shard, shards, stage, stages."""

    def __init__(
        self,
        geometry: Geometry,
        component: Component,
        device: Device,
        tensor: Any,
        rank: tuple[int, int, int, int],
    ) -> None:
        shard, shards, self.stage, self.stages = rank
        self.shards = component_shards(component, shards)
        self.shard, turn = divmod(shard, shards // self.shards)
        self.saves = not turn  # of the ranks that hold the same bytes, the first
        self.state = component.needs is Needs.LAST
        row = component.heads * component.head_size * DTYPE_BYTES[geometry.dtype] // self.shards
        layers = len(stage_layers(component, self.stage, self.stages))
        self.planes = layers * component.planes
        self.block_bytes = row * (1 if self.state else geometry.block_tokens[0])
        apart = isinstance(tensor, (list, tuple))  # a tensor for each layer
        if apart and len(tensor) != layers:
            raise ConfigError(
                f"component {component.name!r} has {layers} layers here, and {len(tensor)} tensors"
            )
        tensors, planes = (tensor, component.planes) if apart else ([tensor], self.planes)
        self.pages = [device.pages(one, planes, self.block_bytes) for one in tensors]
        self.count = min(pages.shape[1] for pages in self.pages)


def _possible(name: Part) -> bool:
    return name.shard < name.shards and name.stage < name.stages
