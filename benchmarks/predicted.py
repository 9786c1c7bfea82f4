"""What ``kvtier replay`` predicts of a trace, beside what the real cache does with it.

    python benchmarks/predicted.py [TRACE] [--policy NAME] [--requests N] [--dir DIR]
                                   [--json FILE] [--plot PNG]

Without a TRACE (Mooncake's JSON lines) a synthetic one is made: conversations whose turns share
what came before. Each request is matched, fetched and saved by a real cache of DRAM and an NVMe
tier, on chunks of one page: as many as fit are what counts, not their size. The engine is a model
of its time: so many tokens a second. The tier is read at a given speed, ten times that of
the deployment that is meant, as the engine is: so an hour takes minutes.

Prediction and measurement know the same capacities in chunks, and the same speeds. Differences
are the cache's own: its order of leaving, its reads side by side, what it costs itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from plot import option

import kvtier
from kvtier.config import Config, TierConfig
from kvtier.copyplan import CopyPlan
from kvtier.planning.prices import Prices
from kvtier.planning.replay import make_policy
from kvtier.planning.stack import Level, Speeds, Stack, simulate_stack
from kvtier.planning.trace import Trace, read_trace
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.testing.slowed import SlowedStore
from kvtier.transfer import CopyResult, CopyStatus

BLOCK = 512
CHUNK_BYTES = 64 << 10
DISK_BYTES = 70 << 10  # of a chunk with its header and its place in the index, about
GEOMETRY = kvtier.Geometry(
    (kvtier.Component(layers=1, heads=1, head_size=32),), block_tokens=(BLOCK,), chunk_tokens=BLOCK
)
NAMESPACE = kvtier.Namespace("timing model", GEOMETRY)
SCALE = 10  # how much faster than the deployment that is meant
PREFILL = 5_000 * SCALE  # tokens a second
CHUNK_SECONDS = 320 * 1024 * BLOCK / 5e9 / SCALE  # a 70B model's chunk from an NVMe at 5 GB/s
LATENCY = 0.1 / SCALE


def synthetic(requests: int, seed: int = 5) -> Trace:
    """Return conversations in turn: each asks what was said before, and a little more."""
    rng = random.Random(seed)
    trace = Trace("synthetic", BLOCK)
    open_ones: list[list[int]] = []
    fresh = 0
    for number in range(requests):
        if not open_ones or rng.random() < 0.15:
            open_ones.append([rng.randrange(4)])  # one of four system prompts
        blocks = open_ones[min(int(rng.expovariate(0.08)), len(open_ones) - 1) * -1 - 1]
        for _ in range(rng.randrange(1, 5)):
            fresh += 1
            blocks.append(1000 + fresh)
        if len(blocks) > 60:
            open_ones.remove(blocks)
        trace.add(number * 300.0, len(blocks) * BLOCK + rng.randrange(BLOCK), 1, blocks)
    return trace


class Measured:
    """A real cache that serves a trace with an engine that is only a clock."""

    def __init__(self, directory: Path, dram: int, disk: int, policy: str) -> None:
        options = {name: option.default for name, option in LmdbSlabStore.OPTIONS.items()}
        self.store = LmdbSlabStore.open(str(directory / "kv"), disk, options)
        slow = SlowedStore(self.store, CHUNK_BYTES / CHUNK_SECONDS, LATENCY)
        tier = TierConfig(
            *("lmdb", "kv", disk, "through"),
            store=slow,
            write_budget=float("inf"),
            policy=policy,
        )
        self.cache = kvtier.open(Config(dram, (tier,), policy=policy), namespace=NAMESPACE)
        self.hits = 0
        self.tokens = 0
        self.ttft: list[float] = []

    def serve(self, blocks: Sequence[int], tokens: int, *, counted: bool) -> None:
        """Match, fetch and save one prompt."""
        prompt = np.repeat(np.asarray(blocks, np.int32), BLOCK)
        rest = tokens - len(prompt)
        prompt = np.concatenate([prompt, np.full(max(rest, 0), -1 % (1 << 20), np.int32)])[:tokens]
        began = time.perf_counter()
        prefix = self.cache.prefix(prompt)
        match = self.cache.match(prefix)
        loaded = 0
        if match.tokens:
            lease = self.cache.fetch(match, timeout=30, deadline=30).result(60)
            if lease is not None:
                with lease:
                    loaded = min(lease.tokens, prefix.limit)
        seconds = time.perf_counter() - began + (tokens - loaded) / PREFILL
        if counted:
            self.hits += loaded
            self.tokens += tokens
            self.ttft.append(seconds)
        plan: CopyPlan | None = self.cache.plan_save(prefix, list(range(len(prefix.names))))
        if plan is not None:
            self.cache.settle(plan, CopyResult(CopyStatus.OK, plan.tokens))
        self.cache.flush(timeout=60)


def predicted(trace: Trace, blocks: tuple[int, int], warmup: float, policy: str) -> Stack:
    """Replay the trace through tiers of so many blocks."""
    block_bytes = BLOCK * GEOMETRY.bytes_per_token
    rate = block_bytes / CHUNK_SECONDS
    levels = [
        Level("dram", blocks[0] * block_bytes, 1e15),
        Level("lmdb", blocks[1] * block_bytes, rate, LATENCY),
    ]
    return simulate_stack(
        trace,
        levels,
        (policy, make_policy(policy, trace)),
        bytes_per_token=GEOMETRY.bytes_per_token,
        speeds=Speeds(1 / PREFILL),
        prices=Prices(),
        warmup=warmup,
        always=True,
    )


def main() -> None:
    """Measure, and print JSON."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--policy", default="lru", help="of both tiers")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--dram-chunks", type=int, default=500)
    parser.add_argument("--disk-chunks", type=int, default=1000)
    parser.add_argument("--warmup", type=float, default=0.3)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--json", type=Path)
    option(parser)
    args = parser.parse_args()
    if args.requests < 10 or not 0 <= args.warmup < 1:
        parser.error("--requests must be at least 10, --warmup a fraction below 1")
    trace = synthetic(args.requests)
    if args.trace is not None:
        whole = read_trace(args.trace, BLOCK)
        trace = Trace(whole.name, BLOCK)
        for number, (blocks, tokens) in enumerate(whole.requests()):
            if number < args.requests:
                trace.add(whole.time(number), tokens, 1, list(blocks))
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        dram = args.dram_chunks * CHUNK_BYTES
        capacity = args.disk_chunks * DISK_BYTES + (4 << 20)
        real = Measured(Path(directory), dram, capacity, args.policy)
        try:
            disk = capacity - real.store.capabilities.overhead
            room = (args.dram_chunks, disk // real.store.footprint(CHUNK_BYTES))
            first = int(len(trace) * args.warmup)
            for number, (blocks, tokens) in enumerate(trace.requests()):
                real.serve(list(blocks), tokens, counted=number >= first)
                if not number % 50:
                    print(f"\r{number} of {len(trace)}", end="", file=sys.stderr, flush=True)
            print("\r\033[K", end="", file=sys.stderr)
        finally:
            real.cache.close()
    told = predicted(trace, room, args.warmup, args.policy)
    rate = 100 * real.hits / real.tokens
    median = statistics.median(real.ttft)
    report = {
        "trace": trace.name,
        "policy": args.policy,
        "requests": len(trace),
        "chunks": {"dram": room[0], "lmdb": room[1]},
        "hit_rate": {
            "predicted": told.hit_rate,
            "measured": round(rate, 3),
            "points_apart": round(abs(rate - told.hit_rate), 3),
        },
        "ttft_s": {
            "predicted": told.ttft.p50,
            "measured": median,
            "measured_over_predicted": round(median / told.ttft.p50, 3),
            "without": told.ttft_without.p50,
        },
    }
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        plot(args.plot, real, told)


def plot(path: Path, real: Measured, told: Stack) -> None:
    """Draw the measured times in order, beside the predicted median and tail."""
    from matplotlib import pyplot as plt

    figure, panel = plt.subplots(figsize=(7, 4), layout="constrained")
    ordered = np.sort(real.ttft)
    panel.plot(ordered, np.linspace(0, 100, len(ordered)), label="measured")
    times = told.ttft
    panel.plot((times.p50, times.p90, times.p99), (50, 90, 99), "o", label="predicted")
    panel.set_xlabel("time to first token, s")
    panel.set_ylabel("requests, %")
    panel.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
