"""The models that a benchmark can serve. Imports torch: for the processes of arms only."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from kvtier.bench.settings import RANDOM, SMOLLM2
from kvtier.bench.texts import encode_bytes
from kvtier.bench.workloads import Encode
from kvtier.engine import (
    Model,
    ModelConfig,
    checkpoint_sha256,
    find_checkpoint,
    load_checkpoint,
    random_weights,
)
from kvtier.identity.geometry import Component, Geometry
from kvtier.identity.namespace import Namespace

__all__ = ["BLOCK_TOKENS", "BenchModel", "load_model"]

BLOCK_TOKENS: Final = 16

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
    """A model, its tokenizer, and what its KV is called."""

    model: Model
    encode: Encode
    namespace: Namespace


def load_model(name: str, chunk_tokens: int) -> BenchModel:
    """Load a model by name or path. Blocks for seconds. Raises ConfigError."""
    if name == RANDOM:
        weights = random_weights(_RANDOM)
        return BenchModel(
            Model(weights), encode_bytes, _namespace("random", "", weights.config, chunk_tokens)
        )
    path = find_checkpoint() if name == SMOLLM2 else Path(name)
    weights, tokenizer = load_checkpoint(path)
    namespace = _namespace(path.stem, checkpoint_sha256(path), weights.config, chunk_tokens)
    return BenchModel(Model(weights), tokenizer.encode, namespace)


def _namespace(name: str, sha256: str, config: ModelConfig, chunk_tokens: int) -> Namespace:
    geometry = Geometry(
        (Component(config.layers, config.kv_heads, config.head_size),),
        block_tokens=(BLOCK_TOKENS,),
        chunk_tokens=chunk_tokens,
    )
    return Namespace(name, geometry, revision=sha256, quantisation="computed in float32")
