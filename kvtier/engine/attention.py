"""Attention over the block pool, in pieces of one fixed shape.

The result of a query depends on its own keys only, bit for bit: not on how the prompt was cut
into chunks, on what else is in the step, or on how far the request's context reaches. For this,

* queries go in tiles of QUERY_TILE tokens, a decode step's single token included;
* keys are padded to whole tiles of KEY_TILE. torch's flash kernel for CPUs works through the
  keys from the left in blocks of just that size, with a running maximum and sum, so that a block
  masked out entirely multiplies by exactly 1 and adds exactly 0;
* padding keys, and those that a window does not reach, are zeros, not what happens to lie in the
  pool: 0 times a NaN would be a NaN.

On a GPU torch's memory-efficient kernel does it. One block of threads takes one tile of queries
through all keys, from the left, in blocks that divide KEY_TILE (kernel_forward.h in torch's
mem_eff_attention), so that the same holds; flash there takes no masks, and splits keys by how many
sequences there are. Keys are hidden by a large negative number, not by an infinite one: a block in
which a row sees nothing then gives sums that the first key in sight multiplies by 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from kvtier.engine.spans import Span
from kvtier.engine.weights import ModelConfig

QUERY_TILE: Final = 8
"""Tokens of a query tile. Prefill is as fast with 8 as with 32, decode four times faster."""

KEY_TILE: Final = 512
"""Keys of a key tile: kvSplitSize in torch's FlashAttentionKernel.cpp. A test shows if it moves."""


BACKENDS: Final = {
    "cpu": SDPBackend.FLASH_ATTENTION,
    "cuda": SDPBackend.EFFICIENT_ATTENTION,
    "meta": SDPBackend.FLASH_ATTENTION,
}
"""What attends, by kind of device. Shapes alone can be tried on meta."""


class Attention(Protocol):
    """One step's attention, layer by layer."""

    def write(self, layer: int, fresh: torch.Tensor) -> None:
        """Put the step's new keys and values, [tokens, planes * kv_size], into the pool."""
        ...

    def read(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Attend from the rows of `queries` and fill those of `out`, both [rows, query_size].

        Both have QUERY_TILE - 1 spare rows at the end.
        """
        ...


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
        self._targets = _slots(spans, block_tokens, component).to(kv.device)
        group = config.heads // config.kv_heads
        seen = _Sight(group, window, dtype, kv.device)
        self._reads = list(_reads(spans, block_tokens, component, seen))
        # The spans take turns in these: what they read is packed as it lies, then widened.
        most = max(len(read.blocks) for read in self._reads)
        keys = max(read.keys for read in self._reads)
        self._packed = kv.new_empty(self._planes * most * self._blocks.shape[3])
        wide = max(keys, most * block_tokens)
        self._wide = kv.new_empty(self._planes, wide, config.kv_size, dtype=dtype)

    def write(self, layer: int, fresh: torch.Tensor) -> None:
        """Round the step's new keys and values to the pool's dtype and put them into it.

        fresh: [tokens of all spans, planes * kv_size], keys first.
        """
        planes = fresh.to(self._slots.dtype).view(len(fresh), self._planes, -1).transpose(0, 1)
        self._slots[layer].index_copy_(1, self._targets, planes)

    def read(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """See Attention.

        A span's last tile may spill over into the rows of the next span, which is computed after
        it and overwrites them.
        """
        for read in self._reads:
            keys, values = self._gather(layer, read)
            for run in read.runs:
                rows = slice(run.row, run.row + run.tiles * QUERY_TILE)
                seen = (run.tiles, -1, -1, -1)
                shape = (run.tiles, QUERY_TILE)
                attend(
                    self._config,
                    queries[rows].unflatten(0, shape),
                    out[rows].unflatten(0, shape),
                    keys[:, :, : run.keys].expand(seen),
                    values[:, :, : run.keys].expand(seen),
                    run.mask,
                )

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
        blocks = table.index_select(0, positions // block_tokens)
        slots.append(blocks * block_tokens + positions % block_tokens)
    return torch.cat(slots)


class _Sight(NamedTuple):
    """group: the query heads that share a KV head. The others are of the masks."""

    group: int
    window: int
    dtype: torch.dtype
    device: torch.device


def _reads(
    spans: Sequence[Span], block_tokens: int, component: int, sight: _Sight
) -> Iterator[_Read]:
    """Yield what each span reads."""
    row = 0
    for span in spans:
        table = span.tables[component][: -(-span.end // block_tokens)]
        blocks = torch.tensor(table).clamp_(min=0)  # before the window there may be no block
        begin = max(span.start - sight.window + 1, 0) if sight.window else 0
        runs = tuple(_runs(span, row, sight))
        yield _Read(blocks.to(sight.device), begin, span.end, runs)
        row += len(span.tokens)


def _runs(span: Span, row: int, sight: _Sight) -> Iterator[_Run]:
    def keys_of(first: int) -> int:
        """Return the keys that the query tile at offset `first` needs, in whole key tiles."""
        last = min(span.start + first + QUERY_TILE, span.end)
        return -(-last // KEY_TILE) * KEY_TILE

    offsets = range(0, len(span.tokens), QUERY_TILE)
    for keys, found in itertools.groupby(offsets, keys_of):
        first, *rest = found
        tiles = 1 + len(rest)
        start = span.start + first
        queries = torch.arange(start, start + tiles * QUERY_TILE, device=sight.device)
        mask = hiding(queries.view(tiles, QUERY_TILE), keys, sight.group, sight.dtype, sight.window)
        yield _Run(row + first, tiles, keys, mask)


def hiding(
    positions: torch.Tensor, keys: int, group: int, dtype: torch.dtype, window: int = 0
) -> torch.Tensor:
    """Return a mask for queries, [tiles, 1, queries * group, keys]: 0 where they see a key.

    positions: int64 [tiles, queries]. window: as in PagedAttention.
    """
    rows = positions.repeat_interleave(group, 1)[:, None, :, None]
    every = torch.arange(keys, device=positions.device)
    hidden = every > rows
    if window:
        hidden |= every <= rows - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min / 2)


def attend(
    config: ModelConfig,
    queries: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
) -> None:
    """Attend from tiles of queries and fill `out`, both [tiles, QUERY_TILE, query_size].

    keys, values: [tiles, KV heads, keys, head size]. mask: [tiles, 1, QUERY_TILE * group, keys].
    The query heads that share a KV head stand in one tile: keys are never repeated.
    """
    group = config.heads // config.kv_heads
    shape = (config.kv_heads, group, config.head_size)
    folded = queries.unflatten(2, shape).permute(0, 2, 1, 3, 4).flatten(2, 3)
    mixed = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    mixed = mixed.unflatten(2, (QUERY_TILE, group)).permute(0, 2, 1, 3, 4)
    out.unflatten(2, shape).copy_(mixed)
