"""Queueing: how long requests wait for each other when they come at a trace's times.

The least model that is honest: each tier reads for one request after the other, in the order in
which they come; the engine computes one prompt at a time, in the order in which what they load is
there; what it computed is there for others when it has ended. Left out is what decoding takes, and
that prompts share steps.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator

__all__ = ["Waits"]


class Waits:
    """Times to first token of requests that are added in the order in which they come.

    tiers: how many there are. alone: each as if it were the only one, and nothing queues.
    times: of each request whose turn has come, the seconds until its first token.
    """

    def __init__(self, tiers: int, *, alone: bool) -> None:
        self.times: list[float] = []
        self._alone = alone
        self._free = [0.0] * tiers
        self._engine = 0.0  # when it is free
        self._loaded: list[tuple[float, int, float, float]] = []  # at, which, came, computes
        self._computed: deque[tuple[float, int]] = deque()

    def add(self, now: float, reads: Iterable[tuple[int, float, float]], compute: float) -> float:
        """Take a request that comes at `now`, in seconds.

        reads: the tiers that it reads, each with its latency and the seconds of its bytes, beside
        each other; compute: seconds of what is not loaded.
        Returns the seconds that it would take alone.
        """
        ready, loading = now, 0.0
        for tier, latency, seconds in reads:
            self._free[tier] = max(now, self._free[tier]) + seconds
            ready = max(ready, self._free[tier] + latency)
            loading = max(loading, latency + seconds)
        number = len(self.times)
        self.times.append(loading + compute)
        if self._alone:
            self._computed.append((0.0, number))
        else:
            heapq.heappush(self._loaded, (ready, number, now, compute))
        return loading + compute

    def ended(self, now: float) -> Iterator[int]:
        """Yield the requests, by number, that have been computed by then and were not yielded."""
        while self._loaded and max(self._engine, self._loaded[0][0]) < now:
            ready, number, came, compute = heapq.heappop(self._loaded)
            self._engine = max(self._engine, ready) + compute
            self.times[number] = self._engine - came
            self._computed.append((self._engine, number))
        while self._computed and self._computed[0][0] <= now:
            yield self._computed.popleft()[1]
