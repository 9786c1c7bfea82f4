"""Contenders that move the same records, each in its turn, and how each stands beside its limit."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from plot import kept, option

from kvtier.tiers.store import Status

RECORD = 5_898_240  # bytes: 256 tokens of SmolLM2-135M in bfloat16
COUNT = 16  # records a call

Contenders = dict[str, Callable[[], object]]
"""Calls by name; one that returns a number has timed itself, in seconds."""


def options(text: str) -> argparse.Namespace:
    """Return what the command line asks for. text: of the script."""
    arguments = argparse.ArgumentParser(description=text.splitlines()[0])
    arguments.add_argument("--dir", type=Path, default=Path(), help="on the disk to measure")
    arguments.add_argument("--rounds", type=int, default=9)
    option(arguments)
    return arguments.parse_args()


def must(statuses: Sequence[Status]) -> None:
    """Stop the benchmark when a record was not moved."""
    if set(statuses) != {Status.OK}:
        raise SystemExit(f"a record was not moved: {set(statuses)}")


def measure(contenders: Contenders, rounds: int, warming: int = 0) -> dict[str, list[float]]:
    """Return GB/s of each contender for each round, but for those that warm up, interleaved."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warming + rounds):
        for name, call in contenders.items():
            begin = time.perf_counter()
            own = call()
            seconds = own if isinstance(own, float) else time.perf_counter() - begin
            if turn >= warming:
                found[name].append(COUNT * RECORD / seconds / 1e9)
    return found


def report(
    found: Mapping[str, Sequence[float]], asked: argparse.Namespace, limits: Mapping[str, str]
) -> None:
    """Print a line a contender, and its ratio to its limit; keep and draw them where asked to."""
    width = max(map(len, found)) + 1
    for name, rates in found.items():
        median = statistics.median(rates)
        print(f"{name:{width}} {median:6.2f} GB/s   ({min(rates):.2f} to {max(rates):.2f})")
    ratios = {}
    for name, limit in limits.items():
        each = sorted(a / b for a, b in zip(found[name], found[limit], strict=True))
        ratios[name] = {"median": statistics.median(each), "low": each[0], "high": each[-1]}
        print(
            f"{name} over {limit}: {ratios[name]['median']:.2f} ({each[0]:.2f} to {each[-1]:.2f})"
        )
    panels = {"GB/s": "gb_per_s.*", "of its limit": "ratios.*@1"}
    kept({"gb_per_s": found, "ratios": ratios}, asked, panels)
