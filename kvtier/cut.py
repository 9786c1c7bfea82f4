"""Cut: up to which chunk a load pays, of chunks that lie in tiers of which each takes its time.

Tiers are read beside each other, and the slowest counts. A chunk that takes no longer to read than
the cheapest takes to compute is worth it. So a load ends best with everything, or before a chunk of
a tier that takes longer, a slow one, or before the first of a tier that has to be waited for; and
since the last chunk may not be full, before that. Where a slow tier's chunks are one run, each of
them takes the same time to read and none is cheaper to compute than the one before it: few ends
come into question. Else its chunks are gone through, passing over those of which what is loaded
before them already says that no end there is the best; where that gets nowhere, all ends are
looked at, at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

_FEWEST_TO_MEET: Final = 2
"""Chunks of which one is computed while the other is loaded."""

_MOST_LOOKS: Final = 12
"""Looks at single ends that take about as long as one at all."""


_ROUNDING: Final = 1e-6  # chunks


Speed = tuple[float, float]
"""Seconds until a tier reads, what is queued there included, and those of each chunk."""


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
    loads = [(wait + where.count(at) * each, at) for at, (wait, each) in ahead.speeds.items()]
    return max(loads, default=(0.0, 0))


def best_cut(ahead: Ahead) -> tuple[float, int]:
    """Return how many chunks are best loaded, behind the seconds of all that.

    Of cuts that take as long as each other, the furthest.
    """
    where, speeds, first, size, tokens, a, b = ahead
    b /= 2
    cheapest = size * (a + (2 * first + 1) * size * b)  # of all chunks the first is
    count, slow, loads, load = len(where), {}, [], 0.0
    for tier, speed in speeds.items():
        wait, each = speed
        chunks = where.count(tier)
        seconds = wait + chunks * each
        load = max(load, seconds)
        if each > cheapest:
            slow[tier] = chunks
        elif wait + each > cheapest:
            end = where.find(tier)
            loads.append((end, _load(where, speeds, end)))
    if slow:
        loads += _before(ahead, slow, load)
    if count > 1 and tokens < (first + count) * size:
        loads.append((count - 1, _load(where, speeds, count - 1)))
    computed = tokens * (a + tokens * b)
    stop, best = count, load - computed
    for end, load in loads:
        at = min((first + end) * size, tokens)
        seconds = load - at * (a + at * b)
        if seconds < best or (seconds == best and end > stop):
            best, stop = seconds, end
    return best + computed, stop


def _load(where: bytes, speeds: Mapping[int, Speed], end: int) -> float:
    """Return the seconds that chunks up to `end` take to load."""
    load = 0.0
    for tier, (wait, each) in speeds.items():
        count = where.count(tier, 0, end)
        if count and (seconds := wait + count * each) > load:
            load = seconds
    return load


def _before(ahead: Ahead, slow: Mapping[int, int], load: float) -> list[tuple[int, float]]:
    """Return where a load may end best before a chunk of a slow tier, and its seconds.

    slow: how many chunks such a tier has. load: the seconds of all chunks.
    """
    where, ends = ahead.where, []
    for tier, count in slow.items():
        begin = where.find(tier)
        if where.rfind(tier) - begin >= count:  # more runs than one
            return _passing(ahead, slow, load) or [_of_all(ahead)]
        wait, each = ahead.speeds[tier]
        others = _load(where, ahead.speeds, begin)
        free = int((others - wait) / each + 1e-9) if others > wait else 0
        if free < count:  # it ends before that chunk, or far behind
            ends.append((begin + free, others))
            if others > wait:  # part of the next one is waited for anyway
                ends.append((begin + free + 1, max(others, wait + (free + 1) * each)))
    return ends


def _passing(ahead: Ahead, slow: Mapping[int, int], load: float) -> list[tuple[int, float]]:
    """Return what ``_before`` does, chunk after chunk of slow tiers; nothing where it takes long.

    What one tier takes up to a chunk is taken at each end behind it. While computing the chunks
    up to an end spares less than by what this exceeds the best one, it is passed over.
    """
    where, speeds, first, size, tokens, a, b = ahead
    b /= 2
    linear, square = a * size, b * size * size
    squares, twice, before = linear * linear, 4 * square, first + _ROUNDING
    best = min(load - tokens * (a + tokens * b), -first * (linear + first * square))
    bound = next(iter(slow))
    if len(slow) > 1:
        bound = max(slow, key=lambda tier: slow[tier] * speeds[tier][1])
    wait, each = speeds[bound]
    found, last, passed = [(0, 0.0)], len(where) - 1, -1
    count = counted = 0
    for _ in range(_MOST_LOOKS):
        count += where.count(bound, counted, passed + 1)
        counted = passed + 1
        over = wait + count * each - best if count else -best
        root = linear + math.sqrt(squares + twice * over)
        if not root:  # computing the first tokens takes no time: nothing is passed over
            break
        reach = int(2 * over / root - before)
        if reach >= last:
            return found
        if reach > passed:
            passed = reach
            continue
        ends = [end for tier in slow if (end := where.find(tier, counted)) >= 0]
        if not ends:
            return found
        passed = min(ends)
        load, at = _load(where, speeds, passed), first + passed
        found.append((passed, load))
        best = min(best, load - at * (linear + at * square))
    return []


def _of_all(ahead: Ahead) -> tuple[int, float]:
    """Return the best of all ends but that of everything, and its seconds."""
    where, speeds, first, size, _, a, b = ahead
    chunks = np.frombuffer(where, np.uint8)[:-1]
    load = np.zeros(len(chunks))
    for tier, (wait, each) in speeds.items():
        its = np.add.accumulate(chunks == tier, dtype=np.float64)
        its *= each
        its += wait
        its[: where.index(tier)] = 0.0
        np.maximum(load, its, out=load)
    at = np.arange(first + 1.0, first + len(where))
    at *= size
    seconds = load - at * (a + at * (b / 2))
    best = len(chunks) - 1 - int(seconds[::-1].argmin())
    return best + 1, float(load[best])


def middle(ahead: Ahead) -> tuple[int, float]:
    """Return the chunk where a load from the back meets the engine that computes from the front.

    Behind it the seconds until then; 0 and no time where chunks lie in several tiers, or in one
    that is not known.
    """
    where, first, size = ahead.where, ahead.first, ahead.size
    count, speed = len(where), ahead.speeds.get(where[0])
    if speed is None or count < _FEWEST_TO_MEET or where.count(where[0]) < count:
        return 0, 0.0
    wait, each = speed
    # After k chunks: k * one + k * k * more seconds of computing, all - k * each of loading.
    more = ahead.per_pair * size * size / 2
    one = ahead.per_token * size + 2 * more * first
    linear, both = one + each, wait + count * each
    root = linear + math.sqrt(linear * linear + 4 * more * both)
    if not root:
        return 0, 0.0
    at = min(max(math.ceil(2 * both / root), 1), count - 1)
    load = both - at * each
    seconds = max(at * (one + at * more), load)
    if at > 1 and load + each < seconds:  # loading one more takes less than computing it
        return first + at - 1, load + each
    return first + at, seconds
