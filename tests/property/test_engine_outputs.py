"""Outputs against plain one-by-one serving, under any budget, pool, batch and arrival."""

from __future__ import annotations

import functools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.engine import (
    Engine,
    HybridConfig,
    Kind,
    Model,
    ModelConfig,
    Sampling,
    prompt_lookup,
    random_hybrid,
    random_weights,
)

FULL, WINDOW, LATENT, RECURRENT = Kind.FULL, Kind.WINDOW, Kind.LATENT, Kind.RECURRENT
SHAPES = [
    (4, 2, 16),
    (3, 1, 32),
    (2, 2, 64),
    (5, 1, 24),
    (2, 1, 16, WINDOW, WINDOW),
    (2, 1, 16, LATENT, WINDOW),
    (2, 1, 8, RECURRENT, FULL),
    (2, 1, 8, RECURRENT, WINDOW),
]


@functools.cache
def model(heads: int, kv_heads: int, head_size: int, *kinds: Kind) -> Model:
    torch.set_num_threads(1)
    config = ModelConfig(
        vocab_size=61,
        layers=2,
        hidden_size=32,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=48,
        context_tokens=256,
        tied_embeddings=False,
    )
    if kinds:
        return random_hybrid(HybridConfig(config, kinds, window=20), seed=heads)
    return Model(random_weights(config, seed=heads))


@functools.cache
def alone(shape: tuple, prompt: tuple[int, ...], sampling: Sampling):
    engine = Engine(model(*shape), num_blocks=32, step_tokens=4096, prefix_cache=False)
    return engine.generate([prompt], sampling)[0].tokens


def prompt_of(shared: int, own: int, seed: int) -> tuple[int, ...]:
    common = np.random.default_rng(0).integers(0, 61, shared).tolist()
    return (*common, *np.random.default_rng(seed).integers(0, 61, own).tolist())


REQUESTS = st.lists(
    st.tuples(
        st.builds(prompt_of, st.sampled_from([0, 5, 40]), st.integers(1, 30), st.integers(1, 3)),
        st.builds(
            Sampling,
            max_tokens=st.integers(1, 14),
            temperature=st.sampled_from([0.0, 2.0]),
            seed=st.integers(0, 2),
        ),
        st.integers(0, 6),  # steps before the next request arrives
    ),
    min_size=1,
    max_size=6,
)


OPTIONS = st.fixed_dictionaries(
    {
        "block_tokens": st.sampled_from([1, 4, 16]),
        "step_tokens": st.integers(1, 70),
        "max_running": st.integers(1, 5),
        "num_states": st.integers(1, 6),
        "prefix_cache": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SHAPES),
    REQUESTS,
    OPTIONS,
    st.integers(0, 8),
    st.integers(1, 2),
    st.sampled_from([{}, {"ahead": True}, {"drafter": prompt_lookup, "draft_tokens": 2}]),
)
def test_nothing_but_the_prompt_decides_the_output(shape, requests, options, spare, chunk, kind):
    if RECURRENT in shape and "drafter" in kind:
        kind = {}  # a state cannot take a rejected token back
    engine = Engine(
        model(*shape),
        num_blocks=-(-84 // options["block_tokens"]) + spare,
        chunk_tokens=chunk * options["block_tokens"],
        **options,
        **kind,
    )
    tokens: dict[str, list[int]] = {}
    expected = {}

    def take(outputs):
        for output in outputs:
            tokens.setdefault(output.request_id, []).append(output.token)

    for prompt, sampling, pause in requests:
        expected[engine.submit(prompt, sampling)] = list(alone(shape, prompt, sampling))
        for _ in range(pause):
            take(engine.step())
    while not engine.idle:
        take(engine.step())
    assert tokens == expected
    assert all(pool.free == pool.num_blocks for pool in engine._pools.pools)
