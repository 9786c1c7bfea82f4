"""What it is worth to decide between loading and computing: time to first token, three ways.

    python benchmarks/cost_model.py [--rounds N] [--tokens N] [--dir DIR] [--json FILE] [--plot PNG]

SmolLM2-135M serves prompts whose KV lies in an NVMe tier that is read at a given speed. In every
round each arm has its turn, with a prompt that only the tier has:

recompute   no cache
load        all that the tier has, whatever it costs
advised     what is estimated to be worth it, by what reads and steps took before

First at 10 MB/s or, if this machine computes slower than that, at a quarter of its speed: there
the tier loses. Then at the speed at which loading and computing take the same time: there `advised`
computes from the front while the tier reads from the back. Outputs of all arms are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from plot import kept, option

import kvtier
from kvtier.bench.messages import LoadModel
from kvtier.bench.models import BLOCK_TOKENS, BenchModel, load_model
from kvtier.bench.settings import RANDOM, SMOLLM2
from kvtier.config import Config, TierConfig
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.cpu import CpuDevice
from kvtier.engine import Engine, Sampling
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.slowed import Slowed

CHUNK = 64
SLOW = 10e6
ARMS = ("recompute", "load", "advised")
LEARNING = 3  # first rounds, in which `advised` gets to know both speeds
OUTPUT = Sampling(max_tokens=4)


MORE = "DRAM, NVMe, and a shared tier that loses may have more"


class Served(NamedTuple):
    """What an arm gave: seconds to the first token, and all tokens."""

    seconds: float
    tokens: tuple[int, ...]


class Arm:
    """An engine, and a cache below it unless it recomputes."""

    def __init__(self, name: str, bench: BenchModel, tokens: int, directory: Path) -> None:
        self.name = name
        self.device = CpuDevice()
        self.engine = Engine(
            bench.model,
            num_blocks=2 * (tokens + 64) // BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=CHUNK,
            step_tokens=128,
        )
        self.cache: kvtier.Cache | None = None
        if name == "recompute":
            return
        capacity = 2 << 30
        store = LmdbSlabStore.open(str(directory / name), capacity, _defaults())
        self.reads = Slowed(store)
        tier = TierConfig("lmdb", name, capacity, "through", store=store)
        self.cache = kvtier.open(Config(256 << 20, (tier,)), namespace=bench.namespace)
        connector = ReferenceConnector(
            self.cache, list(self.engine.kv), self.device, always=name == "load"
        )
        self.engine.connect(connector)

    def forget(self) -> None:
        """Leave what was computed to the tier alone."""
        self.engine.reset_prefix_cache()
        if self.cache is not None:
            self.cache.flush(timeout=60)
            self.cache.clear("dram")

    def serve(self, prompt: Sequence[int]) -> Served:
        """Serve one prompt."""
        (done,) = self.engine.generate([prompt], OUTPUT)
        stats = done.finish.stats
        return Served((stats.first_token or 0.0) - stats.submitted, done.tokens)

    def close(self) -> None:
        """End all."""
        self.engine.close()
        if self.cache is not None:
            self.cache.close()
        self.device.close()


def _defaults() -> dict[str, object]:
    return {name: option.default for name, option in LmdbSlabStore.OPTIONS.items()}


class Figures(NamedTuple):
    """Of each arm its seconds to the first token, round by round.

    wrong: rounds whose answers differed. choices: what `advised` chose, how often.
    """

    seconds: dict[str, list[float]]
    wrong: int
    choices: dict[str, float]


def rounds(arms: Sequence[Arm], prompts: Sequence[Sequence[int]], speed: float) -> Figures:
    """Serve a prompt to each arm in turn, the order moving on by one each round."""
    for arm in arms:
        if arm.cache is not None:
            arm.reads.bytes_per_s = speed
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    wrong = 0
    for number, prompt in enumerate(prompts):
        turn = number % len(arms)
        answers = set()
        for arm in (*arms[turn:], *arms[:turn]):
            arm.forget()
            served = arm.serve(prompt)
            answers.add(served.tokens)
            if number >= LEARNING:
                seconds[arm.name].append(served.seconds)
        wrong += len(answers) - 1
        print(f"\r{number + 1} of {len(prompts)} rounds", end="", file=sys.stderr, flush=True)
    print("\r\033[K", end="", file=sys.stderr)
    figures = next(arm.cache.figures() for arm in arms if arm.name == "advised" and arm.cache)
    choices = {
        name.partition('"')[2].rstrip('"}'): count
        for name, count in figures.items()
        if "load_decisions" in name
    }
    return Figures(seconds, wrong, choices)


def fill(arms: Sequence[Arm], prompts: Sequence[Sequence[int]]) -> float:
    """Save all prompts in the tiers; return the seconds that the first arm computes one in."""
    took = []
    for prompt in prompts:
        for arm in arms:
            arm.forget()
            began = time.perf_counter()
            arm.engine.generate([prompt], Sampling(1))
            if arm is arms[0]:
                took.append(time.perf_counter() - began)
    return statistics.median(took)


def phase(
    bench: BenchModel,
    prompts: Sequence[Sequence[int]],
    args: argparse.Namespace,
    speed_of: Callable[[float], float],
) -> tuple[Figures, float, float]:
    """Measure with a tier whose speed follows from that of computing, in bytes of KV a second.

    Returns the figures, the tier's speed, and that of computing.
    """
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        arms = [Arm(name, bench, args.tokens, Path(directory)) for name in ARMS]
        try:
            nbytes = bench.namespace.geometry.bytes_per_token * args.tokens
            computing = nbytes / fill(arms, prompts)
            return rounds(arms, prompts, speed_of(computing)), speed_of(computing), computing
        finally:
            for arm in arms:
                arm.close()


def decisions() -> dict[str, dict[str, float]]:
    """Return the microseconds of ``Cache.advise`` on 512 chunks, by where they lie."""
    geometry = kvtier.Geometry(
        (kvtier.Component(layers=1, heads=1, head_size=2),), block_tokens=(16,), chunk_tokens=CHUNK
    )
    places = {
        "all in DRAM": bytes(512),
        "all in NVMe": b"\1" * 512,
        "DRAM, NVMe, S3": bytes(200) + b"\1" * 200 + b"\2" * 112,
        "DRAM, NVMe, S3 that loses": bytes(200) + b"\1" * 200 + b"\3" * 112,
        "another tier at each chunk": b"\0\1\2\1" * 128,
        "another tier at each chunk, one loses": b"\0\1\3\1" * 128,
        MORE: bytes(200) + b"\1" * 200,
    }
    names = ("lmdb", "s3", "valkey")  # the last one slower than computing
    tiers = tuple(TierConfig(one, "", None, "through", store=MemoryStore()) for one in names)
    namespace = kvtier.Namespace("decisions", geometry)
    took: dict[str, list[float]] = {name: [] for name in places}
    with kvtier.open(Config(1 << 20, tiers), namespace=namespace) as cache:
        costs = cache._adviser.costs  # noqa: SLF001
        nbytes = CHUNK * geometry.bytes_per_token
        for name, seconds in zip(names, (1e-3, 1e-2, 0.1), strict=True):
            costs.believe_tier(name, 1e-3, seconds / nbytes)
        for start in (0, 512 * CHUNK):  # of its last tokens each takes a third longer
            cache.computed([(start, start + CHUNK)], CHUNK * (1e-3 + 1e-8 * start))
        found = cache.match(range(512 * CHUNK + 1))
        for name, where in places.items():
            match = replace(found, tokens=len(where) * CHUNK, where=where, unknown=name == MORE)
            costs.probe_due("valkey")  # so that none is due meanwhile
            for _ in range(500):
                began = time.perf_counter()
                cache.advise(match, meet=True)
                took[name].append(1e6 * (time.perf_counter() - began))
    return {name: spread(each) for name, each in took.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"p50": middle, "p25": low, "p75": high}


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Return the median of the ratios of each round, with its quartiles."""
    return spread([one / other for one, other in zip(over, under, strict=True)])


def main() -> None:
    """Measure, and print a table or write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=(SMOLLM2, RANDOM), default=SMOLLM2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--dir", type=Path)
    option(parser)
    parser.add_argument("--decisions", action="store_true", help="only what a decision takes")
    args = parser.parse_args()
    if args.decisions:
        show({"decision_us": decisions()})
        return
    if args.rounds < 3 or not 4 * CHUNK <= args.tokens <= 1900:
        parser.error("--rounds must be at least 3, --tokens from 256 to 1900")
    torch.set_num_threads(1)
    bench = load_model(LoadModel(args.model, CHUNK))
    draw = np.random.default_rng(7)
    vocab = bench.model.config.vocab_size
    count = args.rounds + LEARNING
    prompts = [draw.integers(0, vocab, args.tokens).tolist() for _ in range(count)]
    per_token = bench.namespace.geometry.bytes_per_token
    lost, slow, computing = phase(bench, prompts, args, lambda speed: min(SLOW, speed / 4))
    even, speed, _ = phase(bench, prompts, args, lambda speed: speed)
    report = {
        "model": args.model,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "prefill_tokens_per_s": computing / per_token,
        "wrong_outputs": lost.wrong + even.wrong,
        "decision_us": decisions(),
        "slow_tier": {
            "bytes_per_s": slow,
            "ttft_over_recompute": ratio(lost.seconds["advised"], lost.seconds["recompute"])["p50"],
            "spread": ratio(lost.seconds["advised"], lost.seconds["recompute"]),
            "always_loading_over_recompute": ratio(lost.seconds["load"], lost.seconds["recompute"]),
            "ttft_s": {name: spread(each) for name, each in lost.seconds.items()},
            "choices": lost.choices,
        },
        "meet_in_the_middle": {
            "bytes_per_s": speed,
            "best_pure_over_meet": min(
                statistics.median(even.seconds[name]) for name in ("recompute", "load")
            )
            / statistics.median(even.seconds["advised"]),
            "ttft_s": {name: spread(each) for name, each in even.seconds.items()},
            "choices": even.choices,
        },
    }
    show(report)
    panels = {
        "of a tier that loses, s": "slow_tier.ttft_s.*",
        "of one as fast as computing, s": "meet_in_the_middle.ttft_s.*",
    }
    kept(report, args, panels)


def show(report: dict[str, object]) -> None:
    """Print what a person wants to see."""
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
