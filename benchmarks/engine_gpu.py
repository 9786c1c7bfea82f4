"""What ``benchmarks/device.py --device cuda`` measures of the engine, last. Not yet on a GPU.

same       whether answers are the same cold, from the engine's own blocks and loaded, with decode
           steps replayed and without
decode     milliseconds of a step of 1, 8 and 32 requests, replayed and not, turn by turn, until
           its tokens are on the host
ttft       milliseconds to the first token of a prompt that is recomputed, loaded whole, and loaded
           layer by layer while the first layers are computed, turn by turn

    python benchmarks/engine_gpu.py    rehearses that on the CPU: the times there mean nothing
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch

import kvtier
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.base import Device
from kvtier.device.cpu import CpuDevice
from kvtier.engine import Engine, Model, ModelConfig, Sampling, Span, random_weights
from kvtier.engine.compute import Compute, CudaCompute
from kvtier.engine.graphs import DecodeGraphs
from kvtier.testing.device_answers import answers
from kvtier.testing.serving import small_model
from kvtier.testing.tape import TapeCompute

BLOCK, CHUNK = 16, 256
TURNS = 5
STEPS = 20


class Sizes(NamedTuple):
    """A model's, and of what is served: requests of a step, their context, a prompt's tokens."""

    model: ModelConfig
    requests: Sequence[int]
    context: int
    prompt: int


HERE = Sizes(ModelConfig(8192, 16, 1024, 16, 8, 64, 4096, 16384), (1, 8, 32), 1000, 8192)
REHEARSAL = Sizes(ModelConfig(97, 2, 64, 4, 2, 16, 128, 2048), (1, 2), 100, 600)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Summarise: median, least, most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def milliseconds(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


def same(compute: Compute, device: Device) -> dict[str, bool]:
    """Say whether answers are the same, from wherever their KV comes."""
    prompts = [np.random.default_rng(n).integers(0, 97, n).tolist() for n in (5, 70, 300)]
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = Model(small_model().weights.to(dtype))
        both = [
            answers(model, prompts, Sampling(16), device, device=compute, graphs=graphs)
            for graphs in (True, False)
        ]
        alike = both[0].cold == both[1].cold and both[0].replayed > 0
        found[str(dtype)] = alike and all(one.same for one in both)
    return found


def decode(compute: Compute, model: Model, sizes: Sizes) -> dict[str, Any]:
    """Measure decode steps, replayed and not."""
    config, found = sizes.model, {}
    each = -(-sizes.context // BLOCK)
    shape = (config.layers, 2, each * max(sizes.requests), BLOCK, config.kv_heads, config.head_size)
    with compute.current():
        kv = torch.zeros(shape, dtype=torch.bfloat16, device=compute.device)
        graphs = DecodeGraphs(model, [kv], compute)
        for requests in sizes.requests:
            tables = [[list(range(at * each, (at + 1) * each))] for at in range(requests)]
            spans = [Span([1], sizes.context - 1, table) for table in tables]

            def plain(spans: list[Span] = spans) -> object:
                return compute.download(model.forward(spans, [kv]).argmax(1))

            def replayed(spans: list[Span] = spans) -> object:
                logits = graphs.logits(spans)
                return None if logits is None else compute.download(logits.argmax(1))

            times: dict[str, list[float]] = {"plain": [], "replayed": []}
            for _ in range(STEPS + 1):
                times["plain"].append(milliseconds(plain))
                times["replayed"].append(milliseconds(replayed))
            found[f"{requests} requests"] = {kind: spread(all_[1:]) for kind, all_ in times.items()}
    return found


def ttft(compute: Compute, device: Device, model: Model, sizes: Sizes) -> dict[str, Any]:
    """Measure the first token of a prompt, recomputed, loaded whole and layer by layer."""
    geometry = kvtier.Geometry(model.components, block_tokens=(BLOCK,), chunk_tokens=CHUNK)
    prompt = np.random.default_rng(0).integers(0, sizes.model.vocab_size, sizes.prompt).tolist()
    room = 2 * geometry.bytes_per_token * sizes.prompt + (64 << 20)
    blocks = sizes.prompt // BLOCK + 8
    times: dict[str, list[float]] = {"recompute": [], "whole": [], "by layer": []}
    with kvtier.open(f"dram:{room}B", namespace=kvtier.Namespace("ttft", geometry)) as cache:
        engines = {
            name: Engine(
                model,
                num_blocks=blocks,
                block_tokens=BLOCK,
                chunk_tokens=CHUNK,
                prefix_cache=False,
                device=compute,
            )
            for name in times
        }
        for name, groups in (("whole", 1), ("by layer", None)):
            one = engines[name]
            one.connect(ReferenceConnector(cache, one.kv, device, always=True, groups=groups))
        for turn in range(TURNS + 1):  # the first one saves
            for name, one in engines.items():
                (answer,) = one.generate([prompt], Sampling(1))
                while not one.idle:
                    one.step()
                cache.flush(timeout=60.0)
                stats = answer.finish.stats
                if turn:
                    times[name].append(((stats.first_token or 0.0) - stats.submitted) * 1e3)
        for one in engines.values():
            one.close()
    loaded = statistics.median(times["by layer"])
    return {
        "tokens": sizes.prompt,
        **{f"{name}_ms": spread(some) for name, some in times.items()},
        "by_layer_over_whole": loaded / statistics.median(times["whole"]),
        "by_layer_over_recompute": loaded / statistics.median(times["recompute"]),
    }


def engine_figures(compute: Compute, device: Device, sizes: Sizes = HERE) -> dict[str, Any]:
    """Measure all of it. Blocks."""
    found: dict[str, Any] = {"same": same(compute, device)}
    model = Model(random_weights(sizes.model).to(torch.bfloat16)).to(compute.device)
    found["decode_ms"] = decode(compute, model, sizes)
    found["ttft"] = ttft(compute, device, model, sizes)
    return found


def on_gpu(device: Device) -> dict[str, Any]:
    """Measure the first GPU, which `device` copies to and from. Raises ConfigError without one."""
    return engine_figures(CudaCompute(0), device)


def main() -> None:
    """Rehearse."""
    with closing(CpuDevice()) as device:
        found = engine_figures(TapeCompute(), device, REHEARSAL)
    print(json.dumps(found, indent=1))
    print("a rehearsal on the CPU: gpu not run")


if __name__ == "__main__":
    main()
