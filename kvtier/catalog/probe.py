"""Probe: ask a shared tier how far it has a prefix that others may have written there.

A prefix is present up to some chunk and absent after it, so its end is found by searching:
at most three rounds of at most sixteen look-ups, each round in parallel. The answer is a hint;
a read that fails later shortens the load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kvtier.clock import Clock

__all__ = ["Probe", "search"]

_ROUNDS: Final = 3
_WIDTH: Final = 16
_TTL_SECONDS: Final = 5.0
_REMEMBERED: Final = 1 << 16


async def search(count: int, ask: Callable[[Sequence[int]], Awaitable[list[bool]]]) -> int:
    """Return how many of `count` positions, from the first, are present.

    ask: says for each of some ascending positions whether it is present. Where three rounds do
    not tell exactly, the answer is below the truth, never above what was seen.
    """
    low, high = 0, count  # [0, low) is present, [high, count) is not
    for _ in range(_ROUNDS):
        if low == high:
            break
        width = high - low
        places = sorted({low + width * i // _WIDTH for i in range(_WIDTH)})
        answers = await ask(places)
        for place, present in zip(places, answers, strict=True):
            if not present:
                high = place
                break
            low = place + 1
    return low


class Probe:
    """Remembers for a short time what a shared tier did not have, in bounded memory."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._absent: OrderedDict[bytes, float] = OrderedDict()

    def due(self, name: bytes) -> bool:
        """Say whether it is worth asking for the part: it was not found missing just now."""
        return self._absent.get(name, 0.0) <= self._clock()

    def asked(self, name: bytes) -> float | None:
        """Return how many seconds ago the part was found missing, if that is known."""
        until = self._absent.get(name)
        return None if until is None else self._clock() - until + _TTL_SECONDS

    def missing(self, name: bytes) -> None:
        """Remember that the part was not there."""
        self._absent.pop(name, None)
        if len(self._absent) >= _REMEMBERED:
            self._absent.popitem(last=False)
        self._absent[name] = self._clock() + _TTL_SECONDS
