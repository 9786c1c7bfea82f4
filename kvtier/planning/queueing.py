"""Queueing: how long requests wait for each other when they come at a trace's times.

As an engine does that computes one prompt at a time. Whenever it is free it goes through those that
wait, in the order in which they came, and has what the cache has of each looked up then, not when
it came: what was computed meanwhile is there. One that waits for what it loads is passed over until
that is there; the first that need not wait is computed. Left out is what decoding takes, and that
prompts share steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Work(NamedTuple):
    """What a request takes once it is looked up.

    ready: when what it loads is there. compute: seconds of what is computed then; front: of what
    is computed meanwhile. alone: the seconds of all that if nothing else is under way.
    """

    ready: float
    compute: float
    front: float
    alone: float


def serve(
    times: Sequence[float],
    begin: Callable[[int, float], Work],
    ended: Callable[[int], None],
    *,
    alone: bool,
) -> list[float]:
    """Serve requests, and return the seconds from when each came until its first token.

    times: when they come, in seconds that do not fall. begin: called with a request's number and
    the time when it is looked up, in the order of the numbers; ended: with its number, when it has
    been computed. alone: each comes when the one before has ended.
    """
    found = [0.0] * len(times)
    if alone:
        for number, came in enumerate(times):
            found[number] = begin(number, came).alone
            ended(number)
        return found
    loading: list[tuple[float, int, Work]] = []  # by when it is there
    loaded: list[tuple[int, Work]] = []  # by who came first
    now, following = 0.0, 0
    while loaded or loading or following < len(times):
        while loading and loading[0][0] <= now:
            _, number, work = heapq.heappop(loading)
            heapq.heappush(loaded, (number, work))
        while not loaded and following < len(times) and times[following] <= now:
            work = begin(following, now)
            if work.front or work.ready <= now:
                loaded.append((following, work))
            else:
                heapq.heappush(loading, (work.ready, following, work))
            following += 1
        if loaded:
            number, work = heapq.heappop(loaded)
            now = max(now + work.front, work.ready) + work.compute
            found[number] = now - times[number]
            ended(number)
        else:
            now = min([*times[following : following + 1], *(at for at, _, _ in loading[:1])])
    return found
