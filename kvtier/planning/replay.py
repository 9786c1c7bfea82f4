"""Replay: one trace under several policies and capacities, beside the optimum and the ceiling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from kvtier.errors import ConfigError, unknown
from kvtier.planning.compared import CostAware, Fifo, Sieve, TinyLfu, TwoQueues
from kvtier.planning.optimum import ceiling, optimum
from kvtier.planning.simulate import Hits, Overlay, simulate
from kvtier.planning.trace import Trace
from kvtier.policies.base import Policy
from kvtier.policies.door import load_policy, policy_types
from kvtier.policies.lfu import Lfu

OPTIMAL: Final = "optimal"

POLICIES: Final[dict[str, str]] = {
    "lru": "least recently used; the live default",
    "arc": "two lists, used once and again, that share the room adaptively; live",
    "s3fifo": "a small queue before the main one; live",
    "lfu": "least often used, with aging; live",
    "lfu-unaged": "least often used, counted for ever",
    "fifo": "first in, first out",
    "sieve": "a hand that spares what was used",
    "2q": "a queue of newcomers before a list by recency",
    "w-tinylfu": "newcomers enter only when used more than what they replace",
    "cost": "what is cheapest to compute again leaves first",
    OPTIMAL: "the most hits that are possible, knowing the future",
}
"""Every policy by name, and what it does; a plug-in is known by its name alone."""


class Result(msgspec.Struct, frozen=True):
    """Hits of one policy at one capacity, in percent of the tokens, or blocks, asked for."""

    policy: str
    capacity_blocks: int
    hit_rate_tokens: float
    hit_rate_blocks: float


class Replay(msgspec.Struct, frozen=True):
    """A trace's replay. notes: of the trace. denominator: what the rates are of.

    blocks: of all prompts; answer_blocks: that come in with answers, where they are known;
    unique_blocks: different ones of both.
    """

    trace: str
    block_tokens: int
    requests: int
    blocks: int
    answer_blocks: int
    unique_blocks: int
    skipped_lines: int
    notes: list[str]
    warmup: float
    denominator: str
    servable: bool
    ceiling: Result
    results: list[Result]


def chosen(names: str) -> list[str]:
    """Return the policies that ``all`` or ``lru,optimal`` means. Raises ConfigError.

    Plug-ins come after those that are built in.
    """
    known = dict.fromkeys((*POLICIES, *sorted(policy_types())))
    if names == "all":
        return list(known)
    found = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in found:
        if name not in known:
            raise unknown("policy", name, (*known, "all"))
    if not found:
        raise ConfigError("--policy names none; name one, such as lru, or all")
    return found


def replay(
    trace: Trace,
    policies: Sequence[str],
    capacities: Sequence[int],
    *,
    warmup: float,
    servable: bool = True,
    overlay: Overlay | None = None,
    tell: Callable[[str, int, int], None] | None = None,
) -> Replay:
    """Replay a trace through each policy at each capacity, in blocks.

    warmup: fraction of the requests that only fill the cache. servable: evict no block that
    another hangs under. overlay: above every policy but the optimum.
    tell: called with what is done, and how many of how many steps are behind.
    """
    steps = [(policy, capacity) for policy in policies for capacity in capacities]
    results = []
    for number, (policy, capacity) in enumerate(steps):
        if tell is not None:
            tell(f"{trace.name}: {policy}, {capacity} blocks", number, len(steps))
        if policy == OPTIMAL:
            hits = optimum(trace, capacity, warmup=warmup)
        else:
            make = make_policy(policy, trace)
            hits = simulate(
                trace,
                make,
                capacity,
                warmup=warmup,
                servable=servable,
                overlay=overlay or Overlay(),
            )
        results.append(_result(policy, capacity, hits))
    most = ceiling(trace, warmup=warmup)
    counted = f"the last {100 * (1 - warmup):g}%" if warmup else "all"
    return Replay(
        trace=trace.name,
        block_tokens=trace.block_tokens,
        requests=len(trace),
        blocks=trace.uses,
        answer_blocks=trace.entries - trace.uses,
        unique_blocks=trace.unique,
        skipped_lines=trace.skipped,
        notes=trace.notes,
        warmup=warmup,
        denominator=f"prompt tokens, or blocks, of {counted} of the requests",
        servable=servable,
        ceiling=_result("ceiling", trace.unique, most),
        results=results,
    )


def overlay_of(
    trace: Trace,
    ranges: Sequence[tuple[int, int | None, int]],
    ttl: float | None,
) -> Overlay:
    """Return what lies above the policies of a trace's replay.

    ranges: tokens [start, stop) of every prompt, and the priority of the blocks that they overlap;
    where several do, the highest. ttl: in seconds.
    """
    size, levels = trace.block_tokens, []
    for depth in trace.depths() if ranges else ():
        first, stop = depth * size, (depth + 1) * size
        found = [level for a, b, level in ranges if a < stop and (b is None or first < b)]
        levels.append(max(found, default=0))
    return Overlay(levels, None if ttl is None else ttl / trace.seconds_per_unit)


def _result(policy: str, capacity: int, hits: Hits) -> Result:
    return Result(policy, capacity, round(hits.rate_tokens, 3), round(hits.rate_blocks, 3))


def make_policy(name: str, trace: Trace) -> Callable[[], Policy]:
    """Return what makes an empty policy: of the live ones, what a cache would use."""
    if name == "cost":
        depths = trace.depths()
        return partial(CostAware, lambda block: 1.0 + depths[block] / 64)
    makers: dict[str, Callable[[], Policy]] = {
        "lfu-unaged": partial(Lfu, aging=False),
        "fifo": Fifo,
        "sieve": Sieve,
        "2q": TwoQueues,
        "w-tinylfu": TinyLfu,
    }
    if name in makers:
        return makers[name]
    load_policy(name)  # its faults are named now

    def fresh() -> Policy:  # no two together: a block may be in several tiers
        return load_policy(name)()

    return fresh
