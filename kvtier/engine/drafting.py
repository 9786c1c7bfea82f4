"""Drafts: cheap guesses of the next tokens, which the model verifies all in one step.

Greedy and seeded answers are the same with any drafter (Leviathan et al., arXiv 2211.17192, for
the idea; here a draft stands only if it is the very token that would have been chosen).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Drafter = Callable[[NDArray[np.int32], int], Sequence[int]]
"""From all tokens so far, int32 [n], and how many are wanted at most, to the next ones, guessed."""


class Drafting(NamedTuple):
    """Who guesses, and how many tokens a step verifies at most."""

    drafter: Drafter
    tokens: int

    def propose(self, tokens: NDArray[np.int32], most: int) -> tuple[int, ...]:
        """Return at most `most` guesses, whatever the drafter answers."""
        most = min(most, self.tokens)
        return tuple(int(token) for token in self.drafter(tokens, most))[:most]


def prompt_lookup(tokens: NDArray[np.int32], most: int) -> list[int]:
    """Guess that what followed the last two tokens when they came before follows them again."""
    before, last = tokens[:-1], tokens[-2:]
    seen = np.flatnonzero((before[:-1] == last[:1]) & (before[1:] == last[1:]))
    after = int(seen[-1]) + len(last) if len(seen) else len(tokens)
    found: list[int] = tokens[after : after + most].tolist()
    return found
