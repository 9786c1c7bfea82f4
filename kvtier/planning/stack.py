"""A stack of tiers under a trace: hits, bytes, times and money, and what no stack can exceed.

The live cache's rules: all that is used comes into DRAM and is written through to each tier
below, each tier evicts for itself, a prompt is loaded as far as every block is in some tier, each
block from the fastest, and only as far as that is estimated faster than computing it.

The bound: at any time the tiers together hold at most as many different blocks as their capacities
sum up to, so that what they serve one tier of that sum could have served, and the optimum of one
tier has the most hits of all. The same holds for the first tiers of a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from kvtier.planning.loads import Loads, Speeds
from kvtier.planning.optimum import optimum
from kvtier.planning.prices import DAY, MONTH, Prices
from kvtier.planning.queueing import Work, serve
from kvtier.planning.simulate import Hits, Overlay
from kvtier.planning.tiers import UNBOUNDED, Level, Tiers
from kvtier.planning.trace import Trace
from kvtier.policies.base import Policy

__all__ = ["Level", "LevelResult", "Speeds", "Stack", "Tiers", "Times", "simulate_stack"]


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
    each other, or each is as if alone. gpu_hours_saved: a month. notes: of the trace.
    """

    trace: str
    requests: int
    skipped_lines: int
    notes: list[str]
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
    at_times: requests come at the trace's times and wait for each other, see ``serve``.
    overlay: above each policy.
    Raises ConfigError for tiers that have no room for a block.
    """
    block_bytes, first = trace.block_tokens * bytes_per_token, int(len(trace) * warmup)
    tiers = Tiers(trace, levels, policy[1], block_bytes, overlay or Overlay())
    loads = Loads(
        *(trace, tiers, speeds),
        bytes_per_token=bytes_per_token,
        seconds_per_unit=seconds_per_unit,
        first=first,
        always=always,
        alone=not at_times,
    )

    def begin(number: int, now: float) -> Work:
        if tell and not number % 256:
            tell(f"{trace.name}: {policy[0]}", number, len(trace))
        return loads.begin(number, now)

    came = [trace.time(number) * seconds_per_unit for number in range(len(trace))]
    ttft = serve(came, begin, loads.ended, alone=not at_times)
    without = serve(came, loads.without, _nothing, alone=not at_times)
    hits = loads.hits
    hours = (trace.last_time() - trace.time(first)) * seconds_per_unit / 3600
    results = _results(trace, levels, tiers, hits, (hours, prices, block_bytes, warmup))
    gpu_hours = loads.saved / 3600 * (MONTH / (hours * 3600) if hours else 0.0)
    return Stack(
        trace=trace.name,
        requests=hits.requests,
        skipped_lines=trace.skipped,
        notes=trace.notes,
        warmup=warmup,
        policy=policy[0],
        bytes_per_token=bytes_per_token,
        levels=results,
        hit_rate=round(hits.rate_tokens, 3),
        skipped_tokens=loads.skipped,
        at_times=at_times,
        ttft=_times(ttft[first:]),
        ttft_without=_times(without[first:]),
        hours=hours,
        gpu_hours_saved=gpu_hours,
        gpu_dollars_saved=gpu_hours * prices.gpu_hour,
        dollars=sum(one.dollars for one in results),
    )


def _nothing(number: int) -> None:
    del number


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
        room = UNBOUNDED if level.nbytes is None else level.nbytes // nbytes
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
