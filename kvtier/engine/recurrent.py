"""Recurrent layers: gated linear attention, whose whole past is one state of fixed size.

Per head ``S[t] = g[t] * S[t-1] + k[t] v[t]^T`` and ``o[t] = q[t] S[t]`` (Yang et al., arXiv
2312.06635, with one gate a head). Tokens go one by one, each in operations of one fixed shape,
and the state is rounded to the pool's dtype after every token: so its bits do not depend on how
the prompt was cut, or on whether it was ever written down in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch.nn import functional

from kvtier.engine.spans import Span

GATE_ROOT: Final = 16
"""Of the gates, so that they forget slowly: the temperature in that paper."""


def recurrent_width(heads: int, size: int) -> int:
    """Return the width of what a layer projects for a token: query, key, value and gate."""
    return heads * (3 * size + 1)


def recurrent_token(
    state: torch.Tensor, row: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the state [heads, size, size] on by a token; return it and the output [heads, size].

    row: what was projected for the token, [heads * (3 * size + 1)]. dtype: of the pool.
    """
    heads, size, _ = state.shape
    query, key, value = row[: 3 * heads * size].view(3, heads, size).unbind()
    gate = row[3 * heads * size :].sigmoid().pow(1 / GATE_ROOT).view(heads, 1, 1)
    outer = (key * size**-0.5)[:, :, None] * value[:, None, :]
    state = (state * gate + outer).to(dtype).to(row.dtype)
    output = (query[:, :, None] * state).sum(1)
    return state, functional.rms_norm(output, (size,))


class DecodeRecurrence:
    """See Recurrence. Of a decode step whose shapes are fixed: see ``DecodeAttention``.

    slots, positions: int64 [requests], whose content may be another next time; a request may stand
    there twice. kv, size: as in Recurrence. States are moved on where they lie.
    """

    def __init__(
        self, slots: torch.Tensor, positions: torch.Tensor, kv: torch.Tensor, size: int
    ) -> None:
        self._slots = slots
        self._fresh = (positions == 0).view(-1, 1, 1, 1)
        self._kv = kv.unflatten(-1, (size, size))[:, 0]

    def mix(self, layer: int, projected: torch.Tensor, mixed: torch.Tensor) -> None:
        """Fill the requests' rows of `mixed`, and move their states on, once each."""
        pool = self._kv[layer]
        states = pool.index_select(0, self._slots).masked_fill(self._fresh, 0).to(projected.dtype)
        for row, state in enumerate(states.unbind()):
            moved, output = recurrent_token(state, projected[row], pool.dtype)
            state.copy_(moved)
            mixed[row] = output.flatten()
        pool.index_copy_(0, self._slots, states.to(pool.dtype))


class Recurrence:
    """One step's recurrent layers. The slot of a span's state holds the one after its last token.

    kv: [layers, 1, slots, heads, size * size].
    """

    def __init__(self, spans: Sequence[Span], kv: torch.Tensor, component: int, size: int) -> None:
        self._spans = spans
        self._kv = kv.unflatten(-1, (size, size))[:, 0]
        self._component = component

    def mix(self, layer: int, projected: torch.Tensor, mixed: torch.Tensor) -> None:
        """Fill the spans' rows of `mixed`, and move their states on."""
        row = 0
        for span in self._spans:
            place = self._kv[layer, span.tables[self._component][0]]
            state = (place if span.start else torch.zeros_like(place)).to(projected.dtype)
            for _ in span.tokens:
                state, output = recurrent_token(state, projected[row], place.dtype)
                mixed[row] = output.flatten()
                row += 1
            place.copy_(state)
