"""What ``kvtier replay`` predicts of a trace, beside what the real cache does with it.

    python benchmarks/predicted.py [TRACE] [--policy NAME] [--requests N] [--at-times]
                                   [--decide] [--dir DIR] [--json FILE] [--plot PNG]

A TRACE is what `kvtier replay` takes, in blocks of 512 tokens: a file, or a workload such as
'workload:multi-turn?prefixes=20', whose answers are saved, too. Without one conversations are made
whose turns share what came before. Each request is matched, fetched and saved by a real cache of
DRAM and an NVMe tier, on chunks of one page: as many as fit are what counts, not their size. The
engine is a model of its time: so many tokens a second. The tier is read at a given speed, ten times
that of the deployment that is meant, as the engine is: so an hour takes minutes.

With --at-times requests come at the trace's times, --every seconds apart in the mean, and wait
for each other: for the tier, and for the engine, which computes one after the other. Whenever it
is free it looks up those that wait, in turn, passes over who waits for the tier, and computes the
first that need not. `load` is what it computes of the time in which requests come: beyond 1 it is
overloaded, and all wait longer and longer. With --decide what is read is what is estimated to be
worth it, and where that is as fast as computing, they meet in the middle.

Prediction and measurement know the same capacities in chunks, and the same speeds. Differences
are the cache's own: its order of leaving, its reads side by side, what it costs itself. And an NVMe
tier of some tens of MiB holds fewer chunks than its capacity would have room for, as segments are
whole and what leaves does so in lots: at most 306 of 329 in 25 MB, 5,070 of 5,097 in 363 MB. No
replay knows that: where the hit rate hangs on the last percents of the room, it is points.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from plot import kept, option

import kvtier
from kvtier.config import Config, TierConfig
from kvtier.copyplan import CopyPlan
from kvtier.planning.prices import Prices
from kvtier.planning.replay import make_policy
from kvtier.planning.sources import read_source, sources
from kvtier.planning.stack import Level, Speeds, Stack, simulate_stack
from kvtier.planning.trace import Trace
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.testing.slowed import Slowed
from kvtier.transfer import CopyResult, CopyStatus, FetchTransfer

BLOCK = 512
CHUNK_BYTES = 64 << 10
DISK_BYTES = 70 << 10  # of a chunk with its header and its place in the index, about
GEOMETRY = kvtier.Geometry(
    (kvtier.Component(layers=1, heads=1, head_size=32),), block_tokens=(BLOCK,), chunk_tokens=BLOCK
)
NAMESPACE = kvtier.Namespace("timing model", GEOMETRY)
SCALE = 10  # how much faster than the deployment that is meant


class Deployment(NamedTuple):
    """Its speeds. prefill: tokens a second; chunk, latency: seconds of reading one, and before."""

    prefill: float
    chunk: float
    latency: float


def deployed(scale: float) -> Deployment:
    """Return those of a 70B model and an NVMe at 5 GB/s, so many times as fast."""
    return Deployment(5_000 * scale, 320 * 1024 * BLOCK / 5e9 / scale, 0.1 / scale)


def synthetic(requests: int) -> Trace:
    """Return conversations in turn: each asks what was said before, and a little more."""
    rng, gaps = random.Random(5), random.Random(5)
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

    def __init__(self, directory: Path, room: tuple[int, int], args: argparse.Namespace) -> None:
        options = {name: option.default for name, option in LmdbSlabStore.OPTIONS.items()}
        dram, disk = room
        self.speed = deployed(args.scale)
        self.store = LmdbSlabStore.open(str(directory / "kv"), disk, options)
        Slowed(self.store, CHUNK_BYTES / self.speed.chunk, self.speed.latency)
        tier = TierConfig(
            *("lmdb", "kv", disk, "through"),
            store=self.store,
            write_budget=float("inf"),
            policy=args.policy,
        )
        self.cache = kvtier.open(Config(dram, (tier,), policy=args.policy), namespace=NAMESPACE)
        self.decide = args.decide
        self.last: kvtier.Prefix | None = None  # that was computed: the engine has it
        self.hits = 0
        self.tokens = 0
        self.computing = 0.0
        self.ttft: list[float] = []

    def has(self, prefix: kvtier.Prefix) -> int:
        """Return the tokens of a prompt that the engine itself has: of the last one, no more."""
        keys = [] if self.last is None else self.last.keys
        both = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(keys, prefix.keys, strict=False)
        )
        return min(sum(1 for _ in both) * BLOCK, prefix.limit)

    def serve_in_turn(self, trace: Trace, first: int) -> None:
        """Serve one request after the other; those from `first` on are counted."""
        for number, served in enumerate(trace.served()):
            job = Job(self, *served, counted=number >= first)
            began = time.perf_counter()
            job.begin(began, threading.Event())
            job.wait()
            seconds = max(time.perf_counter() - began, job.front)
            self.end(job, seconds + job.computing - job.front)
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
        self.computing += job.computing
        self.cache.computed(job.spans, job.computing)
        self.last = prefix = self.cache.prefix(job.computed)
        plan: CopyPlan | None = self.cache.plan_save(prefix, list(range(len(prefix.names))))
        if plan is not None:
            self.cache.settle(plan, CopyResult(CopyStatus.OK, plan.tokens))

    def serve_at_times(self, trace: Trace, first: int, seconds_per_unit: float) -> None:
        """Serve requests as an engine does that computes one prompt at a time, see the module.

        It is a clock: that this loop wakes up late is no time of its.
        """
        coming = deque(enumerate(trace.served()))
        start, wake = time.perf_counter() - trace.time(0) * seconds_per_unit, threading.Event()
        loading: list[Job] = []
        current: Job | None = None
        free = 0.0
        while coming or loading or current:
            now = time.perf_counter()
            if current is not None and now >= free:
                self.end(current, free - current.came)
                current = None
            if current is None:
                current = next((job for job in loading if job.there), None)
            while current is None and coming:
                number, served = coming[0]
                if now < (came := start + trace.time(number) * seconds_per_unit):
                    break
                coming.popleft()
                job = Job(self, *served, counted=number >= first)
                job.came = came
                job.begin(max(came, free), wake)
                loading.append(job)
                print(f"\r{number + 1} of {len(trace)}", end="", file=sys.stderr, flush=True)
                if job.front or job.there:
                    current = job
            if current in loading:
                loading.remove(current)
                current.wait()
                free = max(max(free, current.came) + current.front, current.ready)
                free += current.computing - current.front
            due = [free] if current is not None else []
            due += [start + trace.time(coming[0][0]) * seconds_per_unit] if coming else []
            wake.wait(max(min(due, default=now + 0.1) - time.perf_counter(), 0.0))
            wake.clear()
        print("\r\033[K", end="", file=sys.stderr)
        self.cache.flush(timeout=60)


class Job:
    """A prompt that is served: looked up, and what the cache has of it on its way.

    blocks: the prompt's, `asked` of them, and those of its answer.
    came: when. ready: when that is there. front: seconds of what is computed meanwhile.
    """

    def __init__(
        self, real: Measured, blocks: Sequence[int], asked: int, tokens: int, *, counted: bool
    ) -> None:
        prompt = np.repeat(np.asarray(blocks[:asked], np.int32), BLOCK)
        rest = tokens - len(prompt)
        prompt = np.concatenate([prompt, np.full(max(rest, 0), -1 % (1 << 20), np.int32)])[:tokens]
        self.prompt = self.computed = prompt
        if len(blocks) > asked:
            self.computed = np.repeat(np.asarray(blocks, np.int32), BLOCK)
        self.real = real
        self.tokens = tokens
        self.counted = counted
        self.came = self.ready = self.front = 0.0
        self.loaded = 0
        self.start = 0  # of what is loaded
        self.fetch: FetchTransfer | None = None
        self.lease: kvtier.Lease | None = None

    def begin(self, now: float, wake: threading.Event) -> None:
        """Look it up. now: when its turn came, by the engine's clock, which this one is behind."""
        began, cache = time.perf_counter(), self.real.cache
        match = cache.match(cache.prefix(self.prompt))
        if self.real.decide:
            match, advice = cache.advise(match, meet=True)
            self.start = advice.begin
            self.front = advice.begin / self.real.speed.prefill
        self.match = match
        if match.tokens and not any(match.where):
            self.lease = cache.lease(match, deadline=30)
        self.ready = now + time.perf_counter() - began
        if self.lease is None and match.tokens:

            def settled() -> None:
                self.ready = time.perf_counter() - (began - now)
                wake.set()

            first = self.start // BLOCK
            self.fetch = cache.fetch(match, timeout=30, deadline=30, first=first)
            self.fetch.on_settled(settled)

    @property
    def there(self) -> bool:
        """Whether nothing is waited for."""
        return self.fetch is None or self.fetch.poll()

    def wait(self) -> None:
        """Wait until what the cache has of it is there."""
        lease = self.lease if self.fetch is None else self.fetch.result(60)
        if lease is not None:
            with lease:
                self.loaded = max(min(lease.tokens, self.match.prefix.limit) - self.start, 0)
        if not self.start:
            self.loaded = max(self.loaded, self.real.has(self.match.prefix))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """What the engine computes."""
        return [(0, self.start), (self.start + self.loaded, self.tokens)]

    @property
    def computing(self) -> float:
        """Seconds that this takes."""
        return (self.tokens - self.loaded) / self.real.speed.prefill


def predicted(
    trace: Trace, blocks: tuple[int, int], args: argparse.Namespace, seconds_per_unit: float
) -> Stack:
    """Replay the trace through tiers of so many blocks; at its times, if they have a unit."""
    policy = args.policy
    block_bytes = BLOCK * GEOMETRY.bytes_per_token
    speed = deployed(args.scale)
    rate = block_bytes / speed.chunk
    levels = [
        Level("dram", blocks[0] * block_bytes, 1e15),
        Level("lmdb", blocks[1] * block_bytes, rate, speed.latency),
    ]
    return simulate_stack(
        trace,
        levels,
        (policy, make_policy(policy, trace)),
        bytes_per_token=GEOMETRY.bytes_per_token,
        speeds=Speeds(1 / speed.prefill),
        prices=Prices(),
        warmup=args.warmup,
        always=not args.decide,
        seconds_per_unit=seconds_per_unit or 1e-3,
        at_times=bool(seconds_per_unit),
    )


def beginning(named: str, requests: int) -> Trace:
    """Return the first requests of a trace."""
    whole = read_source(sources([named])[0], BLOCK, skip_bad=False, time_unit="ms")
    trace = Trace(whole.name, BLOCK)
    for number, (blocks, asked, tokens) in enumerate(whole.served()):
        if number < requests:
            trace.add(whole.time(number), tokens, 1, blocks[:asked], blocks[asked:])
    return trace


def main() -> None:
    """Measure, and print JSON."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--policy", default="lru", help="of both tiers")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--dram-chunks", type=int, default=500)
    parser.add_argument("--disk-chunks", type=int, default=1000)
    parser.add_argument("--warmup", type=float, default=0.3)
    parser.add_argument("--at-times", action="store_true", help="requests wait for each other")
    parser.add_argument("--every", type=float, default=0.08, help="seconds between two; as above")
    parser.add_argument("--scale", type=float, default=SCALE, help="how much faster than meant")
    parser.add_argument("--decide", action="store_true", help="load what is worth it, not all")
    parser.add_argument("--dir", type=Path)
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
        real = Measured(Path(directory), (dram, capacity), args)
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
    told = predicted(trace, room, args, unit)
    rate = 100 * real.hits / real.tokens
    median = statistics.median(real.ttft)
    report = {
        "trace": trace.name,
        "policy": args.policy,
        "requests": len(trace),
        "seconds_between": args.every if args.at_times else None,
        "load": round(real.computing / (span * unit), 2) if args.at_times else None,
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
    panels = {
        "time to first token, s": "ttft_s.{predicted,measured,without}",
        "hit rate, %": "hit_rate.{predicted,measured}",
    }
    kept(report, args, panels)


if __name__ == "__main__":
    main()
