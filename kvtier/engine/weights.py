"""The shape of a Llama-family model and its weights, as the forward pass wants them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

import torch

from kvtier.errors import ConfigError

_SIZES: Final = (
    "vocab_size",
    "layers",
    "hidden_size",
    "heads",
    "kv_heads",
    "head_size",
    "intermediate_size",
    "context_tokens",
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model.

    context_tokens: the longest sequence, prompt and output together.
    rope_base, norm_eps: as in the Llama papers (arXiv 2104.09864 and 1910.07467).
    initializer_range: standard deviation of random weights. Much below 0.25, attention is so
        flat that answers hardly depend on the KV, and a wrong cache would go unnoticed.
    Raises ConfigError for a shape that no model can have.
    """

    vocab_size: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    context_tokens: int
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = True
    initializer_range: float = 0.25

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"model {name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly;"
                " heads must be a multiple of kv_heads"
            )
        if self.head_size % 2:
            raise ConfigError(f"head_size {self.head_size} is odd; RoPE turns pairs")

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads together."""
        return self.kv_heads * self.head_size


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in], contiguous.

    qkv: [query_size + 2 * kv_size, hidden], rows of q, then k, then v; heads in rotate-half order.
    gate_up: [2 * intermediate, hidden], rows of gate, then up.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    attention_out: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model, in one dtype, which is the dtype that it computes in.

    embedding, head: [vocab, hidden]; the same tensor where embeddings are tied.
    """

    config: ModelConfig
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor

    def to(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Weights:
        """Return the weights in `dtype`, on `device`: themselves where they already are that."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device=device, dtype=dtype)

        embedding = moved(self.embedding)
        layers = tuple(
            LayerWeights(*(moved(getattr(layer, one.name)) for one in dataclasses.fields(layer)))
            for layer in self.layers
        )
        head = embedding if self.head is self.embedding else moved(self.head)
        return Weights(self.config, embedding, layers, moved(self.norm), head)


def random_weights(config: ModelConfig, seed: int = 0) -> Weights:
    """Return float32 weights drawn from a normal distribution; one seed gives one set."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * config.initializer_range

    def norm() -> torch.Tensor:
        return 1.0 + draw(config.hidden_size)

    embedding = draw(config.vocab_size, config.hidden_size)
    layers = tuple(
        LayerWeights(
            attention_norm=norm(),
            qkv=draw(config.query_size + 2 * config.kv_size, config.hidden_size),
            attention_out=draw(config.hidden_size, config.query_size),
            ffn_norm=norm(),
            gate_up=draw(2 * config.intermediate_size, config.hidden_size),
            down=draw(config.hidden_size, config.intermediate_size),
        )
        for _ in range(config.layers)
    )
    tied = config.tied_embeddings
    head = embedding if tied else draw(config.vocab_size, config.hidden_size)
    return Weights(config, embedding, layers, norm(), head)
