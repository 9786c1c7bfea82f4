"""Cut: up to which chunk a load pays, of chunks that lie in tiers of which each takes its time.

Tiers are read beside each other, and the slowest counts. Within a run of chunks of one tier each
takes the same time to read, and none is cheaper to compute than the one before it. So a load ends
best where a run does, or where a run begins to take longer than what is before it; and since the
last chunk may not be full, before that. Of many runs all ends are looked at instead, at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

__all__ = ["Ahead", "Speed", "best_cut", "slowest"]

_FEW_RUNS: Final = 4
"""Runs whose ends are sooner looked at one by one than all ends by numpy."""


class Speed(NamedTuple):
    """Seconds until a tier reads, what is queued there included, and those of each chunk."""

    wait: float
    each: float


class Ahead(NamedTuple):
    """What the engine lacks of a match, and what computing it takes.

    where: a byte a chunk, its tier's number; 0 for one that takes no time. speeds: of the other
    numbers in it, by number. first: the first chunk's place in the prompt. size: a chunk's tokens.
    tokens: the match's, where the last chunk may not be full. per_token, per_pair: see Prefill.
    """

    where: bytes
    speeds: Mapping[int, Speed]
    first: int
    size: int
    tokens: int
    per_token: float
    per_pair: float

    def rest(self, chunks: int) -> float:
        """Return the seconds that computing what is behind so many chunks takes."""
        end, tokens = min((self.first + chunks) * self.size, self.tokens), self.tokens
        return (tokens - end) * self.per_token + (tokens * tokens - end * end) / 2 * self.per_pair


def slowest(ahead: Ahead) -> tuple[float, int]:
    """Return the seconds that all chunks take to load, and the tier that takes them; 0 for none."""
    where = ahead.where
    loads = [(one.wait + where.count(tier) * one.each, tier) for tier, one in ahead.speeds.items()]
    return max(loads, default=(0.0, 0))


def best_cut(ahead: Ahead) -> tuple[float, int]:
    """Return how many chunks, at least one, are best loaded, behind the seconds of all that.

    Of cuts that take as long as each other, the furthest.
    """
    ends = _ends(ahead)
    if ends is None:
        return _of_all(ahead)
    best, stop = float("inf"), 0
    for end, load in ends:
        seconds = load + ahead.rest(end)
        if seconds <= best:
            best, stop = seconds, end
    return best, stop


def _ends(ahead: Ahead) -> list[tuple[int, float]] | None:
    """Return where a load may end best, and its seconds; None where there are many runs."""
    ends: list[tuple[int, float]] = []
    read: dict[int, float] = {}  # seconds, by tier
    rest, runs, end, load = ahead.where, 0, 0, 0.0
    while rest:
        if (runs := runs + 1) > _FEW_RUNS:
            return None
        tier, behind = rest[0], rest.lstrip(rest[:1])
        begin, count = end, len(rest) - len(behind)
        rest, end = behind, end + count
        speed = ahead.speeds.get(tier)
        if speed is not None:
            each = speed.each
            before = read.get(tier, speed.wait)
            free = int((load - before) / each + 1e-9) if load > before and each else 0
            if free < count:  # a load ends before that chunk, or with it, or far behind
                ends += [
                    (begin + free, load),
                    (begin + free + 1, max(load, before + (free + 1) * each)),
                ]
            if not rest and count > 1:
                ends.append((end - 1, max(load, before + (count - 1) * each)))
            read[tier] = before + count * each
            load = max(load, read[tier])
        ends.append((end, load))
    return ends


def _of_all(ahead: Ahead) -> tuple[float, int]:
    """Return what ``best_cut`` does, looking at every end."""
    where, tokens, count = ahead.where, ahead.tokens, len(ahead.where)
    each = np.zeros((len(ahead.speeds) or 1, max(ahead.speeds, default=0) + 1))
    for row, (tier, speed) in enumerate(ahead.speeds.items()):
        each[row, tier] = speed.each
    load = each.take(np.frombuffer(where, np.uint8), axis=1)
    for row, (tier, speed) in enumerate(ahead.speeds.items()):
        load[row, where.index(tier)] += speed.wait
    seconds = np.maximum.reduce(np.add.accumulate(load, axis=1))
    begin, size = ahead.first * ahead.size, ahead.size
    ends = np.arange(begin + size, begin + (count + 1) * size, size, dtype=np.float64)
    ends[-1] = min(ends[-1], tokens)
    seconds -= ends * (ahead.per_token + ends * (ahead.per_pair / 2))
    behind = int(seconds[::-1].argmin())
    computed = tokens * (ahead.per_token + tokens * (ahead.per_pair / 2))
    return float(seconds[count - 1 - behind]) + computed, count - behind
