"""The Copier: plans that fit are executed exactly, those that do not are refused whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtier.copier import Pages
from kvtier.copyplan import CopyPlan, PlanPart
from kvtier.device import cpu
from kvtier.device.cpu import CpuDevice, CpuFence, _copy_all
from kvtier.errors import ConfigError, MisuseError, ProtocolError
from kvtier.identity.geometry import Component, Geometry
from kvtier.identity.record import PartName
from kvtier.memory.arena import Arena, Slot
from kvtier.transfer import CopyResult, CopyStatus

BLOCK, CHUNK, BLOCKS, SECONDS = 4, 16, 12, 10.0
GEOMETRY = Geometry(
    (Component(3, 2, 32), Component(2, 1, 24, planes=1, name="latent")),
    "float16",
    block_tokens=(BLOCK,),
    chunk_tokens=CHUNK,
)
SIZES = [GEOMETRY.part_bytes(PartName(index)) for index in range(2)]


class Rank:
    """One rank with an arena of its own; one slot for each component."""

    def __init__(self) -> None:
        self.arena = Arena(1 << 16, SIZES)
        self.id = self.arena.id
        self.device = CpuDevice()
        numbers = np.random.default_rng(5)
        shapes = [(3, 2, BLOCKS, BLOCK, 2, 32), (2, 1, BLOCKS, BLOCK, 1, 24)]
        self.kv = [numbers.integers(0, 9999, shape).astype(np.uint16) for shape in shapes]
        self.pages = Pages(GEOMETRY, self.arena, self.kv, self.device)
        self.slots = [self.arena.allocate(size) for size in SIZES]

    def plan(self, kind: Any = "save", blocks: tuple[int, ...] = (1, 2, 3, 4), first: int = 0):
        parts = tuple(
            PlanPart(*slot, index, 0, 1, 0, 1, first, blocks)
            for index, slot in enumerate(self.slots)
        )
        return CopyPlan(2, 1, kind, self.id, len(blocks) * BLOCK, parts)

    def part(self, slot: Slot, index: int) -> np.ndarray:
        """Return a slot's tokens as [planes, tokens of the chunk, elements]."""
        component = GEOMETRY.components[index]
        planes = component.layers * component.planes
        raw = self.arena.memory[slot.offset : slot.offset + SIZES[index]]
        return raw.view(np.uint16).reshape(planes, CHUNK, -1)

    def blocks(self, index: int, blocks: list[int]) -> np.ndarray:
        component = GEOMETRY.components[index]
        planes = component.layers * component.planes
        flat = self.kv[index].reshape(planes, BLOCKS, BLOCK, -1)
        return flat[:, blocks].reshape(planes, BLOCK * len(blocks), -1)


@pytest.fixture
def rank() -> Iterator[Rank]:
    found = Rank()
    yield found
    found.device.close()
    found.arena.close()


def test_a_save_fills_slots_in_layer_plane_token_order(rank: Rank):
    blocks = (7, 0, 11, 1)
    result = rank.pages.execute(rank.plan(blocks=blocks), after=()).result(SECONDS)
    assert (result.status, result.tokens, result.failed_blocks) == (CopyStatus.OK, CHUNK, ())
    for index, slot in enumerate(rank.slots):
        assert np.array_equal(rank.part(slot, index), rank.blocks(index, list(blocks)))


def test_a_load_gives_back_what_was_saved_in_other_blocks(rank: Rank):
    rank.pages.execute(rank.plan(blocks=(1, 2, 3, 4)), after=()).result(SECONDS)
    saved = [rank.blocks(index, [1, 2, 3, 4]).copy() for index in range(2)]
    untouched = [kv.copy() for kv in rank.kv]
    transfer = rank.pages.execute(rank.plan("load", blocks=(9, 5, 6, 0)), after=())
    assert len(transfer.groups) == 1, "too few bytes for more"
    assert transfer.result(SECONDS).tokens == CHUNK
    for index in range(2):
        assert np.array_equal(rank.blocks(index, [9, 5, 6, 0]), saved[index])
        rest = [block for block in range(BLOCKS) if block not in {9, 5, 6, 0}]
        assert np.array_equal(rank.kv[index][:, :, rest], untouched[index][:, :, rest])


@pytest.mark.parametrize(("first", "count"), [(0, 1), (4, 2), (12, 1)])
def test_a_part_of_a_chunk_is_copied_to_its_place(rank: Rank, first: int, count: int):
    rank.arena.memory[:] = 0xAB
    blocks = tuple(range(2, 2 + count))
    result = rank.pages.execute(rank.plan(blocks=blocks, first=first), after=()).result(SECONDS)
    assert result.tokens == count * BLOCK
    for index, slot in enumerate(rank.slots):
        part = rank.part(slot, index)
        stop = first + count * BLOCK
        assert np.array_equal(part[:, first:stop], rank.blocks(index, list(blocks)))
        assert (part[:, :first] == 0xABAB).all()
        assert (part[:, stop:] == 0xABAB).all()
    used = sum(SIZES)
    assert (rank.arena.memory == 0xAB).sum() >= rank.arena.nbytes - used


def test_a_failed_copy_is_a_value_that_names_each_block_once(rank: Rank):
    compute = CpuFence()
    compute.settle(RuntimeError("kernel"))
    result = rank.pages.execute(rank.plan(blocks=(3, 1)), after=(compute,)).result(SECONDS)
    assert (result.status, result.tokens) == (CopyStatus.FAILED, 0)
    assert result.failed_blocks == (3, 1)
    assert "kernel" in result.cause


def changed(plan: CopyPlan, index: int, **fields: Any) -> CopyPlan:
    parts = list(plan.parts)
    parts[index] = msgspec.structs.replace(parts[index], **fields)
    return msgspec.structs.replace(plan, parts=tuple(parts))


BAD_PARTS = {
    "component": {"component": 2},
    "another component": {"component": 0},  # larger than the latent's slot
    "shard": {"shard": 1},
    "shards": {"shards": 2},
    "no shards": {"shards": 0},
    "block": {"blocks": (0, BLOCKS)},
    "huge block": {"blocks": (2**64 - 1,)},
    "too many blocks": {"blocks": (0, 1, 2, 3, 4)},
    "past the chunk": {"first_token": 12, "blocks": (0, 1)},
    "past the chunk, empty": {"first_token": 20, "blocks": ()},
    "within a block": {"first_token": 2},
    "short slot": {"nbytes": SIZES[1] - 1},
    "slot past the end": {"offset": (1 << 16) - SIZES[1] + 1},
    "slot far away": {"offset": 2**63},
    "long slot": {"nbytes": 2**63},
}


@pytest.mark.parametrize("kind", ["load", "save"])
@pytest.mark.parametrize("fields", BAD_PARTS.values(), ids=BAD_PARTS)
def test_a_plan_that_does_not_fit_is_refused_whole(rank: Rank, kind: str, fields: dict[str, Any]):
    before = [kv.copy() for kv in rank.kv]
    memory = rank.arena.memory.copy()
    with pytest.raises(ProtocolError, match="the plan"):
        rank.pages.execute(changed(rank.plan(kind), 1, **fields), after=())
    rank.device.stream("load").record().wait(SECONDS)
    rank.device.stream("store").record().wait(SECONDS)
    assert np.array_equal(rank.arena.memory, memory), "not even its first part was copied"
    assert all(map(np.array_equal, rank.kv, before))


def test_a_plan_for_another_arena_is_refused(rank: Rank):
    plan = msgspec.structs.replace(rank.plan(), arena=rank.id + 1)
    with pytest.raises(ProtocolError, match="another arena"):
        rank.pages.execute(plan, after=())


def test_taken_for_its_own_it_would_overwrite_a_slot(rank: Rank):
    """The twin: a rank that does not look at the arena's id."""
    other = msgspec.structs.replace(rank.plan(), arena=rank.id + 1)
    rank.arena.id = other.arena
    assert rank.pages.execute(other, after=()).result(SECONDS).status is CopyStatus.OK
    assert rank.arena.memory.any()


def test_a_plan_after_the_arena_closed_is_refused(rank: Rank):
    plan = rank.plan()
    rank.arena.close()
    with pytest.raises(ProtocolError, match="outside the arena"):
        rank.pages.execute(plan, after=())


def test_an_empty_plan_is_done(rank: Rank):
    for plan in (CopyPlan(2, 1, "load", rank.id, 0, ()), rank.plan(blocks=())):
        result = rank.pages.execute(plan, after=()).result(SECONDS)
        assert (result.status, result.tokens) == (CopyStatus.OK, 0)


def test_tensors_that_do_not_match_the_geometry_are_refused(rank: Rank):
    good = rank.kv
    for bad in ([], good[:1], [*good, good[0]]):
        with pytest.raises(ConfigError, match="2 components need as many"):
            Pages(GEOMETRY, rank.arena, bad, rank.device)
    for bad in (
        [good[1], good[0]],
        [good[0].astype(np.uint8), good[1]],
        [good[0].astype(np.float32), good[1]],
        [good[0][:2], good[1]],
        [good[0].reshape(3, 2, BLOCKS * 2, 2, 2, 32), good[1]],
    ):
        with pytest.raises(ConfigError, match="check dtype, block size, heads"):
            Pages(GEOMETRY, rank.arena, bad, rank.device)


def test_layers_with_a_tensor_each_make_the_same_parts(rank: Rank):
    """Both ways: what is saved from one tensor is loaded into many, and is the same bytes."""
    rank.pages.execute(rank.plan(blocks=(7, 0, 11, 1)), after=()).result(SECONDS)
    apart = [[np.zeros_like(layer) for layer in tensor] for tensor in rank.kv]
    pages = Pages(GEOMETRY, rank.arena, apart, rank.device)
    assert pages.execute(rank.plan("load", (5, 6, 2), BLOCK), after=()).result(SECONDS).tokens
    for whole, layers in zip(rank.kv, apart, strict=True):
        for layer, one in zip(whole, layers, strict=True):
            assert np.array_equal(one[:, [5, 6, 2]], layer[:, [0, 11, 1]])
            assert not one[:, [0, 1, 3, 4, 7, 8, 9, 10, 11]].any()
    before = [rank.part(slot, at).copy() for at, slot in enumerate(rank.slots)]
    rank.pages.execute(rank.plan("load", (2, 3, 4, 5)), after=()).result(SECONDS)
    again = [list(tensor) for tensor in rank.kv]
    for slot in rank.slots:
        rank.arena.memory[slot.offset : slot.offset + slot.nbytes] = 0
    Pages(GEOMETRY, rank.arena, again, rank.device).execute(
        rank.plan(blocks=(2, 3, 4, 5)), after=()
    ).result(SECONDS)
    assert all(
        np.array_equal(rank.part(slot, at), before[at]) for at, slot in enumerate(rank.slots)
    )


def test_layers_with_a_tensor_each_are_one_copy_a_part(rank: Rank):
    seen: list[int] = []

    class Counting(CpuDevice):
        def gather(self, stream: Any, copies: Any, after: Any) -> Any:
            seen.append(len(copies))
            return super().gather(stream, copies, after)

    apart = [[layer.copy() for layer in tensor] for tensor in rank.kv]
    device = Counting()
    plan = rank.plan(blocks=(7, 0, 10, 1))
    for kv in (rank.kv, apart, [apart[0], [apart[1][0], apart[1][1][:, :11]]]):
        pages = Pages(GEOMETRY, rank.arena, kv, device)
        pages.execute(plan, after=()).result(SECONDS)
    device.close()
    assert seen == [2, 2, 3], "but for a layer of fewer blocks"


def test_a_tensor_for_each_layer_means_for_each(rank: Rank):
    apart = [list(tensor) for tensor in rank.kv]
    with pytest.raises(ConfigError, match="has 3 layers here, and 2 tensors"):
        Pages(GEOMETRY, rank.arena, [apart[0][:2], apart[1]], rank.device)
    short = [apart[0], [apart[1][0], apart[1][1][:, :4]]]
    pages = Pages(GEOMETRY, rank.arena, short, rank.device)
    with pytest.raises(ProtocolError, match="of 4"):
        pages.execute(rank.plan(blocks=(1, 2, 3, 4)), after=())


def test_a_rank_holds_the_heads_of_its_shard(rank: Rank):
    geometry = Geometry((Component(3, 2, 8),), "float16", (BLOCK,), CHUNK)
    half = np.zeros((3, 2, BLOCKS, BLOCK, 1, 8), np.uint16)
    pages = Pages(geometry, rank.arena, [half], rank.device, (0, 2, 0, 1))
    part = PlanPart(*rank.slots[0], 0, 1, 2, 0, 1, 0, (5,))
    plan = CopyPlan(2, 1, "save", rank.id, BLOCK, (part,))
    assert pages.execute(plan, after=()).result(SECONDS).tokens == BLOCK
    with pytest.raises(ConfigError):
        Pages(geometry, rank.arena, [half], rank.device)


# ------------------------------------------------------------------------------- layer by layer


def shut(rank: Rank, role: Any) -> threading.Event:
    """Let no copy of a direction begin before the gate is open."""
    gate = threading.Event()
    rank.device.stream(role).enqueue(lambda: gate.wait(SECONDS) and None)
    return gate


def fence(transfer: Any, component: int, layer: int) -> Any:
    return transfer.groups[transfer.group(component, layer)]


@pytest.mark.parametrize("apart", [False, True])
def test_a_layers_fence_is_done_once_all_its_planes_are_there(rank: Rank, apart: bool):
    rank.pages.execute(rank.plan(), after=()).result(SECONDS)
    want = [rank.blocks(index, [1, 2, 3, 4]).copy() for index in range(2)]
    kv = [list(tensor) for tensor in rank.kv] if apart else rank.kv
    pages = Pages(GEOMETRY, rank.arena, kv, rank.device, groups=2)
    for tensor in rank.kv:
        tensor[:] = 0
    gate, seen = shut(rank, "load"), []
    transfer = pages.execute(rank.plan("load"), after=())
    assert len(transfer.groups) == 2
    assert not fence(transfer, 0, 0).done()
    gate.set()
    for component, layers in enumerate((3, 2)):
        for layer in range(layers):
            assert fence(transfer, component, layer).wait(SECONDS)
            here = rank.blocks(component, [1, 2, 3, 4])
            planes = len(here) // layers
            some = slice(layer * planes, (layer + 1) * planes)
            seen.append(np.array_equal(here[some], want[component][some]))
    assert all(seen)
    assert fence(transfer, 0, 0) is fence(transfer, 1, 0) is not fence(transfer, 0, 1)
    assert fence(transfer, 0, 1) is fence(transfer, 0, 2) is fence(transfer, 1, 1)


def test_first_layers_land_while_the_last_are_held_back(rank: Rank):
    """Two groups: between them the stream is stopped."""
    pages = Pages(GEOMETRY, rank.arena, rank.kv, rank.device, groups=2)
    copies, gate = [], threading.Event()

    def copy_all(some: Any, *, into_slot: bool) -> None:
        if copies:
            gate.wait(SECONDS)
        copies.append(some)
        _copy_all(some, into_slot=into_slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_copy_all", copy_all)
        transfer = pages.execute(rank.plan("load"), after=())
        assert fence(transfer, 0, 0).wait(SECONDS)
        assert not fence(transfer, 0, 2).done()
        assert not transfer.poll()
        gate.set()
        assert transfer.result(SECONDS).status is CopyStatus.OK


def test_groups_are_as_many_as_bytes_and_layers_are_worth(rank: Rank):
    geometry = Geometry((Component(40, 2, 2048),), "float16", (BLOCK,), CHUNK)  # 10 MiB
    kv = np.zeros((40, 2, 5, BLOCK, 2, 2048), np.uint16)
    size = geometry.part_bytes(PartName(0))
    arena = Arena(8 * size, [size])
    found = []
    for groups in (None, 1, 3, 50):
        pages = Pages(geometry, arena, [kv], rank.device, groups=groups)
        for chunks in (1, 2, 4):
            slot = arena.allocate(size)
            assert slot is not None
            parts = [PlanPart(*slot, 0, 0, 1, 0, 1, 0, (1, 2, 3, 4))] * chunks
            plan = CopyPlan(2, 1, "load", arena.id, CHUNK, tuple(parts))
            transfer = pages.execute(plan, after=())
            assert transfer.result(SECONDS).status is CopyStatus.OK
            found.append(len(transfer.groups))
            arena.free(slot)
    arena.close()
    assert found == [2, 5, 8, 1, 1, 1, 3, 3, 3, 40, 40, 40]
    with pytest.raises(ConfigError, match="groups of layers"):
        Pages(GEOMETRY, rank.arena, rank.kv, rank.device, groups=0)


def test_a_save_leaves_layer_by_layer_and_is_the_same_bytes(rank: Rank):
    pages = Pages(GEOMETRY, rank.arena, rank.kv, rank.device, groups=2)
    transfer = pages.leave(rank.plan(blocks=(7, 0, 11, 1)))
    right = [tensor.copy() for tensor in rank.kv]
    for tensor in rank.kv:
        tensor[:] = 0xAB
    for component, layer in ((0, 0), (1, 0), (0, 1), (0, 2), (1, 1)):
        rank.kv[component][layer] = right[component][layer]
        transfer.written(component, layer)
        transfer.written(component, layer)  # said twice, it leaves once
    assert len(transfer.groups) == 4
    assert not transfer.poll(), "the step may not count yet"
    assert transfer.result(0).status is CopyStatus.TIMEOUT
    transfer.end(good=True)
    assert transfer.result(SECONDS) == CopyResult(CopyStatus.OK, CHUNK)
    for index, slot in enumerate(rank.slots):
        assert np.array_equal(rank.part(slot, index), rank.blocks(index, [7, 0, 11, 1]))


def test_a_step_that_does_not_count_or_ended_early_saves_nothing(rank: Rank):
    pages = Pages(GEOMETRY, rank.arena, rank.kv, rank.device, groups=2)
    void, early = pages.leave(rank.plan()), pages.leave(rank.plan())
    gate = shut(rank, "store")
    for transfer, good in ((void, False), (early, True)):
        transfer.written(0, 0)
        transfer.end(good=good)
        transfer.end(good=True)  # what was said first stands
        transfer.written(0, 2)  # and nothing leaves any more
        assert len(transfer.groups) == 1
        assert not transfer.poll(), "its slots are still written"
    gate.set()
    results = [transfer.result(SECONDS) for transfer in (void, early)]
    assert [one.status for one in results] == [CopyStatus.FAILED] * 2
    assert "does not count" in results[0].cause
    assert "3 groups of layers were never computed" in results[1].cause
    with pytest.raises(MisuseError, match="by a save"):
        pages.leave(rank.plan("load"))


def test_layers_that_leave_for_memory_that_is_gone_have_failed(rank: Rank):
    rank.arena.of = lambda arena, plan: None  # type: ignore[method-assign]  (a daemon's, gone)
    transfer = rank.pages.leave(rank.plan())
    for component, layer in ((0, 2), (1, 1)):
        transfer.written(component, layer)
    transfer.end(good=True)
    assert transfer.result(0).status is CopyStatus.FAILED
