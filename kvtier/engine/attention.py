"""Attention over the block pool, in pieces of one fixed shape.

The result of a query depends on its own keys only, bit for bit: not on how the prompt was cut
into chunks, on what else is in the step, or on how far the request's context reaches. For this,

* queries go in tiles of QUERY_TILE tokens, a decode step's single token included;
* keys are padded to whole tiles of KEY_TILE. torch's flash kernel for CPUs works through the
  keys from the left in blocks of just that size, with a running maximum and sum, so that a block
  masked out entirely multiplies by exactly 1 and adds exactly 0;
* padding keys, and those that a window does not reach, are zeros, not what happens to lie in the
  pool: 0 times a NaN would be a NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from kvtier.engine.spans import Span
from kvtier.engine.weights import ModelConfig

__all__ = ["KEY_TILE", "QUERY_TILE", "PagedAttention"]

QUERY_TILE: Final = 8
"""Tokens of a query tile. Prefill is as fast with 8 as with 32, decode four times faster."""

KEY_TILE: Final = 512
"""Keys of a key tile: kvSplitSize in torch's FlashAttentionKernel.cpp. A test shows if it moves."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Query tiles that see the same number of key tiles. mask: [tiles, 1, queries, keys]."""

    row: int
    tiles: int
    keys: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Read:
    """All that one span reads from the pool: tokens [begin, end), which lie in `blocks`."""

    blocks: torch.Tensor
    begin: int
    end: int
    runs: tuple[_Run, ...]

    @property
    def keys(self) -> int:
        """Keys that its last queries see, padding included."""
        return self.runs[-1].keys


class PagedAttention:
    """One step's attention: planned once, then written to and read from layer by layer."""

    def __init__(
        self,
        config: ModelConfig,
        spans: Sequence[Span],
        kv: torch.Tensor,
        dtype: torch.dtype,
        component: int = 0,
        window: int = 0,
    ) -> None:
        """Plan the step.

        kv: the pool, [layers, planes, blocks, block tokens, KV heads, head size], contiguous;
            of one plane, keys and values are the same.
        dtype: what queries come in; keys and values are converted to it.
        component: of the model, whose table is used.
        window: a token sees this many, itself included; 0: all before it.
        """
        self._config = config
        self._planes, block_tokens = kv.shape[1], kv.shape[3]
        self._blocks = kv.flatten(3)
        self._slots = kv.flatten(2, 3).flatten(3)
        self._targets = _slots(spans, block_tokens, component)
        group = config.heads // config.kv_heads
        self._reads = list(_reads(spans, group, block_tokens, dtype, component, window))
        # The spans take turns in these: what they read is packed as it lies, then widened.
        most = max(len(read.blocks) for read in self._reads)
        keys = max(read.keys for read in self._reads)
        self._packed = kv.new_empty(self._planes * most * self._blocks.shape[3])
        wide = max(keys, most * block_tokens)
        self._wide = torch.empty(self._planes, wide, config.kv_size, dtype=dtype)

    def write(self, layer: int, fresh: torch.Tensor) -> None:
        """Round the step's new keys and values to the pool's dtype and put them into it.

        fresh: [tokens of all spans, planes * kv_size], keys first.
        """
        planes = fresh.to(self._slots.dtype).view(len(fresh), self._planes, -1).transpose(0, 1)
        self._slots[layer].index_copy_(1, self._targets, planes)

    def read(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Attend from every row of `queries` and fill `out`, both [rows, query_size].

        Both need QUERY_TILE - 1 spare rows at the end. A span's last tile may spill over into
        the rows of the next span, which is computed after it and overwrites them.
        """
        config = self._config
        group = config.heads // config.kv_heads
        for read in self._reads:
            keys, values = self._gather(layer, read)
            for run in read.runs:
                rows = slice(run.row, run.row + run.tiles * QUERY_TILE)
                shape = (run.tiles, QUERY_TILE, config.kv_heads, group, config.head_size)
                # The query heads that share a KV head stand in one tile: keys are never repeated.
                folded = queries[rows].unflatten(0, shape[:2]).unflatten(2, shape[2:])
                folded = folded.permute(0, 2, 1, 3, 4).flatten(2, 3)
                seen = (run.tiles, -1, -1, -1)
                mixed = functional.scaled_dot_product_attention(
                    folded,
                    keys[:, :, : run.keys].expand(seen),
                    values[:, :, : run.keys].expand(seen),
                    attn_mask=run.mask,
                )
                mixed = mixed.unflatten(2, (QUERY_TILE, group)).permute(0, 2, 1, 3, 4)
                out[rows].view(shape).copy_(mixed)

    def _gather(self, layer: int, read: _Read) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the span's keys and values, each [1, KV heads, keys, head size]."""
        count, block = len(read.blocks), self._blocks.shape[3]
        packed = self._packed[: self._planes * count * block].view(self._planes, count, block)
        torch.index_select(self._blocks[layer], 1, read.blocks, out=packed)
        config, wide = self._config, self._wide
        tokens = packed.view(self._planes, -1, config.kv_size)
        wide[:, : tokens.shape[1]].copy_(tokens)
        wide[:, : read.begin].zero_()
        wide[:, read.end : read.keys].zero_()
        heads = wide.view(self._planes, 1, -1, config.kv_heads, config.head_size).transpose(2, 3)
        return heads[0], heads[-1]


def _slots(spans: Sequence[Span], block_tokens: int, component: int) -> torch.Tensor:
    """Return the pool slot of every new token, int64 [tokens of all spans]."""
    slots = []
    for span in spans:
        positions = torch.arange(span.start, span.end)
        table = torch.tensor(span.tables[component])
        slots.append(table[positions // block_tokens] * block_tokens + positions % block_tokens)
    return torch.cat(slots)


def _reads(
    spans: Sequence[Span],
    group: int,
    block_tokens: int,
    dtype: torch.dtype,
    component: int,
    window: int,
) -> Iterator[_Read]:
    """Yield what each span reads. group: the query heads that share a KV head."""
    row = 0
    for span in spans:
        table = span.tables[component][: -(-span.end // block_tokens)]
        blocks = torch.tensor(table).clamp_(min=0)  # before the window there may be no block
        begin = max(span.start - window + 1, 0) if window else 0
        yield _Read(blocks, begin, span.end, tuple(_runs(span, row, group, dtype, window)))
        row += len(span.tokens)


def _runs(span: Span, row: int, group: int, dtype: torch.dtype, window: int) -> Iterator[_Run]:
    def keys_of(first: int) -> int:
        """Return the keys that the query tile at offset `first` needs, in whole key tiles."""
        last = min(span.start + first + QUERY_TILE, span.end)
        return -(-last // KEY_TILE) * KEY_TILE

    offsets = range(0, len(span.tokens), QUERY_TILE)
    for keys, found in itertools.groupby(offsets, keys_of):
        first, *rest = found
        tiles = 1 + len(rest)
        start = span.start + first
        queries = torch.arange(start, start + tiles * QUERY_TILE)
        positions = queries.repeat_interleave(group)[:, None]
        hidden = torch.arange(keys) > positions
        if window:
            hidden |= torch.arange(keys) <= positions - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        yield _Run(row + first, tiles, keys, mask.view(tiles, 1, -1, keys))
