"""The Copier: executes CopyPlans between an engine's KV blocks and the arena's slots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.checks import check_kind, check_whole
from kvtier.copyplan import CopyPlan, PlanPart
from kvtier.device.base import Copy, Cuts, Device, Fence, PlaneGroups
from kvtier.device.stack import Planes, stacked
from kvtier.errors import ConfigError, MisuseError, ProtocolError
from kvtier.identity.geometry import (
    DTYPE_BYTES,
    Component,
    Geometry,
    Needs,
    component_shards,
    stage_layers,
)
from kvtier.identity.record import PartName
from kvtier.memory.arena import Memory
from kvtier.transfer import CopyTransfer, LeavingTransfer, group_layers

_GROUPS: Final = 8  # of 32 layers, a load's first group has an eighth of its bytes
_GROUP_BYTES: Final = 4 << 20  # below that, a group costs more than waiting for it
_MOST_GROUPS: Final = 1 << 16
_ANY_PLAN: Final = (1 << 63) - 1  # none was issued before it


class Pages:
    """One rank's KV blocks, bound to the cache's arena. It copies the parts of its own shard.

    tensors: for each component of the geometry, in its order, the rank's KV tensor, shaped
    [layers, planes, blocks, block tokens, heads, head size] (any leading dimensions whose
    product is layers x planes will do); of states [layers, planes, places, heads, head size].
    Or, where each layer has a tensor of its own, the list of them, in the order of the layers.
    rank: its shard, of so many, and its stage, of so many. Where several ranks hold the same
    bytes, the first of them saves, and all load.
    groups: of layers, that loads and saves are cut into, at most so many as there are layers;
    None: eight, or fewer where those would have less than 4 MiB each.
    Calls enqueue and return; they come from one thread.
    """

    def __init__(
        self,
        geometry: Geometry,
        arena: Memory,
        tensors: Sequence[Any],
        device: Device,
        rank: tuple[int, int, int, int] = (0, 1, 0, 1),
        groups: int | None = None,
    ) -> None:
        if groups is not None:
            check_whole("groups of layers", groups, 1, _MOST_GROUPS, ConfigError)
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
        self._groups = groups
        self._block_tokens = geometry.block_tokens[0]
        self._chunk_blocks = geometry.chunk_tokens // self._block_tokens
        if arena.id and (memory := arena.of(arena.id, _ANY_PLAN)) is not None:
            device.pin(memory)  # here, where a refusal is the engine's to hear, not at a copy
        self._kinds = [
            _Kind(geometry, component, device, tensor, rank)
            for component, tensor in zip(geometry.components, tensors, strict=True)
        ]
        self._layers = [kind.layers for kind in self._kinds]

    def execute(self, plan: CopyPlan, after: Sequence[Fence]) -> CopyTransfer:
        """Enqueue a plan's copies, ordered after the fences. Does not block.

        after: for a save, the fence of the compute that wrote the blocks; for a load, the fence
        of the last work that read them.
        The copies of a plan for a daemon's arena that is gone have failed. Raises ProtocolError
        when the plan does not fit this rank's blocks or arena, and MisuseError in a forked child,
        where the arena's memory is not mapped.
        """
        check_kind("the fences that copies come after", after, Sequence)
        blocks, placed = self._checked(plan)
        if placed is None:
            return CopyTransfer((_GONE,), plan.tokens, blocks)
        if plan.kind == "save":
            (copies,) = _in_groups(placed, 1)
            fence = self._device.gather(self._device.stream("store"), copies, after)
            return CopyTransfer((fence,), plan.tokens, blocks)
        count = self._count(placed)
        groups = _in_groups(placed, count)
        fences = self._device.scatter(self._device.stream("load"), groups, after)
        return CopyTransfer(fences, plan.tokens, blocks, self._layers)

    def leave(self, plan: CopyPlan) -> LeavingTransfer:
        """Prepare a save whose layers are copied as they are computed. Does not block.

        The caller says ``written`` of each layer, and ``end``. Raises as ``execute`` does.
        """
        blocks, placed = self._checked(plan)
        if plan.kind != "save":
            raise MisuseError("layers leave by a save, not by a load")
        count = self._count(placed or ())
        each = [
            _in_groups([one for one in placed or () if one.kind is kind], count)
            for kind in self._kinds
        ]

        def enqueue(component: int, group: int) -> Fence:
            copies = each[component][group]
            after = (self._device.host_fence(),)
            return self._device.gather(self._device.stream("store"), copies, after)

        def gone(component: int, group: int) -> Fence:
            del component, group
            return _GONE

        start = gone if placed is None else enqueue
        return LeavingTransfer(start, count, plan.tokens, blocks, self._layers)

    def _checked(self, plan: CopyPlan) -> tuple[tuple[int, ...], list[_Placed] | None]:
        """Return a plan's blocks, and this rank's part of it; None: its memory is gone."""
        if os.getpid() != self._pid:
            raise MisuseError("bound KV does not cross fork; open a cache in the child")
        check_kind("a plan", plan, CopyPlan)
        blocks = tuple(dict.fromkeys(chain.from_iterable(part.blocks for part in plan.parts)))
        memory = self._arena.of(plan.arena, plan.id)
        if memory is None:
            return blocks, None
        self._device.pin(memory)  # nothing, unless it came later or anew
        saves = plan.kind == "save"
        found = [self._place(part, memory, saves=saves) for part in plan.parts]
        return blocks, [one for one in found if one is not None]

    def _count(self, placed: Sequence[_Placed]) -> int:
        """Return how many groups of layers to cut copies into."""
        most = min(self._layers)
        if self._groups is not None:
            return min(self._groups, most)
        nbytes = sum(one.slot.nbytes for one in placed)
        return max(1, min(_GROUPS, most, nbytes // _GROUP_BYTES))

    def _place(self, part: PlanPart, memory: NDArray[np.uint8], *, saves: bool) -> _Placed | None:
        """Check a part and say what to copy; None for one that is another rank's to copy."""
        if part.component >= len(self._kinds):
            raise ProtocolError(f"the plan names component {part.component}")
        kind = self._kinds[part.component]
        name = PartName(part.component, part.shard, part.shards, part.stage, part.stages)
        if (name.shards, name.stages) != (kind.shards, kind.stages) or not _possible(name):
            raise ProtocolError(
                f"the plan names shard {name.shard} of {name.shards}, stage {name.stage} of "
                f"{name.stages}; here are {kind.shards} shards and {kind.stages} stages"
            )
        if (name.shard, name.stage) != (kind.shard, kind.stage) or (saves and not kind.saves):
            return None
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
        return _Placed(kind, part.blocks, slot[:, first : first + len(part.blocks)])


@dataclass(frozen=True, slots=True)
class _Placed:
    """One part of a plan: which blocks, and where in its slot, [planes, blocks, bytes]."""

    kind: _Kind
    blocks: tuple[int, ...]
    slot: NDArray[np.uint8]


def _in_groups(placed: Sequence[_Placed], count: int) -> PlaneGroups:
    """Return the copies of so many groups of layers."""
    copies, cuts = [], []
    for one in placed:
        for pages, some, mine in one.kind.in_groups(count):
            copies.append(Copy(pages, one.blocks, one.slot[some]))
            cuts.append(mine)
    return PlaneGroups(copies, cuts, count)


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
        self.layers = layers = len(stage_layers(component, self.stage, self.stages))
        self.planes = layers * component.planes
        self.block_bytes = row * (1 if self.state else geometry.block_tokens[0])
        apart = isinstance(tensor, (list, tuple))  # a tensor for each layer
        if apart and len(tensor) != layers:
            raise ConfigError(
                f"component {component.name!r} has {layers} layers here, and {len(tensor)} tensors"
            )
        tensors, planes = (tensor, component.planes) if apart else ([tensor], self.planes)
        self.pages = stacked([device.pages(one, planes, self.block_bytes) for one in tensors])
        self.count = min(pages.shape[1] for pages in self.pages)
        self._in_groups: dict[int, list[tuple[Planes, slice, Cuts]]] = {}

    def in_groups(self, count: int) -> list[tuple[Planes, slice, Cuts]]:
        """Return all pages, their planes in a slot, and which are in which group of layers."""
        found = self._in_groups.get(count)
        if found is None:
            planes = self.planes // self.layers
            groups = [group_layers(self.layers, at, count) for at in range(count)]
            bounds = [(group.start * planes, group.stop * planes) for group in groups]
            found, at = [], 0
            for pages in self.pages:
                stop = at + len(pages)
                cuts = tuple(
                    (min(max(low, at), stop) - at, min(max(high, at), stop) - at)
                    for low, high in bounds
                )
                found.append((pages, slice(at, stop), cuts))
                at = stop
            self._in_groups[count] = found
        return found


def _possible(name: PartName) -> bool:
    return name.shard < name.shards and name.stage < name.stages
