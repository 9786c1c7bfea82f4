"""Queueing: how long requests wait for each other when they come at a trace's times.

The least model that is honest: each tier reads for one request after the other, in the order in
which they come; the engine computes one prompt at a time, in the order in which what they load is
there. Left out is what decoding takes, that prompts share steps, and that a request which comes
before another has ended finds nothing of it yet.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Waits"]


class Waits:
    """Times to first token of requests that are added in the order in which they come.

    tiers: how many there are. alone: each as if it were the only one, and nothing queues.
    """

    def __init__(self, tiers: int, *, alone: bool) -> None:
        self._alone = alone
        self._free = [0.0] * tiers
        self._asked: list[tuple[float, float, float]] = []  # came, has all that it loads, computes

    def add(self, now: float, reads: Iterable[tuple[int, float, float]], compute: float) -> float:
        """Take a request that comes at `now`, in seconds.

        reads: the tiers that it reads, each with its latency and the seconds of its bytes, beside
        each other; compute: seconds of what is not loaded.
        Returns the seconds that it would take alone.
        """
        ready, loading = now, 0.0
        for tier, latency, seconds in reads:
            end = max(now, 0.0 if self._alone else self._free[tier]) + seconds
            self._free[tier] = end
            ready = max(ready, end + latency)
            loading = max(loading, latency + seconds)
        self._asked.append((now, ready, compute))
        return loading + compute

    def times(self) -> list[float]:
        """Return the seconds until the first token of each request, in the order of ``add``."""
        times = [ready - now + compute for now, ready, compute in self._asked]
        if self._alone:
            return times
        free = 0.0
        for number in sorted(range(len(times)), key=lambda number: self._asked[number][1]):
            now, ready, compute = self._asked[number]
            free = max(free, ready) + compute
            times[number] = free - now
        return times
