"""The choice of the next token."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.engine.request import Sampling

__all__ = ["sample"]

_SALT: Final = 0x6B767469


def sample(logits: NDArray[np.float32], sampling: Sampling, index: int) -> int:
    """Return a token id: the likeliest, or one drawn at `sampling.temperature`.

    logits: float32 [vocab]. index: of the output token, from 0. The draw depends on the seed
    and the index alone, so neither the batch nor a preemption changes it. Ties go to the
    smallest id.
    """
    if not sampling.temperature:
        return int(np.argmax(logits))
    wide = logits.astype(np.float64)
    sums = np.cumsum(np.exp((wide - wide.max()) / sampling.temperature))
    # A counter-based generator (Philox, Salmon et al. 2011): any index without the ones before.
    bits = np.random.Philox(key=[sampling.seed, _SALT], counter=[index, 0, 0, 0])
    point = np.random.Generator(bits).random() * sums[-1]
    return min(int(np.searchsorted(sums, point, side="right")), len(logits) - 1)
