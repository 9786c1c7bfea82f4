"""Outputs against plain one-by-one serving, under any budget, pool, batch and arrival."""

from __future__ import annotations

import functools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.engine import Engine, Model, ModelConfig, Sampling, prompt_lookup, random_weights

HEADS = [(4, 2, 16), (3, 1, 32), (2, 2, 64), (5, 1, 24)]


@functools.cache
def model(heads: int, kv_heads: int, head_size: int) -> Model:
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
    return Model(random_weights(config, seed=heads))


@functools.cache
def alone(shape: tuple[int, int, int], prompt: tuple[int, ...], sampling: Sampling):
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


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(HEADS),
    REQUESTS,
    st.sampled_from([1, 4, 16]),
    st.integers(1, 70),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 8),
    st.sampled_from([{}, {"ahead": True}, {"drafter": prompt_lookup, "draft_tokens": 2}]),
)
def test_nothing_but_the_prompt_decides_the_output(
    shape, requests, block_tokens, step_tokens, max_running, prefix_cache, spare, kind
):
    engine = Engine(
        model(*shape),
        num_blocks=-(-84 // block_tokens) + spare,
        block_tokens=block_tokens,
        step_tokens=step_tokens,
        max_running=max_running,
        prefix_cache=prefix_cache,
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
    (pool,) = engine._pools.pools
    assert pool.free == pool.num_blocks
