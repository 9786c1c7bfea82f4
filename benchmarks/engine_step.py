"""What fetch and spill at full speed cost an engine's steps, in its process and in another.

    python benchmarks/engine_step.py [--dir DIR] [--rounds N] [--json FILE] [--plot FILE.png]

The engine decodes eight requests at a time with one thread, on random weights. Beside it a Cache
of its own saves new prompts and writes them to an NVMe tier, while it reads earlier ones back
into DRAM and copies them out to blocks. In every round each arm has its turn:

quiet, quiet_again   nothing else runs; one over the other is what chance alone does
inside               the cache in the engine's process, as fast as it goes
child                the cache's tiers in a private daemon, its calls and copies in this process,
                     at the rate that `inside` had before
outside              all of it in another process, at that rate, too

The records are those of 256 tokens of SmolLM2-135M in bfloat16. Ratios are of the p99 of all
steps of an arm; their range is that of nine in ten resamplings of whole rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from plot import kept, option

import kvtier
from kvtier.copyplan import CopyPlan
from kvtier.device.cpu import CpuDevice
from kvtier.engine import Engine, Model, ModelConfig, Sampling, random_weights
from kvtier.prefix import Prefix

STEPS = 50  # of one arm in one round
WARM = 5
RUNNING = 8
PROMPT = 64
CHUNKS = 8
TRIES = 100
COMPONENT = kvtier.Component(layers=30, heads=3, head_size=64)
GEOMETRY = kvtier.Geometry((COMPONENT,), block_tokens=(16,), chunk_tokens=256)
CHUNK_BYTES = GEOMETRY.bytes_per_token * GEOMETRY.chunk_tokens
MODEL = ModelConfig(
    vocab_size=1024,
    layers=6,
    hidden_size=384,
    heads=6,
    kv_heads=3,
    head_size=64,
    intermediate_size=1024,
    context_tokens=512,
)
ARMS = ("quiet", "inside", "child", "outside", "quiet_again")
RESAMPLINGS = 2_000


class Order(NamedTuple):
    """Run until the next message, at most at so many bytes a second if given."""

    bytes_per_s: float | None


class Moved(NamedTuple):
    """What a load did: bytes written down and read back, each also copied once, and how long."""

    nbytes: int
    seconds: float


class Load:
    """A cache that saves, spills, fetches and loads, one round after the other."""

    def __init__(self, folder: str, *, own_process: bool) -> None:
        tiers = (
            "dram:384MiB",
            f"lmdb:{folder}?capacity=768MiB&admission=through&write_budget=unlimited",
        )
        namespace = kvtier.Namespace("bench", GEOMETRY)
        self._cache = kvtier.open(*tiers, namespace=namespace, own_process=own_process)
        self._device = CpuDevice()
        blocks = CHUNKS * 16
        shape = (COMPONENT.layers, 2, 2 * blocks, 16, COMPONENT.heads, COMPONENT.head_size)
        self._pages = self._cache.bind(np.ones(shape, np.uint16), self._device)
        self._saved, self._loaded = range(blocks), range(blocks, 2 * blocks)
        self._count = 0
        self._before = self._save()
        self._settle()

    def round(self) -> int:
        """Save one prompt while the one before is fetched; return the bytes of both."""
        cache = self._cache
        while (match := cache.match(self._before)).pending:
            continue  # each ask waits for the daemon
        fetch = cache.fetch(match, timeout=60, deadline=60)
        new = self._save()
        lease = fetch.result(60)
        if lease is None or lease.chunks < CHUNKS:
            raise RuntimeError("a prompt that was written down was not found again")
        with lease:
            self._copy(lambda: cache.plan_load(lease, self._loaded))
        self._before = new
        self._settle()
        return 2 * CHUNKS * CHUNK_BYTES

    def close(self) -> None:
        """Close cache and device."""
        self._cache.close()
        self._device.close()

    def _save(self) -> Prefix:
        self._count += 1
        tokens = np.full(CHUNKS * 256 + 1, self._count, np.int32)
        prefix = self._cache.prefix(tokens)
        self._copy(lambda: self._cache.plan_save(prefix, self._saved))
        return prefix

    def _copy(self, planned: Callable[[], CopyPlan | None]) -> None:
        plans = (planned() for _ in range(TRIES))  # a daemon may take longer than its patience
        plan = next(filter(None, plans), None)
        if plan is None:
            raise RuntimeError("no plan: the cache has no room")
        transfer = self._pages.execute(plan, after=(self._device.host_fence(),))
        self._cache.settle(plan, transfer.result(60))

    def _settle(self) -> None:
        """Wait until all is written down, and leave it there only."""
        if not self._cache.flush(timeout=60):
            raise RuntimeError("the disk does not take what is written down")
        self._cache.clear("dram")


def serve(orders: Connection, folder: str, own_process: bool) -> None:  # noqa: FBT001
    """Carry out orders until None comes; each ends when the next message is there."""
    load = Load(folder, own_process=own_process)
    orders.send(Moved(0, 0.0))
    while (order := orders.recv()) is not None:
        begin, moved = time.perf_counter(), 0
        while not orders.poll():
            moved += load.round()
            if order.bytes_per_s:
                due = begin + moved / order.bytes_per_s
                orders.poll(max(due - time.perf_counter(), 0))
        orders.recv()
        orders.send(Moved(moved, time.perf_counter() - begin))
    load.close()


class Beside:
    """A load in a thread of this process, or in a process of its own."""

    def __init__(self, folder: Path, *, inside: bool, child: bool = False) -> None:
        folder.mkdir()
        spawn = multiprocessing.get_context("spawn")
        self._orders, theirs = spawn.Pipe()
        kind = threading.Thread if inside else spawn.Process
        self._runs = kind(target=serve, args=(theirs, str(folder / "kv"), child), daemon=True)
        self._runs.start()
        self._orders.recv()

    def start(self, bytes_per_s: float | None = None) -> None:
        """Start to move bytes."""
        self._orders.send(Order(bytes_per_s))

    def stop(self) -> Moved:
        """Stop, and return what was moved."""
        self._orders.send(Order(None))
        return self._orders.recv()

    def close(self) -> None:
        """End it."""
        self._orders.send(None)
        self._runs.join()


def decode(engine: Engine) -> list[float]:
    """Return the milliseconds of each step while eight requests are decoded."""
    prompts = np.random.default_rng(0).integers(0, MODEL.vocab_size, (RUNNING, PROMPT))
    names = [
        engine.submit(list(prompt), Sampling(max_tokens=WARM + STEPS + 1)) for prompt in prompts
    ]
    for _ in range(WARM):
        engine.step()
    each = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        engine.step()
        each.append((time.perf_counter() - begin) * 1e3)
    for name in names:
        engine.abort(name)
    engine.step()
    engine.reset_prefix_cache()
    return each


def measure(
    folder: Path, rounds: int
) -> tuple[dict[str, list[list[float]]], dict[str, list[float]]]:
    """Return each arm's milliseconds a step, by round, and the GB/s that ran beside it."""
    engine = Engine(Model(random_weights(MODEL)), num_blocks=RUNNING * 16)
    inside = Beside(folder / "inside", inside=True)
    child = Beside(folder / "child", inside=True, child=True)
    outside = Beside(folder / "outside", inside=False)
    steps: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    rates: dict[str, list[float]] = {"inside": [], "child": [], "outside": []}
    decode(engine)
    for _ in range(rounds):
        rate = None
        for arm in ARMS:
            load = {"inside": inside, "child": child, "outside": outside}.get(arm)
            if load is None:
                steps[arm].append(decode(engine))
                continue
            load.start(rate)
            steps[arm].append(decode(engine))
            moved = load.stop()
            rates[arm].append(moved.nbytes / moved.seconds / 1e9)
            rate = rate or moved.nbytes / moved.seconds
    inside.close()
    child.close()
    outside.close()
    engine.close()
    return steps, rates


def p99(rounds: list[list[float]]) -> float:
    """Return the 99th percentile of the steps of all rounds."""
    return float(np.percentile(np.concatenate(rounds), 99))


def ratio(over: list[list[float]], under: list[list[float]]) -> dict[str, float]:
    """Return the ratio of two arms' p99, and the range in which nine resamplings of ten lie."""
    rounds, again = range(len(over)), random.Random(0)
    found = []
    for _ in range(RESAMPLINGS):
        picked = again.choices(rounds, k=len(rounds))
        found.append(p99([over[at] for at in picked]) / p99([under[at] for at in picked]))
    low, *_, high = statistics.quantiles(found, n=20)
    return {"p99": p99(over) / p99(under), "low": low, "high": high}


def main() -> None:
    """Measure all arms in turn, and print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--dir", type=Path, default=Path(), help="on the disk to use")
    arguments.add_argument("--rounds", type=int, default=20, help="of 50 steps for each arm")
    option(arguments)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        steps, rates = measure(Path(folder), options.rounds)
    report = {"steps": options.rounds * STEPS, "arms": {}, "ratios": {}}
    for arm, rounds in steps.items():
        row = {"p50": statistics.median(np.concatenate(rounds)), "p99": p99(rounds)}
        each = [float(np.percentile(one, 99)) for one in rounds]
        row |= {"p99_of_a_round_low": min(each), "p99_of_a_round_high": max(each)}
        if arm in rates:
            row["gb_per_s"] = statistics.median(rates[arm])
        report["arms"][arm] = row
        moved = f"{row['gb_per_s']:.2f} GB/s beside it" if arm in rates else ""
        print(
            f"{arm:12} p50 {row['p50']:6.2f} ms   p99 {row['p99']:6.2f} ms"
            f"   (of a round {min(each):.2f} to {max(each):.2f})   {moved}"
        )
    for over, under in (
        ("inside", "outside"),
        ("child", "outside"),
        ("quiet_again", "quiet"),
        ("outside", "quiet"),
    ):
        found = report["ratios"][f"{over}_over_{under}"] = ratio(steps[over], steps[under])
        spread = f"({found['low']:.3f} to {found['high']:.3f})"
        print(f"p99 {over} over {under}: {found['p99']:.3f} {spread}")
    print("limit: inside, or child, over outside 1.05")
    panels = {"a step, ms": "arms.*.{p50,p99}", "p99 over p99": "ratios.*.p99@1.05"}
    kept(report, options, panels)


if __name__ == "__main__":
    main()
