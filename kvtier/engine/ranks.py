"""Tensor parallelism: a rank has some of the KV heads, and the ranks add up what they found.

Each rank computes all tokens with its share of heads and of the feed-forward's middle, as in
Megatron-LM (Shoeybi et al., arXiv 1909.08053). Partial sums are added in the order of the ranks,
on every rank alike, so that answers are reproducible; they need not be those of one rank alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvtier.engine.attention import QUERY_TILE, PagedAttention, Span
from kvtier.engine.model import ROW_TILE, Model
from kvtier.engine.weights import LayerWeights, Weights
from kvtier.errors import ConfigError

__all__ = ["Exchange", "RankModel", "shard_weights"]

Exchange = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""From this rank's partial sum to those of all ranks, in their order. Blocks."""


def shard_weights(weights: Weights, rank: int, ranks: int) -> Weights:
    """Return one rank's share: whole KV heads with their queries, and a slice of the middle.

    Raises ConfigError when the heads or the middle cannot be shared evenly.
    """
    config = weights.config
    if config.kv_heads % ranks or config.intermediate_size % ranks or not 0 <= rank < ranks:
        raise ConfigError(f"{config.kv_heads} KV heads cannot be shared by {ranks} ranks evenly")
    share = dataclasses.replace(
        config,
        heads=config.heads // ranks,
        kv_heads=config.kv_heads // ranks,
        intermediate_size=config.intermediate_size // ranks,
    )

    def part(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return whole.chunk(ranks, dim)[rank].contiguous()

    def cut(layer: LayerWeights) -> LayerWeights:
        query, key, value = layer.qkv.split((config.query_size, config.kv_size, config.kv_size))
        return dataclasses.replace(
            layer,
            qkv=torch.cat((part(query), part(key), part(value))),
            attention_out=part(layer.attention_out, 1),
            gate_up=torch.cat([part(half) for half in layer.gate_up.chunk(2)]),
            down=part(layer.down, 1),
        )

    return dataclasses.replace(
        weights, config=share, layers=tuple(cut(layer) for layer in weights.layers)
    )


class RankModel(Model):
    """One rank's share of a model. See Model; ``forward`` must run on all ranks together."""

    def __init__(self, weights: Weights, exchange: Exchange) -> None:
        super().__init__(weights)
        self._exchange = exchange

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], kv: Sequence[torch.Tensor]) -> torch.Tensor:
        """See Model. kv: a pool of this rank's KV heads."""
        config = self.config
        count = sum(len(span.tokens) for span in spans)
        rows = -(-count // ROW_TILE) * ROW_TILE
        hidden, cos, sin = self._embed(spans, rows)
        qkv = hidden.new_zeros(rows + QUERY_TILE, config.query_size + 2 * config.kv_size)
        mixed = hidden.new_zeros(rows + QUERY_TILE, config.query_size)
        attention = PagedAttention(config, spans, kv[0], self.dtype)
        tiles = [slice(first, first + ROW_TILE) for first in range(0, rows, ROW_TILE)]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for index, layer in enumerate(self.weights.layers):
                for tile in tiles:
                    self._project(layer, hidden[tile], qkv[tile], cos[tile], sin[tile])
                attention.write(index, qkv[:count, config.query_size :])
                attention.read(index, qkv[:, : config.query_size], mixed)
                self._add(hidden, [mixed[tile] @ layer.attention_out.t() for tile in tiles])
                self._add(hidden, [self._middle(layer, hidden[tile]) for tile in tiles])
        return self._logits(hidden, spans)

    def _middle(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tile's SwiGLU."""
        both = torch.mm(self._norm(hidden, layer.ffn_norm), layer.gate_up.t())
        gate, up = both.chunk(2, dim=1)
        return functional.silu(gate).mul_(up) @ layer.down.t()

    def _add(self, hidden: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Add what all ranks found to `hidden`."""
        for partial in self._exchange(torch.cat(parts)):
            hidden.add_(partial)
