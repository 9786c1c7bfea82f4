"""The models that a benchmark can serve. Imports torch: for the processes of arms only."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.bench.messages import LoadModel
from kvtier.bench.recorded import ENGINE_BLOCK
from kvtier.bench.settings import RANDOM, SMOLLM2, TIMING
from kvtier.bench.texts import encode_bytes
from kvtier.bench.timing import TimingClock, TimingModel
from kvtier.bench.workloads import Encode
from kvtier.engine import (
    Model,
    ModelConfig,
    checkpoint_sha256,
    find_checkpoint,
    load_checkpoint,
    random_weights,
)
from kvtier.engine.runner import AnyModel
from kvtier.identity.geometry import Component, Geometry
from kvtier.identity.namespace import Namespace

BLOCK_TOKENS: Final = ENGINE_BLOCK

_RANDOM: Final = ModelConfig(
    vocab_size=258,
    layers=2,
    hidden_size=64,
    heads=4,
    kv_heads=2,
    head_size=16,
    intermediate_size=128,
    context_tokens=2048,
)


class BenchModel(NamedTuple):
    """A model, its tokenizer, what its KV is called, and the clock that it is served by.

    wait: lets seconds pass on that clock.
    """

    model: AnyModel
    encode: Encode
    namespace: Namespace
    clock: Callable[[], float] = time.perf_counter
    wait: Callable[[float], None] = time.sleep


def load_model(request: LoadModel) -> BenchModel:
    """Load a model by name or path. Blocks for seconds. Raises ConfigError."""
    name, chunk_tokens = request.model, request.chunk_tokens
    if request.seconds_per_token is not None:
        clock = TimingClock()
        timing = TimingModel(request.seconds_per_token, clock)
        namespace = _namespace(TIMING, "", timing.components, chunk_tokens)
        return BenchModel(timing, encode_bytes, namespace, clock, clock.skip)
    if name == RANDOM:
        model = Model(random_weights(_RANDOM))
        namespace = _namespace(RANDOM, "", model.components, chunk_tokens)
        return BenchModel(model, encode_bytes, namespace)
    path = find_checkpoint() if name == SMOLLM2 else Path(name)
    weights, tokenizer = load_checkpoint(path)
    model = Model(weights)
    namespace = _namespace(path.stem, checkpoint_sha256(path), model.components, chunk_tokens)
    return BenchModel(model, tokenizer.encode, namespace)


def _namespace(
    name: str, sha256: str, components: tuple[Component, ...], chunk_tokens: int
) -> Namespace:
    geometry = Geometry(components, block_tokens=(BLOCK_TOKENS,), chunk_tokens=chunk_tokens)
    return Namespace(name, geometry, revision=sha256, quantisation="computed in float32")
