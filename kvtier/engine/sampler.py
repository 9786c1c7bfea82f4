"""The choice of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.engine.compute import Compute
from kvtier.engine.request import Sampling

_SALT: Final = 0x6B767469


class Chosen:
    """The tokens that a step's logits give. Of a GPU's memory as little is copied as will do.

    logits: float32 [rows, vocab], on the device of `compute`. asked: for each span how its tokens
    are chosen, and its rows. Waits for the step: one copy brings the likeliest token of every row,
    another one whole rows, if there are spans whose tokens are drawn.
    """

    def __init__(
        self, logits: torch.Tensor, asked: Sequence[tuple[Sampling, int]], compute: Compute
    ) -> None:
        drawn: list[int] = []
        row = 0
        for sampling, rows in asked:
            drawn += range(row, row + rows) if sampling.temperature else ()
            row += rows
        self._likeliest: NDArray[np.int64] = compute.download(logits.argmax(1))
        self._rows: dict[int, NDArray[np.float32]] = {}
        if drawn:
            some = logits.index_select(0, torch.tensor(drawn).to(logits.device))
            self._rows = dict(zip(drawn, compute.download(some), strict=True))

    def token(self, row: int, sampling: Sampling, index: int) -> int:
        """Return the token that a row gives: the likeliest, or one drawn, see ``draw``.

        Ties go to the smallest id.
        """
        if not sampling.temperature:
            return int(self._likeliest[row])
        return draw(self._rows[row], sampling, index)


def draw(logits: NDArray[np.float32], sampling: Sampling, index: int) -> int:
    """Return a token id, drawn at `sampling.temperature`, which is above 0.

    logits: float32 [vocab]. index: of the output token, from 0. The draw depends on the seed
    and the index alone, so neither the batch nor a preemption changes it.
    """
    wide = logits.astype(np.float64)
    sums = np.cumsum(np.exp((wide - wide.max()) / sampling.temperature))
    # A counter-based generator (Philox, Salmon et al. 2011): any index without the ones before.
    bits = np.random.Philox(key=[sampling.seed, _SALT], counter=[index, 0, 0, 0])
    point = np.random.Generator(bits).random() * sums[-1]
    return min(int(np.searchsorted(sums, point, side="right")), len(logits) - 1)
