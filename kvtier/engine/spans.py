"""What a step asks of a model: spans of tokens to compute, and states to copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Inputs = Callable[[torch.Tensor, int], torch.Tensor]
"""From a token's embedding [hidden] and its position to what the layers see in its place [hidden]:
an image, say, or the embedding as an adapter changes it. Bits must depend on these two alone."""


StateCopy = tuple[int, int, int]
"""A recurrent state to be copied: component, from slot, to slot."""


@dataclass(frozen=True, slots=True)
class Span:
    """The consecutive tokens of one request that a step computes.

    tokens: their ids. start: position of the first. tables: for each component of the model, the
    request's block table, which must reach to the last of them, or the slot of its state.
    logits: how many of the last tokens need logits. inputs: what the layers see, if that is not
    the tokens' own embeddings.
    """

    tokens: Sequence[int]
    start: int
    tables: Sequence[Sequence[int]]
    logits: int = 1
    inputs: Inputs | None = None

    @property
    def end(self) -> int:
        """Position after the last token: the length of the context."""
        return self.start + len(self.tokens)


def placed(
    spans: Sequence[Span], rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and positions of a step's rows, each int64 [rows], in one copy to `device`.

    rows: at least the tokens of all spans. Padding is token 0 at position 0.
    """
    both = torch.zeros(2, rows, dtype=torch.int64)
    row = 0
    for span in spans:
        here = slice(row, row + len(span.tokens))
        both[0, here] = torch.as_tensor(span.tokens)
        both[1, here] = torch.arange(span.start, span.end)
        row = here.stop
    ids, positions = both.to(device).unbind()
    return ids, positions
