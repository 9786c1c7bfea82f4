"""How fast ``kvtier replay`` is, and what it keeps in memory for a block.

    python benchmarks/replay.py [TRACE] [--block-size N] [--rounds N] [--json FILE]
        [--plot FILE.png]

Without a TRACE a synthetic one is made: conversations in turn, of 300,000 blocks. Each policy has a
tier of a tenth of the different blocks, where it has to evict all the time. Memory is what the
process grew by from before the trace was read to the end of a replay through a tier of all blocks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from pathlib import Path

from plot import kept, option

from kvtier.planning.optimum import optimum
from kvtier.planning.replay import make_policy
from kvtier.planning.simulate import simulate
from kvtier.planning.trace import Trace, read_trace

BLOCK = 512
BLOCKS = 300_000
POLICIES = ("lru", "arc", "s3fifo", "lfu")  # of the live cache
PAGE = 4096


def made(path: Path | None, block_tokens: int) -> Trace:
    """Return the trace of a file, or a synthetic one."""
    if path is not None:
        return read_trace(path, block_tokens)
    rng, trace = random.Random(5), Trace("synthetic", block_tokens)
    running: list[list[int]] = []
    while trace.uses < BLOCKS:
        if len(running) < 50 or rng.random() < 0.15:
            running.append([rng.randrange(4)])
        at = -1 - min(int(rng.expovariate(0.05)), len(running) - 1)
        running[at] += range(trace.uses * 8 + 8, trace.uses * 8 + 8 + rng.randrange(1, 8))
        trace.add(float(len(trace)), len(running[at]) * block_tokens, 1, running[at])
        if len(running[at]) > 60:
            del running[at]
    return trace


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def bytes_per_block(path: Path | None, block_tokens: int) -> float:
    """Return the memory that a replay takes for each different block, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grown, (path, block_tokens))


def _grown(path: Path | None, block_tokens: int) -> float:
    before = resident()
    trace = made(path, block_tokens)
    most = 0

    def look(_: int) -> None:
        nonlocal most
        most = max(most, resident())

    simulate(trace, make_policy("lru", trace), trace.unique, tell=look)
    return (max(most, resident()) - before) / trace.unique


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--block-size", type=int, default=BLOCK)
    parser.add_argument("--rounds", type=int, default=3)
    option(parser)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    trace = made(args.trace, args.block_size)
    capacity = max(trace.unique // 10, 1)
    took: dict[str, list[float]] = {name: [] for name in (*POLICIES, "optimal")}
    for _ in range(args.rounds):
        for name in POLICIES:
            began = time.process_time()
            simulate(trace, make_policy(name, trace), capacity)
            took[name].append(time.process_time() - began)
        began = time.process_time()
        optimum(trace, capacity)
        took["optimal"].append(time.process_time() - began)
    seconds = {name: statistics.median(each) for name, each in took.items()}
    report = {
        "trace": trace.name,
        "blocks": trace.uses,
        "unique_blocks": trace.unique,
        "capacity_blocks": capacity,
        "blocks_per_second": {name: round(trace.uses / seconds[name]) for name in POLICIES},
        "optimum_seconds_per_300000": seconds["optimal"] * BLOCKS / trace.uses,
        "bytes_per_unique_block": round(bytes_per_block(args.trace, args.block_size), 1),
    }
    print(json.dumps(report, indent=2))
    kept(report, args, {"block references a second": "blocks_per_second.*"})


if __name__ == "__main__":
    main()
