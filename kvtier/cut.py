"""Cut: up to which chunk a load pays, of chunks that lie in tiers of which each takes its time.

Tiers are read beside each other, and the slowest counts. Within a run of chunks of one tier each
takes the same time to read, and none is cheaper to compute than the one before it. So a load ends
best where a run does, or where a run begins to take longer than what is before it; and since the
last chunk may not be full, before that. Where no chunk takes longer to read than to compute, it
ends before a tier that has to be waited for, or with everything. Else, of many runs, all ends are
looked at, at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ahead", "Speed", "best_cut", "middle", "slowest"]

_FEWEST_TO_MEET: Final = 2
"""Chunks of which one is computed while the other is loaded."""

_FEW_RUNS: Final = 4
"""Runs whose ends are sooner looked at one by one than all ends by numpy."""


class Speed(NamedTuple):
    """Seconds until a tier reads, what is queued there included, and those of each chunk."""

    wait: float
    each: float


class Ahead(NamedTuple):
    """What the engine lacks of a match, and what computing it takes.

    where: a byte a chunk, its tier's number. speeds: by number, of those in it; the others take
    no time. first: the first chunk's place in the prompt. size: a chunk's tokens.
    tokens: the match's, where the last chunk may not be full. per_token, per_pair: see Prefill.
    """

    where: bytes
    speeds: Mapping[int, Speed]
    first: int
    size: int
    tokens: int
    per_token: float
    per_pair: float


def slowest(ahead: Ahead) -> tuple[float, int]:
    """Return the seconds that all chunks take to load, and the tier that takes them; 0 for none."""
    where = ahead.where
    loads = [(one.wait + where.count(tier) * one.each, tier) for tier, one in ahead.speeds.items()]
    return max(loads, default=(0.0, 0))


def best_cut(ahead: Ahead) -> tuple[float, int]:
    """Return how many chunks are best loaded, behind the seconds of all that.

    Of cuts that take as long as each other, the furthest.
    """
    where, size, tokens, first = ahead.where, ahead.size, ahead.tokens, ahead.first
    a, b = ahead.per_token, ahead.per_pair / 2
    cheapest = size * (a + (2 * first + 1) * size * b)  # of all chunks the first is
    ends: Iterable[tuple[int, float]] | None
    if max([speed.each for speed in ahead.speeds.values()], default=0.0) <= cheapest:
        ends = _waits(where, ahead.speeds, cheapest)
    elif (runs := _runs(where)) is not None:
        ends = _ends(runs, ahead.speeds)
    else:
        return _of_all(ahead)
    best, stop = float("inf"), 0
    for end, load in ends:
        at = min((first + end) * size, tokens)
        seconds = load - at * (a + at * b)
        if seconds <= best:
            best, stop = seconds, end
    return best + tokens * (a + tokens * b), stop


def _waits(where: bytes, speeds: Mapping[int, Speed], cheapest: float) -> list[tuple[int, float]]:
    """Return where a load may end best when no chunk takes longer to load than to compute.

    That is before a tier that has to be waited for, longer than computing the cheapest chunk
    takes, or behind everything, or before the last chunk, which may not be full.
    """
    ends, load, before_last, last = [], 0.0, 0.0, where[-1]
    for tier, (wait, each) in speeds.items():
        if wait + each > cheapest and (begin := where.find(tier)):
            loads = [
                one.wait + count * one.each
                for other, one in speeds.items()
                if (count := where.count(other, 0, begin))
            ]
            ends.append((begin, max(loads, default=0.0)))
        count = where.count(tier)
        seconds = wait + count * each
        load = max(load, seconds)
        if tier == last:
            seconds = seconds - each if count > 1 else 0.0
        before_last = max(before_last, seconds)
    ends.sort()
    if len(where) > 1:
        ends.append((len(where) - 1, before_last))
    ends.append((len(where), load))
    return ends


def middle(ahead: Ahead) -> tuple[int, float]:
    """Return the chunk where a load from the back meets the engine that computes from the front.

    Behind it the seconds until then; 0 and no time where chunks lie in several tiers, or in one
    that is not known.
    """
    where, first, size = ahead.where, ahead.first, ahead.size
    count, speed = len(where), ahead.speeds.get(where[0])
    if speed is None or count < _FEWEST_TO_MEET or where.count(where[0]) < count:
        return 0, 0.0
    # After k chunks: k * one + k * k * more seconds of computing, all - k * each of loading.
    more = ahead.per_pair * size * size / 2
    one = ahead.per_token * size + 2 * more * first
    linear, both = one + speed.each, speed.wait + count * speed.each
    root = linear + math.sqrt(linear * linear + 4 * more * both)
    if not root:
        return 0, 0.0
    at = min(max(math.ceil(2 * both / root), 1), count - 1)
    load = both - at * speed.each
    seconds = max(at * (one + at * more), load)
    if at > 1 and load + speed.each < seconds:  # loading one more takes less than computing it
        return first + at - 1, load + speed.each
    return first + at, seconds


def _runs(where: bytes) -> list[tuple[int, int]] | None:
    """Return the tier and the length of each run; None where there are many."""
    runs: list[tuple[int, int]] = []
    while where:
        tier, count = where[0], len(where)
        if len(runs) == _FEW_RUNS:
            return None
        where = b"" if where.count(tier) == count else where.lstrip(where[:1])
        runs.append((tier, count - len(where)))
    return runs


def _ends(
    runs: Sequence[tuple[int, int]], speeds: Mapping[int, Speed]
) -> Iterator[tuple[int, float]]:
    """Yield where a load may end best, and its seconds."""
    read: dict[int, float] = {}  # seconds, by tier
    end, load, last = 0, 0.0, len(runs) - 1
    for number, (tier, count) in enumerate(runs):
        begin, end = end, end + count
        speed = speeds.get(tier)
        if speed is not None:
            each = speed.each
            before = read.get(tier, speed.wait)
            free = int((load - before) / each + 1e-9) if load > before and each else 0
            if free < count:  # a load ends before that chunk, or with it, or far behind
                yield begin + free, load
                yield begin + free + 1, max(load, before + (free + 1) * each)
            if number == last and count > 1:
                yield end - 1, max(load, before + (count - 1) * each)
            read[tier] = before = before + count * each
            load = max(load, before)
        yield end, load


def _of_all(ahead: Ahead) -> tuple[float, int]:
    """Return what ``best_cut`` does, looking at every end."""
    where, size, first, tokens = ahead.where, ahead.size, ahead.first, ahead.tokens
    count = len(where)
    chunks = np.frombuffer(where, np.uint8)
    ends = np.arange(first + 1, first + count + 1, dtype=np.float64)
    ends *= size
    ends[-1] = min(ends[-1], tokens)
    a, b = ahead.per_token, ahead.per_pair / 2
    load: NDArray[np.float64] | float = 0.0
    for tier, speed in ahead.speeds.items():
        each = np.zeros(256)
        each[tier] = speed.each
        its = each.take(chunks)
        its[where.index(tier)] += speed.wait
        np.add.accumulate(its, out=its)
        load = np.maximum(load, its)
    seconds = load - ends * (a + ends * b)
    behind = int(seconds[::-1].argmin())
    computed = tokens * (a + tokens * b)
    return float(seconds[count - 1 - behind]) + computed, count - behind
