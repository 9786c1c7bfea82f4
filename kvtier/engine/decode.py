"""Attention of a decode step whose shapes are fixed: one token each of some requests.

All that a step is about lies in one tensor, so that the same work over the same memory serves any
step of that shape: what a CUDA graph needs. Bits are those of ``PagedAttention``, which attends
from tiles of the same shape over whole key tiles; further ones, all hidden, change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from kvtier.engine.attention import KEY_TILE, QUERY_TILE, attend, hiding
from kvtier.engine.spans import Span
from kvtier.engine.weights import ModelConfig

_COLUMNS: Final = 2  # token, position; then for each component a slot, and its block table
_MOST_KEYS: Final = 1 << 16
"""Keys of all requests together: they are gathered at once, in the dtype that is computed in."""


class DecodeShape(NamedTuple):
    """requests: rows, padding included. keys: what each may look back at, in whole key tiles."""

    requests: int
    keys: int

    def columns(self, component: int, block_tokens: int) -> slice:
        """Return where a component's slot is in a step's numbers, and behind it the block table."""
        width = 1 + -(-self.keys // block_tokens)
        return slice(_COLUMNS + component * width, _COLUMNS + (component + 1) * width)

    def numbers(
        self, spans: Sequence[Span], block_tokens: int, states: Sequence[bool] = (False,)
    ) -> torch.Tensor:
        """Return what the step is about: int64 [requests, columns], on the host.

        spans: at most so many, of one token each, and not longer. The first one fills up what is
        missing: the same token is written to the same slot once more, bit for bit the same.
        states: of each component, whether its table is the slot of a state, and no block table.
        """
        places = [self.columns(component, block_tokens) for component in range(len(states))]
        found = np.zeros((self.requests, places[-1].stop), np.int64)
        for row, span in zip(found, spans, strict=False):
            row[:_COLUMNS] = span.tokens[0], span.start
            for place, whole, state in zip(places, span.tables, states, strict=True):
                if state:
                    row[place.start] = whole[0]
                    continue
                table = whole[: -(-span.end // block_tokens)]
                slot = table[span.start // block_tokens] * block_tokens + span.start % block_tokens
                row[place.start : place.start + 1 + len(table)] = slot, *table
        found[:, _COLUMNS:].clip(0, out=found[:, _COLUMNS:])  # no block is kept before a window
        found[len(spans) :] = found[0]
        return torch.from_numpy(found)


def slots_in(numbers: torch.Tensor, component: int, components: int) -> torch.Tensor:
    """Return the slots of one of so many components, [requests]: a view of a step's numbers."""
    width = (numbers.shape[1] - _COLUMNS) // components
    return numbers[:, _COLUMNS + component * width]


def shape_for(spans: Sequence[Span]) -> DecodeShape | None:
    """Return the shape of a step, rounded up so that few are ever needed; None: it has none.

    A step has one where each span is one token with logits, with no inputs of its own.
    """
    if any(len(one.tokens) != 1 or one.logits != 1 or one.inputs is not None for one in spans):
        return None
    longest = max(span.end for span in spans)
    shape = DecodeShape(
        1 << (len(spans) - 1).bit_length(), KEY_TILE << (-(-longest // KEY_TILE) - 1).bit_length()
    )
    return shape if shape.requests * shape.keys <= _MOST_KEYS else None


class DecodeAttention:
    """See Attention. Made within the step, of tensors whose content may be another next time."""

    def __init__(
        self,
        config: ModelConfig,
        numbers: torch.Tensor,
        keys: int,
        kv: torch.Tensor,
        dtype: torch.dtype,
        component: int = 0,
        window: int = 0,
    ) -> None:
        """Plan the step.

        numbers: as ``DecodeShape.numbers`` has them, on the device. keys: of that shape.
        kv, dtype, component, window: as in PagedAttention.
        """
        self._config, self._keys = config, keys
        self._planes, block_tokens = kv.shape[1], kv.shape[3]
        self._requests = len(numbers)
        place = DecodeShape(self._requests, keys).columns(component, block_tokens)
        self._targets = numbers[:, place.start]
        self._table = numbers[:, place.start + 1 : place.stop].flatten()
        positions = numbers[:, 1]
        self._blocks = kv.flatten(3)
        self._slots = kv.flatten(2, 3).flatten(3)
        group = config.heads // config.kv_heads
        queries = positions[:, None] + torch.arange(QUERY_TILE, device=kv.device)
        self._mask = hiding(queries, keys, group, dtype, window)
        every = torch.arange(keys, device=kv.device)
        beyond = every > positions[:, None]
        if window:
            beyond |= every <= positions[:, None] - window
        self._beyond = beyond[:, :, None]
        width = -(-keys // block_tokens) * block_tokens
        self._gathered = (self._planes, self._requests, width, config.kv_size)
        self._dtype = dtype

    def write(self, layer: int, fresh: torch.Tensor) -> None:
        """See Attention."""
        planes = fresh.to(self._slots.dtype).view(len(fresh), self._planes, -1).transpose(0, 1)
        self._slots[layer].index_copy_(1, self._targets, planes)

    def read(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """See Attention. A token stands first in a tile of its own; the rest of it is zeros."""
        config = self._config
        found = self._blocks[layer].index_select(1, self._table).view(self._gathered)
        wide = found[:, :, : self._keys].to(self._dtype).masked_fill(self._beyond, 0)
        heads = wide.unflatten(3, (config.kv_heads, config.head_size)).transpose(2, 3)
        tiles = queries.new_zeros(2, self._requests, QUERY_TILE, config.query_size)
        asked, answered = tiles.unbind()
        asked[:, 0] = queries[: self._requests]
        attend(config, asked, answered, heads[0], heads[-1], self._mask)
        out[: self._requests] = answered[:, 0]
