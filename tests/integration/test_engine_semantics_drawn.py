"""Engines of every kind over a real Cache, under drawn options, arrivals and disturbances.

Whatever is preempted, aborted, held back, cleared or loaded: the answers are those of the engine
alone, and in the end nobody holds anything.
"""

from __future__ import annotations

import contextlib
import functools
import random

import numpy as np
import pytest
import torch

from kvtier.engine import (
    Engine,
    HybridConfig,
    Kind,
    ModelConfig,
    Sampling,
    prompt_lookup,
    random_hybrid,
)
from kvtier.testing.serving import CHUNK, Serving

SEEDS = 16
MIXES = [
    (Kind.FULL, Kind.FULL),
    (Kind.WINDOW, Kind.FULL),
    (Kind.RECURRENT, Kind.LATENT),
    (Kind.WINDOW, Kind.RECURRENT, Kind.FULL),
]


@functools.cache
def model(kinds: tuple[Kind, ...]):
    torch.set_num_threads(1)
    sizes = ModelConfig(
        vocab_size=61,
        layers=len(kinds),
        hidden_size=32,
        heads=2,
        kv_heads=1,
        head_size=16,
        intermediate_size=48,
        context_tokens=512,
    )
    return random_hybrid(HybridConfig(sizes, kinds, window=40), seed=len(kinds))


@functools.cache
def alone(kinds, prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    engine = Engine(model(kinds), num_blocks=32, prefix_cache=False, chunk_tokens=CHUNK)
    return engine.generate([prompt], sampling)[0].tokens


def prompt_of(shared: int, own: int, seed: int) -> tuple[int, ...]:
    common = np.random.default_rng(0).integers(0, 61, shared).tolist()
    return (*common, *np.random.default_rng(seed).integers(0, 61, own).tolist())


PROMPTS = [
    prompt_of(shared, own, seed)
    for shared in (0, 70, 100)
    for own, seed in ((3, 1), (40, 2), (70, 3))
]
SAMPLINGS = [Sampling(1), Sampling(20), Sampling(40), Sampling(30, temperature=2.0, seed=1)]


class Drive:
    """An engine with its cache, and what it was asked and has answered."""

    def __init__(self, kinds, options) -> None:
        self.kinds = kinds
        self.one = Serving(model(kinds), **options)
        self.asked: dict[str, tuple] = {}
        self.answers: dict[str, list[int]] = {}

    def submit(self, prompt, sampling) -> None:
        self.asked[self.one.engine.submit(prompt, sampling)] = (prompt, sampling)

    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.one.engine.step():
                if output.token is not None:
                    self.answers.setdefault(output.request_id, []).append(output.token)

    def hold(self, role, count: int) -> None:
        with self.one.held(role):
            self.step(count)

    def abort(self, number: int) -> None:
        ids = list(self.asked)
        if number < len(ids):
            self.one.engine.abort(ids[number])
            self.asked.pop(ids[number])

    def clear(self) -> None:
        self.one.cache.clear("dram", timeout=10)

    def reset(self) -> None:
        self.one.engine.reset_prefix_cache()

    def end(self) -> None:
        """Serve all to their end, and all once more, from what was kept; check everything."""
        for again in (True, False):
            while not self.one.engine.idle:
                self.step(1)
            self.one.settle()
            for request_id, asked in self.asked.items():
                assert tuple(self.answers[request_id]) == alone(self.kinds, *asked)
            if again:
                for asked in list(self.asked.values()):
                    self.submit(*asked)
        assert all(pool.free == pool.num_blocks for pool in self.one.engine._pools.pools)
        assert self.one.cache.figures()["kvtier_leased_parts"] == 0


def drawn(draw: random.Random, kinds) -> tuple[dict, list[tuple]]:
    """Draw an engine that is a little too small, and what happens to it."""
    options = {
        "num_blocks": draw.randint(14, 18),
        "num_states": draw.randint(2, 8),
        "step_tokens": draw.randint(16, 100),
        "max_running": draw.randint(2, 5),
        "prefix_cache": draw.random() < 0.5,
        "chunks": draw.randint(2, 12),
    }
    recurrent = Kind.RECURRENT in kinds  # a state cannot take a rejected token back
    way = draw.choice([{}, {"ahead": True}, {} if recurrent else {"drafter": prompt_lookup}])
    events = [
        draw.choices(
            [
                ("submit", draw.choice(PROMPTS), draw.choice(SAMPLINGS)),
                ("step", draw.randint(1, 12)),
                ("hold", draw.choice(["load", "store"]), draw.randint(1, 6)),
                ("abort", draw.randint(0, 5)),
                ("clear",),
                ("reset",),
            ],
            [8, 4, 2, 1, 1, 1],
        )[0]
        for _ in range(16)
    ]
    return options | way, events


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_disturbance_changes_an_answer(seed):
    draw = random.Random(seed)
    kinds = MIXES[seed % len(MIXES)]
    options, events = drawn(draw, kinds)
    drive = Drive(kinds, options)
    with contextlib.closing(drive.one):
        for name, *arguments in events:
            getattr(drive, name)(*arguments)
        drive.end()
