"""What recording costs the thread that matches: times of ``Cache.match`` with it and without.

The same prompts are matched in turns, by a cache that records and by one that does not, in calls
at a steady pace, as an engine's scheduler makes them. Usage::

    python benchmarks/recorder.py [--chunks 512] [--seconds 20] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from plot import kept, option

from kvtier.testing.toy import CHUNK, dram, opened

PACE = 0.004  # seconds from call to call
PROMPTS = 400  # different ones, so that none counts as asked again


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=512, help="of a prompt")
    parser.add_argument("--seconds", type=float, default=20.0)
    option(parser)
    args = parser.parse_args()
    chance = np.random.default_rng(7)
    caches = {"plain": opened(dram(32)).cache, "recording": opened(dram(32)).cache}
    times: dict[str, list[float]] = {name: [] for name in caches}
    with tempfile.TemporaryDirectory() as folder:
        caches["recording"].record(Path(folder) / "requests.jsonl")
        prompts = [chance.integers(0, 1000, args.chunks * CHUNK, np.int32) for _ in range(PROMPTS)]
        named = {
            name: [cache.prefix(prompt) for prompt in prompts] for name, cache in caches.items()
        }
        until, turn = time.perf_counter() + args.seconds, 0
        while time.perf_counter() < until:
            for name, cache in caches.items():
                prefix = named[name][turn % PROMPTS]
                began = time.perf_counter()
                cache.match(prefix)
                times[name].append(time.perf_counter() - began)
                time.sleep(PACE)
            turn += 1
        caches["recording"].record(None)
        written = sum(1 for path in Path(folder).iterdir() for _ in path.open())
        for cache in caches.values():
            cache.close()
    report = {
        "requests": turn,
        "recorded": written,
        **{
            name: {
                f"p{part}_us": round(1e6 * float(np.percentile(found, part)), 2)
                for part in (50, 99)
            }
            for name, found in times.items()
        },
    }
    print(json.dumps(report, indent=2))
    kept(report, args, {"a match, us": "{plain,recording}.*"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
