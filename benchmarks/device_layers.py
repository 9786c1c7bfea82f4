"""What has landed of a load when the engine behind it computes its first layer.

The real engine over a real cache, with 32 layers and a prompt of 40 MiB, on a CPU device whose load
stream is slowed, as the link to a GPU is beside its memory: it sleeps before each group of layers.
Bytes count as landed when the fence of their group is done, looked at when the engine, which waits
for the layer's own fence alone, goes on to compute it.

And what a load in groups of layers costs its caller: 16 chunks of 2 MiB, in 8 groups.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

import kvtier
from kvtier.connectors.reference import ReferenceConnector
from kvtier.copier import Pages
from kvtier.copyplan import PLAN_VERSION, CopyPlan, PlanPart
from kvtier.device.base import Copy, Fence, Stream
from kvtier.device.cpu import CpuDevice, CpuStream
from kvtier.engine import Engine, Model, ModelConfig, Sampling, random_weights
from kvtier.identity.record import PartName
from kvtier.memory.arena import Arena

LAYERS, KV_HEADS, HEAD, TOKENS, CHUNK = 32, 8, 64, 640, 128
SLOWER = 0.004  # seconds a group
CONFIG = ModelConfig(
    vocab_size=97,
    layers=LAYERS,
    hidden_size=64,
    heads=8,
    kv_heads=KV_HEADS,
    head_size=HEAD,
    intermediate_size=64,
    context_tokens=2048,
)


class SlowStream(CpuStream):
    """A stream that sleeps before each piece of work."""

    def enqueue(self, work: Callable[[], None]) -> None:
        """See CpuStream."""

        def slowly() -> None:
            time.sleep(SLOWER)
            work()

        super().enqueue(slowly)


class Watched(CpuDevice):
    """A device with a slow load stream that looks at what has landed.

    parts: of each load that was waited for, how much had landed when the first wait for it ended.
    groups: of the last load.
    """

    def __init__(self) -> None:
        super().__init__(lambda name: (SlowStream if name == "load" else CpuStream)(name))
        self.parts: list[float] = []
        self.groups = 0
        self._loads: list[tuple[list[Fence], list[int]]] = []

    def scatter(
        self, stream: Stream, groups: Sequence[Sequence[Copy]], after: Sequence[Fence]
    ) -> list[Fence]:
        """See Device."""
        fences = super().scatter(stream, groups, after)
        sizes = [sum(copy.slot.nbytes for copy in copies) for copies in groups]
        self._loads.append((fences, sizes))
        self.groups = len(groups)
        return fences

    def hold(self, fence: Fence, timeout: float) -> bool:
        """See Device."""
        held = super().hold(fence, timeout)
        for fences, sizes in self._loads:
            if fence in fences:
                done = [one.done() for one in fences]
                landed = sum(size for size, one in zip(sizes, done, strict=True) if one)
                self.parts.append(landed / sum(sizes))
        self._loads = [one for one in self._loads if fence not in one[0]]  # the first wait counts
        return held


def submit(rounds: int, *, apart: bool = False) -> dict[str, float]:
    """Return the microseconds a chunk that it takes to enqueue a load of 16 chunks of 2 MiB.

    apart: each layer has a tensor of its own.
    """
    geometry = kvtier.Geometry(
        (kvtier.Component(LAYERS, KV_HEADS, HEAD),), block_tokens=(2,), chunk_tokens=32
    )
    size, chunks, times = geometry.part_bytes(PartName(0)), 16, []
    arena = Arena((chunks + 1) * size, [size])
    kv = np.ones((LAYERS, 2, 16 * chunks, 2, KV_HEADS, HEAD), np.uint16)
    order = np.random.default_rng(0).permutation(16 * chunks).reshape(chunks, 16).tolist()
    slots = [slot for slot in (arena.allocate(size) for _ in order) if slot is not None]
    parts = (
        PlanPart(*slot, 0, 0, 1, 0, 1, 0, tuple(some))
        for slot, some in zip(slots, order, strict=True)
    )
    plan = CopyPlan(PLAN_VERSION, 1, "load", arena.id, 32 * chunks, tuple(parts))
    with closing(CpuDevice()) as device, closing(arena):
        pages = Pages(geometry, arena, [list(kv) if apart else kv], device)
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            transfer = pages.execute(plan, (device.host_fence(),))
            times.append((time.perf_counter() - begin) * 1e6 / chunks)
            transfer.result(60)
    return {"median": statistics.median(times[1:]), "min": min(times[1:]), "max": max(times[1:])}


def layers(rounds: int) -> dict[str, Any]:
    """Load a prompt so many times; return the part that had landed, and how many groups it had."""
    torch.set_num_threads(1)
    model = Model(random_weights(CONFIG, seed=1))
    geometry = kvtier.Geometry(model.components, block_tokens=(16,), chunk_tokens=CHUNK)
    prompt = np.random.default_rng(0).integers(0, 97, TOKENS + 9).tolist()
    with (
        closing(Watched()) as device,
        closing(kvtier.open("dram:64MiB", namespace=kvtier.Namespace("layers", geometry))) as cache,
        closing(Engine(model, num_blocks=64, prefix_cache=False)) as engine,
    ):
        engine.connect(ReferenceConnector(cache, engine.kv, device, always=True))
        answers = set()
        for _ in range(rounds + 1):
            (done,) = engine.generate([prompt], Sampling(max_tokens=2))
            answers.add(done.tokens)
            while not engine.idle:
                engine.step()
            cache.flush(timeout=60)
        if len(answers) != 1 or len(device.parts) != rounds:
            raise RuntimeError(f"{len(answers)} answers, {len(device.parts)} of {rounds} loads")
        parts, groups = device.parts, device.groups
    spread = {"median": statistics.median(parts), "min": min(parts), "max": max(parts)}
    return {"fraction": spread, "groups": groups, "layers": LAYERS, "loads": rounds}
