"""The KV of a real model on a real text, for what depends on what KV looks like."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.bench.messages import LoadModel
from kvtier.bench.models import BLOCK_TOKENS, load_model
from kvtier.bench.settings import SMOLLM2
from kvtier.bench.texts import Corpus
from kvtier.engine import Engine, Sampling
from kvtier.identity.namespace import Namespace


class RealKv(NamedTuple):
    """kv: bfloat16 as uint16 [layers, planes, blocks, block tokens, heads, head size]."""

    kv: NDArray[np.uint16]
    namespace: Namespace

    def chunk(self, number: int) -> memoryview:
        """Return the bytes of a chunk as a slot has them: [layers, planes, tokens, ...]."""
        blocks = self.namespace.geometry.chunk_tokens // BLOCK_TOKENS
        first = number * blocks
        one: NDArray[Any] = np.ascontiguousarray(self.kv[:, :, first : first + blocks])
        return one.reshape(-1).view(np.uint8).data


def real_kv(chunks: int, chunk_tokens: int = 256) -> RealKv:
    """Return what SmolLM2-135M keeps of so many chunks of Python's documentation.

    Blocks: about a second for each, and four to load. Raises ConfigError without its weights.
    """
    loaded = load_model(LoadModel(SMOLLM2, chunk_tokens))
    tokens = chunks * chunk_tokens
    ids = loaded.encode(Corpus(1).text(0, 8 * tokens))[:tokens]
    count = tokens // BLOCK_TOKENS
    engine = Engine(loaded.model, num_blocks=count + 1, block_tokens=BLOCK_TOKENS)
    engine.generate([ids], Sampling(max_tokens=1))
    pool = engine.kv[0].view(dtype=torch.uint16).numpy()
    used = [block for block in range(pool.shape[2]) if pool[0, 0, block].any()]
    kv = np.ascontiguousarray(pool[:, :, used[:count]])
    engine.close()
    return RealKv(kv, loaded.namespace)
