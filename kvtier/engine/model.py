"""The forward pass of a Llama-family model over a block pool, with reproducible bits.

A token's logits come out the same, bit for bit, whatever else is computed in the step, however
its prompt was chunked, and whether the KV before it was computed or loaded. Nothing less would
do for a cache: only so can a test compare outputs with and without it exactly. Matrix products
choose their kernel, and with it the order of their sums, by the number of rows: one row goes
another way than two. So every operation runs on tiles of one fixed shape, the last one padded.
A row's result does not depend on where in its tile it stands, or on its neighbours.

The bits hold for one build of torch, one kind of CPU and one number of threads, or one kind of
GPU. That a GPU's matrix products keep to this, too, follows from their fixed shapes; it has not
been tried on one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Final, Self

import torch
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from kvtier.engine.attention import BACKENDS, QUERY_TILE, Attention, PagedAttention
from kvtier.engine.decode import DecodeAttention
from kvtier.engine.layers import LayerHook
from kvtier.engine.spans import Span, StateCopy, placed
from kvtier.engine.weights import LayerWeights, Weights
from kvtier.identity.geometry import Component

ROW_TILE: Final = 32
"""Tokens of a tile: 87% of the speed of one product over all rows, and one tile a decode step."""

LOGIT_TILE: Final = 8
"""Rows of an output tile: few rows need logits, and the vocabulary is long."""


class Model:
    """Weights, and the forward pass over them, on one device; holds no state of a request."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.config = weights.config
        self.dtype = weights.embedding.dtype
        config = weights.config
        turns = angles(config.context_tokens, config.head_size, config.rope_base)
        self.cos, self.sin = turns.cos().to(self.dtype), turns.sin().to(self.dtype)
        self.cos, self.sin = self.cos.to(self.device), self.sin.to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are, and all that is computed with them."""
        return self.weights.embedding.device

    def to(self, device: torch.device) -> Self:
        """Return the model on another device; itself where it is there."""
        if device == self.device:
            return self
        there = copy.copy(self)
        there.weights = self.weights.to(device=device)
        there.cos, there.sin = self.cos.to(device), self.sin.to(device)
        return there

    @property
    def components(self) -> tuple[Component, ...]:
        """What KV the model keeps: full attention in every layer."""
        config = self.config
        return (Component(config.layers, config.kv_heads, config.head_size),)

    @torch.inference_mode()
    def forward(
        self, spans: Sequence[Span], kv: Sequence[torch.Tensor], hook: LayerHook | None = None
    ) -> torch.Tensor:
        """Compute the spans' tokens, write their KV to the pool, and return logits.

        spans: at least one, each of at least one token; of distinct requests.
        kv: one pool, [layers, 2, blocks, block tokens, KV heads, head size], updated in place.
        hook: called before and after each layer's KV is touched.
        Returns float32 [sum of span.logits, vocab], in the order of the spans. Blocks on a CPU;
        on a GPU enqueues, on the current stream.
        """
        count = sum(len(span.tokens) for span in spans)
        ids, positions = placed(spans, _padded(count, ROW_TILE), self.device)
        hidden = self._embed(spans, ids)
        attention = PagedAttention(self.config, spans, kv[0], self.dtype)
        self._layers(hidden, positions, count, attention, hook)
        return self._logits(hidden, spans)

    @torch.inference_mode()
    def decode(self, numbers: torch.Tensor, keys: int, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute one token each of some requests; return float32 [requests, vocab].

        numbers: as ``DecodeShape.numbers`` has them, on the model's device. keys: of that shape.
        kv: as in ``forward``, whose bits these are. The shapes of all that is done follow from
        those of the arguments, and from `keys`: nothing looks at what the tensors hold.
        """
        ids, positions, hidden = self._decoded(numbers)
        attention = DecodeAttention(self.config, numbers, keys, kv[0], self.dtype)
        self._layers(hidden, positions, len(ids), attention)
        return self._head(hidden[: _padded(len(ids), LOGIT_TILE)])[: len(ids)].float()

    def _decoded(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a decode step's ids, and of whole tiles of rows the positions and embeddings."""
        ids, positions = numbers[:, :2].unbind(1)
        spare = (0, _padded(len(ids), ROW_TILE) - len(ids))
        hidden = self.weights.embedding.index_select(0, functional.pad(ids, spare))
        return ids, functional.pad(positions, spare), hidden

    def _layers(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        count: int,
        attention: Attention,
        hook: LayerHook | None = None,
    ) -> None:
        """Pass all rows of `hidden` through the layers, in place. count: rows that are no padding.

        hidden: [rows, hidden], of whole tiles. positions: int64 [rows].
        """
        config, rows = self.config, len(hidden)
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        qkv = hidden.new_zeros(rows + QUERY_TILE, config.query_size + 2 * config.kv_size)
        mixed = hidden.new_zeros(rows + QUERY_TILE, config.query_size)
        queries, fresh = qkv[:, : config.query_size], qkv[:count, config.query_size :]
        before = list(
            zip(
                hidden.split(ROW_TILE),
                qkv[:rows].split(ROW_TILE),
                cos.split(ROW_TILE),
                sin.split(ROW_TILE),
                strict=True,
            )
        )
        after = list(zip(hidden.split(ROW_TILE), mixed[:rows].split(ROW_TILE), strict=True))
        # No other backend keeps the promise of the attention module.
        with sdpa_kernel(BACKENDS[hidden.device.type]):
            # Tiles inside layers: a layer's weights stay in the CPU's cache for all tiles.
            for index, layer in enumerate(self.weights.layers):
                for tile in before:
                    self._project(layer, *tile)
                if hook is not None:
                    hook.before(0, index)
                attention.write(index, fresh)
                if hook is not None:
                    hook.after(0, index)
                attention.read(index, queries, mixed)
                for tile_hidden, tile_mixed in after:
                    self._feed_forward(layer, tile_hidden, tile_mixed)

    def copy_states(self, copies: Sequence[StateCopy], kv: Sequence[torch.Tensor]) -> None:
        """Copy recurrent states from slot to slot, in order."""
        for component, source, target in copies:
            kv[component][:, :, target] = kv[component][:, :, source]

    def _embed(self, spans: Sequence[Span], ids: torch.Tensor) -> torch.Tensor:
        """Return the rows' embeddings, or what stands for them."""
        hidden = self.weights.embedding.index_select(0, ids)
        first = 0
        for span in spans:
            if span.inputs is not None:
                for at in range(len(span.tokens)):
                    hidden[first + at] = span.inputs(hidden[first + at], span.start + at)
            first += len(span.tokens)
        return hidden

    def _project(
        self,
        layer: LayerWeights,
        hidden: torch.Tensor,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        """Fill a tile of `qkv`, queries and keys turned by their positions (rotate-half)."""
        config = self.config
        torch.mm(self._norm(hidden, layer.attention_norm), layer.qkv.t(), out=qkv)
        turned = qkv[:, : config.query_size + config.kv_size]
        turn(turned.unflatten(1, (-1, config.head_size)), cos, sin)

    def _feed_forward(self, layer: LayerWeights, hidden: torch.Tensor, mixed: torch.Tensor) -> None:
        """Add a tile's attention output, then its SwiGLU (arXiv 2002.05202), to `hidden`."""
        hidden.addmm_(mixed, layer.attention_out.t())
        both = torch.mm(self._norm(hidden, layer.ffn_norm), layer.gate_up.t())
        gate, up = both.chunk(2, dim=1)
        functional.silu(gate, inplace=True).mul_(up)
        hidden.addmm_(gate, layer.down.t())

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.config.norm_eps)

    def _logits(self, hidden: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        wanted: list[int] = []
        row = 0
        for span in spans:
            row += len(span.tokens)
            wanted.extend(range(row - span.logits, row))
        count = len(wanted)
        wanted.extend([0] * (_padded(count, LOGIT_TILE) - count))
        chosen = torch.tensor(wanted, dtype=torch.int64).to(hidden.device)
        return self._head(hidden.index_select(0, chosen))[:count].float()

    def _head(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows [n, hidden], of whole tiles: [n, vocab]."""
        logits = chosen.new_empty(len(chosen), self.config.vocab_size)
        head = self.weights.head.t()
        tiles = zip(chosen.split(LOGIT_TILE), logits.split(LOGIT_TILE), strict=True)
        for tile, out in tiles if len(chosen) else ():
            torch.mm(self._norm(tile, self.weights.norm), head, out=out)
        return logits


def turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn heads by their positions, in place: RoPE, rotate-half.

    heads: [rows, heads, size]. cos, sin: [rows, 1, size / 2].
    """
    left, right = heads.unflatten(2, (2, -1)).unbind(2)
    cross = left * sin
    left.mul_(cos).addcmul_(right, sin, value=-1)
    right.mul_(cos).add_(cross)


def angles(context: int, size: int, base: float) -> torch.Tensor:
    """Return the RoPE angles of every position, float64 [context, 1, size / 2].

    One angle does for all heads of a token.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    return torch.outer(torch.arange(context, dtype=torch.float64), base**-exponents)[:, None]


def _padded(count: int, tile: int) -> int:
    return -(-count // tile) * tile
