"""Loads: what of each request comes from a stack of tiers, and what of it the engine computes.

Decided as the live cache does, by the same estimates: what reads under way have queued at a tier is
waited for, and where loading and computing take about the same, they meet in the middle.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.clock import monotonic
from kvtier.cost import Advice, Costs, Reading
from kvtier.planning.queueing import Work
from kvtier.planning.simulate import Hits
from kvtier.planning.tiers import Tiers
from kvtier.planning.trace import Trace

_MOST_READING: Final = 2  # of DRAM, the part that reads under way may fill: one in so many


@dataclass(frozen=True, slots=True)
class Speeds:
    """The engine's: seconds of a token of prefill, and of each pair of tokens that attend."""

    per_token: float
    per_pair: float = 0.0


class Loads:
    """The requests of one replay; ``begin`` and ``ended`` are for ``serve``.

    first: the first request that is counted. seconds_per_unit: of the trace's times. always: all
    that there is is loaded. alone: no read is under way when a request comes.
    hits: what was found; skipped: tokens that were there and are computed; saved: seconds that
    requests take less than if all is computed, if they are alone.
    """

    def __init__(
        self,
        trace: Trace,
        tiers: Tiers,
        speeds: Speeds,
        *,
        bytes_per_token: int,
        seconds_per_unit: float,
        first: int,
        always: bool,
        alone: bool,
    ) -> None:
        self.costs = Costs(monotonic)
        self.costs.believe_prefill(speeds.per_token, speeds.per_pair)
        levels = tiers.levels
        for level in levels:
            self.costs.believe_tier(level.name, level.latency, 1 / level.bytes_per_s)
        self.hits, self.skipped, self.saved = Hits(), 0, 0.0
        self._trace, self._levels, self._tiers = trace, levels, tiers
        self._names = ["dram", *(level.name for level in levels[1:])]
        self._chunk = trace.block_tokens, trace.block_tokens * bytes_per_token
        self._unit, self._first = seconds_per_unit, first
        self._always, self._alone = always, alone
        self._free = [0.0] * len(levels)  # when a tier has read all that it was asked for
        self._order = itertools.count()
        self._reading: list[tuple[float, int, Reading, list[int]]] = []  # by its end
        self._queued = 0  # bytes
        self._coming: dict[int, float] = {}  # blocks that are read, and when they are there

    def begin(self, number: int, now: float) -> Work:
        """Look up what there is of a request, decide what of it is loaded, and read that."""
        if number == self._first:
            self._tiers.start()
        self._end_reads(now)
        size = self._chunk[0]
        blocks, tokens = self._trace.blocks(number), self._trace.tokens(number)
        found = self._tiers.find(blocks, now / self._unit)
        most = min(len(found) * size, max(tokens - 1, 0))
        advice = self._advice(found, most)
        head, cut = advice.begin // size, -(-advice.tokens // size)
        if self._always and advice.choice == "load":
            cut = len(found)  # a last block that is not full, too
        loaded = found[head:cut]
        front = self.costs.recompute(0, advice.begin)
        compute = self.costs.recompute(advice.tokens, tokens)
        ready, loading = self._read(blocks[head:cut], loaded, now)
        taken = max(loading, front) + compute
        if number >= self._first:
            self._count(loaded, tokens - advice.begin)
            self.hits.count(len(blocks), len(loaded), tokens - advice.begin, size)
            self.hits.tokens += advice.begin
            self.skipped += most - advice.tokens + advice.begin
            self.saved += self.costs.recompute(0, tokens) - taken
        self._tiers.load(blocks, len(found), cut)
        copying = 0.0 if any(loaded) else loading  # out of DRAM: nobody is passed over for that
        return Work(ready, copying + compute, front, taken)

    def ended(self, number: int) -> None:
        """Let what was computed of a request, and its answer, come in."""
        self._tiers.save(self._trace.computed(number))

    def without(self, number: int, now: float) -> Work:
        """Return what a request takes if all of it is computed."""
        seconds = self.costs.recompute(0, self._trace.tokens(number))
        return Work(now, seconds, 0.0, seconds)

    def _advice(self, found: Sequence[int], most: int) -> Advice:
        """Say what to load of blocks that are there, so many tokens."""
        dram = self._levels[0].nbytes
        if dram is not None and any(found) and self._queued > dram // _MOST_READING:
            return Advice("recompute", 0)  # as the live cache refuses to fetch
        if self._always or not most:
            return Advice("load", most)
        span = 0, most
        return self.costs.advise(
            bytes(found), self._names, span, self._chunk, whole=True, meet=True
        )

    def _read(self, blocks: Sequence[int], found: Sequence[int], now: float) -> tuple[float, float]:
        """Read blocks from these tiers; return when all are there, and the seconds if alone.

        Each tier reads for one request after the other. A block that another request has begun to
        read is waited for.
        """
        ready, loading, nbytes = now, 0.0, self._chunk[1]
        for number, level in enumerate(self._levels):
            if not (count := found.count(number)):
                continue
            seconds = count * nbytes / level.bytes_per_s
            loading = max(loading, level.latency + seconds)
            if self._alone:
                continue
            if not number:
                ready = now + loading if any(found) else now
                continue
            self._free[number] = max(now, self._free[number]) + seconds
            until = self._free[number] + level.latency
            ready = max(ready, until)
            self._queued += count * nbytes
            reading = self.costs.begin(level.name, count * nbytes, 0.0)
            lot = [one for one, at in zip(blocks, found, strict=True) if at == number]
            heapq.heappush(self._reading, (until, next(self._order), reading, lot))
            self._coming.update(dict.fromkeys(lot, until))
        if self._coming:
            ready = max([ready, *(self._coming.get(block, now) for block in blocks)])
        return ready, loading

    def _end_reads(self, now: float) -> None:
        """Take note of the reads that have ended by now."""
        while self._reading and self._reading[0][0] <= now:
            until, _, reading, blocks = heapq.heappop(self._reading)
            self.costs.end(reading, reading.tier, 0)  # which says nothing of the tier's speed
            self._queued -= reading.nbytes
            for block in blocks:
                if self._coming[block] == until:
                    del self._coming[block]

    def _count(self, found: Sequence[int], tokens: int) -> None:
        """Count what a request reads. tokens: behind its front; the last block may not be full."""
        size, nbytes = self._chunk
        tiers = self._tiers
        if found:
            tiers.hits[found[-1]] -= max(len(found) * size - tokens, 0)
        for number in range(len(self._levels)):
            blocks = found.count(number)
            tiers.hits[number] += blocks * size
            tiers.read[number] += blocks * nbytes
