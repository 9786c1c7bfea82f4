"""A small real decode engine, so that a cache can be seen, tested and measured on a laptop.

Needs the extra ``engine`` (torch, gguf, tokenizers). Nothing else in kvtier imports it.
"""

from __future__ import annotations

from kvtier.engine.checkpoint import Checkpoint, checkpoint_sha256, find_checkpoint, load_checkpoint
from kvtier.engine.drafting import Drafter, prompt_lookup
from kvtier.engine.engine import Engine
from kvtier.engine.hybrid import HybridConfig, HybridModel, Kind, random_hybrid
from kvtier.engine.model import Model
from kvtier.engine.plain import plain_prefill
from kvtier.engine.request import Completion, Finish, Output, Sampling, Stats
from kvtier.engine.spans import Span
from kvtier.engine.tokenizer import Tokenizer
from kvtier.engine.weights import LayerWeights, ModelConfig, Weights, random_weights

__all__ = [
    "Checkpoint",
    "Completion",
    "Drafter",
    "Engine",
    "Finish",
    "HybridConfig",
    "HybridModel",
    "Kind",
    "LayerWeights",
    "Model",
    "ModelConfig",
    "Output",
    "Sampling",
    "Span",
    "Stats",
    "Tokenizer",
    "Weights",
    "checkpoint_sha256",
    "find_checkpoint",
    "load_checkpoint",
    "plain_prefill",
    "prompt_lookup",
    "random_hybrid",
    "random_weights",
]
