"""Tiny random models whose answers depend on their KV."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import safetensors.torch
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


def make_adapter(seed: int, folder: Path) -> None:
    """Write a LoRA adapter for the model `plain`."""
    numbers = torch.Generator().manual_seed(seed)
    width = {"q_proj": 256, "v_proj": 128}
    weights = {}
    for layer in range(2):
        for name, out in width.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn((8, 256), generator=numbers) * SPREAD
            weights[f"{place}.lora_B.weight"] = torch.randn((out, 8), generator=numbers) * SPREAD
    folder.mkdir()
    safetensors.torch.save_file(weights, folder / "adapter_model.safetensors")
    setting = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": list(width)}
    (folder / "adapter_config.json").write_text(json.dumps(setting), encoding="utf-8")


if __name__ == "__main__":
    kind, target = sys.argv[1], Path(sys.argv[2])
    if kind.startswith("adapter"):
        make_adapter(int(kind[-1]), target)
    else:
        make(kind, target)
