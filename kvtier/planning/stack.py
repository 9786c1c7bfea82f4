"""A stack of tiers under a trace: hits, bytes, times and money, and what no stack can exceed.

The live cache's rules: all that is used comes into DRAM and is written through to each tier
below, each tier evicts for itself, a prompt is loaded as far as every block is in some tier, each
block from the fastest, and only as far as that is estimated faster than computing it.

The bound: at any time the tiers together hold at most as many different blocks as their capacities
sum up to, so that what they serve one tier of that sum could have served, and the optimum of one
tier has the most hits of all. The same holds for the first tiers of a stack.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from kvtier.catalog.spill import BATCH_BYTES
from kvtier.clock import monotonic
from kvtier.cost import Costs
from kvtier.errors import ConfigError
from kvtier.planning.optimum import optimum
from kvtier.planning.prices import DAY, MONTH, Prices
from kvtier.planning.queueing import Waits
from kvtier.planning.simulate import Hits, Overlay, Tier
from kvtier.planning.trace import Trace
from kvtier.policies.base import Policy

__all__ = ["Level", "LevelResult", "Speeds", "Stack", "Tiers", "Times", "simulate_stack"]

_UNBOUNDED: Final = 1 << 62
_NONE: Final = -1


@dataclass(frozen=True, slots=True)
class Level:
    """One tier, DRAM first. nbytes: its capacity, None for no bound; speeds of reading."""

    name: str
    nbytes: int | None
    bytes_per_s: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class Speeds:
    """The engine's: seconds of a token of prefill, and of each pair of tokens that attend."""

    per_token: float
    per_pair: float = 0.0


class Times(msgspec.Struct, frozen=True):
    """Times to first token in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class LevelResult(msgspec.Struct, frozen=True):
    """What one tier does. Rates are in percent of prompt tokens; bound: of it and those above.

    life_years: until what a drive stands is written, 0 where nothing wears; dollars: a month.
    """

    name: str
    nbytes: int | None
    hit_rate: float
    hit_tokens: int
    reached: float
    bound: float
    read_bytes: int
    written_bytes: int
    written_bytes_a_day: float
    life_years: float
    dollars: float


class Stack(msgspec.Struct, frozen=True):
    """A trace's replay through a stack of tiers.

    skipped_tokens: there, and not loaded since computing was faster. at_times: requests wait for
    each other, or each is as if alone. gpu_hours_saved: a month.
    """

    trace: str
    requests: int
    warmup: float
    policy: str
    bytes_per_token: int
    levels: list[LevelResult]
    hit_rate: float
    skipped_tokens: int
    at_times: bool
    ttft: Times
    ttft_without: Times
    hours: float
    gpu_hours_saved: float
    gpu_dollars_saved: float
    dollars: float


class Tiers:
    """All tiers of one replay, and what they did after the warm-up."""

    def __init__(
        self,
        trace: Trace,
        levels: Sequence[Level],
        policy: Callable[[], Policy],
        block_bytes: int,
        overlay: Overlay,
    ) -> None:
        self.tiers = []
        self._parent = trace.parent
        self._lots: list[int] = []  # blocks that the live cache writes at a time
        for level in levels:
            blocks = _UNBOUNDED if level.nbytes is None else level.nbytes // block_bytes
            if not blocks:
                raise ConfigError(f"{level.name} has no room for one block of {block_bytes} bytes")
            most = min(blocks, trace.unique)
            self._lots.append(max(min(BATCH_BYTES // block_bytes, blocks // 8), 1))
            self.tiers.append(Tier(trace, policy, most, servable=True, overlay=overlay))
        self.hits = [0] * len(levels)
        self.read = [0] * len(levels)
        self.start()

    def start(self) -> None:
        """Count what is written from now on."""
        self._begun = [tier.entered for tier in self.tiers]

    @property
    def written(self) -> list[int]:
        """Blocks that came into each tier since ``start``."""
        return [tier.entered - was for tier, was in zip(self.tiers, self._begun, strict=True)]

    def find(self, blocks: Sequence[int], now: float) -> list[int]:
        """Return the tier of each block, from the first, as far as every one is in some tier."""
        for tier in self.tiers:
            tier.pass_time(now)
        insides = [tier.inside for tier in self.tiers]
        found = []
        for block in blocks:
            for number, inside in enumerate(insides):
                if inside[block]:
                    found.append(number)
                    break
            else:
                break
        return found

    def load(self, blocks: Sequence[int], found: int, loaded: int) -> None:
        """Count a prompt as used by each tier, and let what is loaded come into the upper ones.

        found: blocks, from the first, that are in some tier; loaded: those that are brought up.
        """
        for tier in self.tiers:
            tier.touch(blocks[:found])
        self._bring(blocks[:loaded], 0)

    def save_all(self, trace: Trace, ended: Iterable[int]) -> None:
        """See ``save``, of requests of a trace."""
        for number in ended:
            self.save(trace.computed(number))

    def save(self, blocks: Sequence[int]) -> None:
        """Let what was computed come in, of a prompt and its answer: all that is in no tier."""
        insides = [tier.inside for tier in self.tiers]
        found = sum(
            1 for _ in itertools.takewhile(lambda one: any(i[one] for i in insides), blocks)
        )
        self._bring(blocks, found)

    def _bring(self, blocks: Sequence[int], first: int) -> None:
        """Let blocks from the first of a prompt on come into DRAM, and then into the tiers below.

        As far as there is room, and the ones before them too where a tier below lacks them.
        """
        top, *lower = self.tiers
        absent = [block for block in blocks[first:] if not top.inside[block]]
        held = self._parent[absent[0]] if absent else _NONE
        room = top.make_room(len(absent), held)
        if room and first:  # a save marks once more what it continues
            for tier in self.tiers:
                tier.touch(blocks[:first], again=True)
        top.enter(absent[:room])
        for tier, lot in zip(lower, self._lots[1:], strict=True):
            missing = [block for block in blocks if not tier.inside[block]]
            there = list(itertools.takewhile(top.inside.__getitem__, missing))
            for start in range(0, len(there), lot):
                some = there[start : start + lot]
                room = tier.make_room(len(some), self._parent[some[0]])
                tier.enter(some[:room])
                if room < len(some):
                    break


def simulate_stack(  # noqa: PLR0913  (a deployment has that many sides)
    trace: Trace,
    levels: Sequence[Level],
    policy: tuple[str, Callable[[], Policy]],
    *,
    bytes_per_token: int,
    speeds: Speeds,
    prices: Prices,
    warmup: float = 0.0,
    seconds_per_unit: float = 1e-3,
    always: bool = False,
    at_times: bool = False,
    overlay: Overlay | None = None,
    tell: Callable[[str, int, int], None] | None = None,
) -> Stack:
    """Replay a trace through a stack of tiers.

    seconds_per_unit: of the trace's timestamps. always: load what there is, whatever it costs.
    at_times: requests come at the trace's times and wait for each other, see ``Waits``; what is
    loaded is decided as if they did not. overlay: above each policy.
    Raises ConfigError for tiers that have no room for a block.
    """
    size, block_bytes = chunk = trace.block_tokens, trace.block_tokens * bytes_per_token
    costs = _costs(levels, speeds)
    tiers = Tiers(trace, levels, policy[1], block_bytes, overlay or Overlay())
    first = int(len(trace) * warmup)
    hits, skipped, saved = Hits(), 0, 0.0
    waits = Waits(len(levels), alone=not at_times)
    names = ["dram", *(level.name for level in levels[1:])]
    for number, (blocks, tokens) in enumerate(trace.requests()):
        if number == first:
            tiers.start()
        now = trace.time(number) * seconds_per_unit
        tiers.save_all(trace, waits.ended(now))
        found = tiers.find(blocks, trace.time(number))
        most = min(len(found) * size, max(tokens - 1, 0))
        cut = len(found)
        if most and not always:
            cut = _cut(costs, names, found, most, chunk)
        usable, reads = min(cut * size, most), _reads(found[:cut], levels, block_bytes)
        taken = waits.add(now, reads, costs.recompute(usable, tokens))
        if number >= first:
            _count(tiers, found[:cut], block_bytes, (size, tokens))
            hits.count(len(blocks), cut, tokens, size)
            skipped += most - usable
            saved += costs.recompute(0, tokens) - taken
        tiers.load(blocks, len(found), cut)
        if tell and not number % 256:
            tell(f"{trace.name}: {policy[0]}", number, len(trace))
    tiers.save_all(trace, waits.ended(math.inf))
    hours = (trace.last_time() - trace.time(first)) * seconds_per_unit / 3600
    results = _results(trace, levels, tiers, hits, (hours, prices, block_bytes, warmup))
    gpu_hours = saved / 3600 * (MONTH / (hours * 3600) if hours else 0.0)
    return Stack(
        trace=trace.name,
        requests=hits.requests,
        warmup=warmup,
        policy=policy[0],
        bytes_per_token=bytes_per_token,
        levels=results,
        hit_rate=round(hits.rate_tokens, 3),
        skipped_tokens=skipped,
        at_times=at_times,
        ttft=_times(waits.times[first:]),
        ttft_without=_times(_without(trace, costs, seconds_per_unit, at_times=at_times)[first:]),
        hours=hours,
        gpu_hours_saved=gpu_hours,
        gpu_dollars_saved=gpu_hours * prices.gpu_hour,
        dollars=sum(one.dollars for one in results),
    )


def _costs(levels: Sequence[Level], speeds: Speeds) -> Costs:
    """Return the live cache's cost model, told what these tiers and this engine take."""
    costs = Costs(monotonic)
    costs.believe_prefill(speeds.per_token, speeds.per_pair)
    for level in levels:
        costs.believe_tier(level.name, level.latency, 1 / level.bytes_per_s)
    return costs


def _cut(
    costs: Costs, stack: Sequence[str], found: Sequence[int], most: int, chunk: tuple[int, int]
) -> int:
    """Return how many of the blocks that are there are worth loading. most: their tokens."""
    advice = costs.advise(bytes(found), stack, (0, most), chunk, whole=True, meet=False)
    return -(-advice.tokens // chunk[0])


def _without(trace: Trace, costs: Costs, seconds_per_unit: float, *, at_times: bool) -> list[float]:
    """Return the times to first token of all requests if everything is computed."""
    waits = Waits(0, alone=not at_times)
    for number, (_, tokens) in enumerate(trace.requests()):
        waits.add(trace.time(number) * seconds_per_unit, (), costs.recompute(0, tokens))
    deque(waits.ended(math.inf), 0)
    return waits.times


def _reads(
    found: Sequence[int], levels: Sequence[Level], nbytes: int
) -> list[tuple[int, float, float]]:
    """Return the tiers that a request reads, with latency and seconds of its blocks."""
    counts = [(number, level, found.count(number)) for number, level in enumerate(levels)]
    return [
        (number, level.latency, blocks * nbytes / level.bytes_per_s)
        for number, level, blocks in counts
        if blocks
    ]


def _count(tiers: Tiers, found: Sequence[int], nbytes: int, tokens: tuple[int, int]) -> None:
    """Count what a request reads.

    tokens: of a block, and of the prompt, whose last block may not be full.
    """
    size, most = tokens
    if found:
        tiers.hits[found[-1]] -= max(len(found) * size - most, 0)
    for number in range(len(tiers.tiers)):
        blocks = found.count(number)
        tiers.hits[number] += blocks * size
        tiers.read[number] += blocks * nbytes


def _results(
    trace: Trace,
    levels: Sequence[Level],
    tiers: Tiers,
    hits: Hits,
    terms: tuple[float, Prices, int, float],
) -> list[LevelResult]:
    hours, prices, nbytes, warmup = terms
    found, reached, blocks, written = [], 0, 0, tiers.written
    for number, level in enumerate(levels):
        reached += tiers.hits[number]
        room = _UNBOUNDED if level.nbytes is None else level.nbytes // nbytes
        blocks = min(blocks + room, trace.unique)
        a_day = written[number] * nbytes / (hours * 3600) * DAY if hours else 0.0
        used = level.nbytes if level.nbytes is not None else _held(tiers, number) * nbytes
        reads = tiers.read[number] // nbytes
        found.append(
            LevelResult(
                name=level.name,
                nbytes=level.nbytes,
                hit_rate=_percent(tiers.hits[number], hits.tokens),
                hit_tokens=tiers.hits[number],
                reached=_percent(reached, hits.tokens),
                bound=round(optimum(trace, blocks, warmup=warmup).rate_tokens, 3),
                read_bytes=tiers.read[number],
                written_bytes=written[number] * nbytes,
                written_bytes_a_day=a_day,
                life_years=prices.life_years(level.name, used, a_day),
                dollars=prices.a_month(level.name, used, reads, written[number], hours),
            )
        )
    return found


def _held(tiers: Tiers, number: int) -> int:
    return sum(tiers.tiers[number].inside)


def _percent(tokens: int, of: int) -> float:
    return round(100 * tokens / of, 3) if of else 0.0


def _times(seconds: Sequence[float]) -> Times:
    if not seconds:
        return Times(0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = np.percentile(np.asarray(seconds), (50, 90, 99)).tolist()
    return Times(float(np.mean(seconds)), p50, p90, p99)
