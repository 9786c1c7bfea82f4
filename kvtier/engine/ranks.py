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

from kvtier.engine.hybrid import HybridConfig, HybridModel, Kind
from kvtier.engine.model import ROW_TILE
from kvtier.engine.weights import LayerWeights
from kvtier.errors import ConfigError

Exchange = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""From this rank's partial sum to those of all ranks, in their order. Blocks."""


class RankModel(HybridModel):
    """One rank's share of a model: whole KV heads with their queries, and a slice of the middle.

    MLA's latents are kept whole by every rank. ``forward`` must run on all ranks together.
    Raises ConfigError when the heads or the middle cannot be shared evenly.
    """

    def __init__(self, whole: HybridModel, rank: int, ranks: int, exchange: Exchange) -> None:
        sizes = whole.config
        if sizes.kv_heads % ranks or sizes.intermediate_size % ranks or not 0 <= rank < ranks:
            raise ConfigError(f"{sizes.kv_heads} KV heads cannot be shared by {ranks} ranks evenly")
        share = dataclasses.replace(
            sizes,
            heads=sizes.heads // ranks,
            kv_heads=sizes.kv_heads // ranks,
            intermediate_size=sizes.intermediate_size // ranks,
        )
        layers = tuple(
            _share(whole.shape, kind, layer, rank, ranks)
            for kind, layer in zip(whole.shape.kinds, whole.weights.layers, strict=True)
        )
        weights = dataclasses.replace(whole.weights, config=share, layers=layers)
        super().__init__(dataclasses.replace(whole.shape, sizes=share), weights)
        self._exchange = exchange

    def _finish(self, layer: LayerWeights, hidden: torch.Tensor, mixed: torch.Tensor) -> None:
        tiles = [slice(first, first + ROW_TILE) for first in range(0, len(hidden), ROW_TILE)]
        self._add(hidden, [mixed[tile] @ layer.attention_out.t() for tile in tiles])
        self._add(hidden, [self._middle(layer, hidden[tile]) for tile in tiles])

    def _middle(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tile's SwiGLU."""
        both = torch.mm(self._norm(hidden, layer.ffn_norm), layer.gate_up.t())
        gate, up = both.chunk(2, dim=1)
        return functional.silu(gate).mul_(up) @ layer.down.t()

    def _add(self, hidden: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Add what all ranks found to `hidden`."""
        for partial in self._exchange(torch.cat(parts)):
            hidden.add_(partial)


def _share(
    shape: HybridConfig, kind: Kind, layer: LayerWeights, rank: int, ranks: int
) -> LayerWeights:
    """Return one rank's share of a layer."""

    def part(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return whole.chunk(ranks, dim)[rank].contiguous()

    heads = shape.attention(kind)
    if kind is Kind.RECURRENT:
        rows = [heads.query_size] * 3 + [heads.heads]
    elif kind is Kind.LATENT:
        rows = [heads.query_size, heads.kv_size]
    else:
        rows = [heads.query_size, heads.kv_size, heads.kv_size]
    pieces = list(layer.qkv.split(rows))
    kept = [pieces.pop()] if kind is Kind.LATENT else []
    return dataclasses.replace(
        layer,
        qkv=torch.cat([*map(part, pieces), *kept]),
        attention_out=part(layer.attention_out, 1),
        gate_up=torch.cat([part(half) for half in layer.gate_up.chunk(2)]),
        down=part(layer.down, 1),
    )
