"""Tiny random models whose answers depend on their KV."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

VOCABULARY = 1024
# Far larger than usual, so that a greedy answer depends on the whole prompt.
SPREAD = 0.2

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def plain() -> transformers.PreTrainedModel:
    """Full attention in all layers."""
    config = transformers.LlamaConfig(num_hidden_layers=2, **COMMON)
    return transformers.LlamaForCausalLM(config)


def hybrid() -> transformers.PreTrainedModel:
    """Three layers in four look back on 96 tokens, the fourth on all."""
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=4, sliding_window=96, layer_types=kinds, **COMMON
    )
    return transformers.Gemma3ForCausalLM(config)


def make(kind: str, folder: Path) -> None:
    """Write a model, the same one every time."""
    torch.manual_seed(0)
    model = {"plain": plain, "hybrid": hybrid}[kind]()
    model.to(torch.float32).save_pretrained(folder, safe_serialization=True)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
