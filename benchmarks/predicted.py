"""What ``kvtier replay`` predicts of a trace, beside what the real cache does with it.

    python benchmarks/predicted.py [TRACE] [--policy NAME] [--requests N] [--at-times]
                                   [--dir DIR] [--json FILE] [--plot PNG]

Without a TRACE (Mooncake's JSON lines) a synthetic one is made: conversations whose turns share
what came before. Each request is matched, fetched and saved by a real cache of DRAM and an NVMe
tier, on chunks of one page: as many as fit are what counts, not their size. The engine is a model
of its time: so many tokens a second. The tier is read at a given speed, ten times that of
the deployment that is meant, as the engine is: so an hour takes minutes.

With --at-times requests come at the trace's times, --every seconds apart in the mean, and wait
for each other: for the tier, and for the engine, which computes one after the other.

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
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
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
    rng, gaps = random.Random(seed), random.Random(seed)
    trace, now = Trace("synthetic", BLOCK), 0.0
    open_ones: list[list[int]] = []
    fresh = 0
    for _ in range(requests):
        if not open_ones or rng.random() < 0.15:
            open_ones.append([rng.randrange(4)])  # one of four system prompts
        blocks = open_ones[min(int(rng.expovariate(0.08)), len(open_ones) - 1) * -1 - 1]
        for _ in range(rng.randrange(1, 5)):
            fresh += 1
            blocks.append(1000 + fresh)
        if len(blocks) > 60:
            open_ones.remove(blocks)
        now += gaps.expovariate(1 / 300.0)
        trace.add(now, len(blocks) * BLOCK + rng.randrange(BLOCK), 1, blocks)
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

    def serve_in_turn(self, trace: Trace, first: int) -> None:
        """Serve one request after the other; those from `first` on are counted."""
        for number, (blocks, tokens) in enumerate(trace.requests()):
            began = time.perf_counter()
            job = Job(self.cache, list(blocks), tokens, counted=number >= first)
            job.wait()
            self.end(job, time.perf_counter() - began + job.computing)
            self.cache.flush(timeout=60)
            if not number % 50:
                print(f"\r{number} of {len(trace)}", end="", file=sys.stderr, flush=True)
        print("\r\033[K", end="", file=sys.stderr)

    def end(self, job: Job, seconds: float) -> None:
        """Count a prompt whose first token came after so long, and save it."""
        if job.counted:
            self.hits += job.loaded
            self.tokens += job.tokens
            self.ttft.append(seconds)
        prefix = job.match.prefix
        plan: CopyPlan | None = self.cache.plan_save(prefix, list(range(len(prefix.names))))
        if plan is not None:
            self.cache.settle(plan, CopyResult(CopyStatus.OK, plan.tokens))

    def serve_at_times(self, trace: Trace, first: int, seconds_per_unit: float) -> None:
        """Serve requests when they come; the engine computes one at a time, as they are loaded.

        It is a clock: that this loop wakes up late is no time of its.
        """
        coming = deque(enumerate(trace.requests()))
        start, wake = time.perf_counter() - trace.time(0) * seconds_per_unit, threading.Event()
        loading: list[Job] = []
        loaded: deque[Job] = deque()
        current, free = None, 0.0
        while coming or loading or loaded or current:
            now = time.perf_counter()
            if current is not None and now >= free:
                self.end(current, free - current.came)
                current = None
            while coming and now >= (came := start + trace.time(coming[0][0]) * seconds_per_unit):
                number, (blocks, tokens) = coming.popleft()
                job = Job(self.cache, list(blocks), tokens, counted=number >= first)
                job.came = came
                if job.fetch is not None:
                    job.fetch.on_settled(job.settled(wake))
                loading.append(job)
            for job in [one for one in loading if one.fetch is None or one.fetch.poll()]:
                job.wait()
                job.ready = job.ready or time.perf_counter()
                loading.remove(job)
                loaded.append(job)
            if current is None and loaded:
                current = loaded.popleft()
                free = max(free, current.ready) + current.computing
            due = [free] if current is not None else []
            due += [start + trace.time(coming[0][0]) * seconds_per_unit] if coming else []
            wake.wait(max(min(due, default=now + 0.1) - time.perf_counter(), 0.0))
            wake.clear()
        self.cache.flush(timeout=60)


class Job:
    """A prompt that is served: matched, and what the cache has of it on its way."""

    def __init__(
        self, cache: kvtier.Cache, blocks: Sequence[int], tokens: int, *, counted: bool
    ) -> None:
        prompt = np.repeat(np.asarray(blocks, np.int32), BLOCK)
        rest = tokens - len(prompt)
        prompt = np.concatenate([prompt, np.full(max(rest, 0), -1 % (1 << 20), np.int32)])[:tokens]
        self.tokens = tokens
        self.counted = counted
        self.came = 0.0
        self.ready = 0.0
        self.loaded = 0
        self.match = cache.match(cache.prefix(prompt))
        self.fetch = None
        if self.match.tokens:
            self.fetch = cache.fetch(self.match, timeout=30, deadline=30)

    def settled(self, wake: threading.Event) -> Callable[[], None]:
        """Return what notes when that is there, and wakes who waits for it."""

        def note() -> None:
            self.ready = 0.0
            wake.set()

        return note

    def wait(self) -> None:
        """Wait until what the cache has of it is there."""
        lease = None if self.fetch is None else self.fetch.result(60)
        if lease is not None:
            with lease:
                self.loaded = min(lease.tokens, self.match.prefix.limit)

    @property
    def computing(self) -> float:
        """Seconds that the engine takes for what is not loaded."""
        return (self.tokens - self.loaded) / PREFILL


def predicted(
    trace: Trace, blocks: tuple[int, int], warmup: float, policy: str, seconds_per_unit: float
) -> Stack:
    """Replay the trace through tiers of so many blocks; at its times, if they have a unit."""
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
        seconds_per_unit=seconds_per_unit or 1e-3,
        at_times=bool(seconds_per_unit),
    )


def beginning(path: Path, requests: int) -> Trace:
    """Return the first requests of a trace."""
    whole = read_trace(path, BLOCK)
    trace = Trace(whole.name, BLOCK)
    for number, (blocks, tokens) in enumerate(whole.requests()):
        if number < requests:
            trace.add(whole.time(number), tokens, 1, list(blocks))
    return trace


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
    parser.add_argument("--at-times", action="store_true", help="requests wait for each other")
    parser.add_argument("--every", type=float, default=0.08, help="seconds between two; as above")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--json", type=Path)
    option(parser)
    args = parser.parse_args()
    if args.requests < 10 or not 0 <= args.warmup < 1:
        parser.error("--requests must be at least 10, --warmup a fraction below 1")
    trace = synthetic(args.requests) if args.trace is None else beginning(args.trace, args.requests)
    span = trace.last_time() - trace.time(0)
    if args.at_times and (span <= 0 or args.every <= 0):
        parser.error("--at-times needs a trace with times, and --every above 0")
    unit = args.every * len(trace) / span if args.at_times else 0.0
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        dram = args.dram_chunks * CHUNK_BYTES
        capacity = args.disk_chunks * DISK_BYTES + (4 << 20)
        real = Measured(Path(directory), dram, capacity, args.policy)
        try:
            disk = capacity - real.store.capabilities.overhead
            room = (args.dram_chunks, disk // real.store.footprint(CHUNK_BYTES))
            first = int(len(trace) * args.warmup)
            if args.at_times:
                real.serve_at_times(trace, first, unit)
            else:
                real.serve_in_turn(trace, first)
        finally:
            real.cache.close()
    told = predicted(trace, room, args.warmup, args.policy, unit)
    rate = 100 * real.hits / real.tokens
    median = statistics.median(real.ttft)
    report = {
        "trace": trace.name,
        "policy": args.policy,
        "requests": len(trace),
        "seconds_between": args.every if args.at_times else None,
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
