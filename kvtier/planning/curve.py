"""The curve: what hit rate a cache of each size has on a trace, and where more stops paying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from kvtier.planning.optimum import ceiling, optimum
from kvtier.planning.simulate import simulate
from kvtier.planning.trace import Trace
from kvtier.policies.lru import Lru

_LEAST_GAIN: Final = 1.0  # points of hit rate that doubling the size must bring
_POINTS: Final = 10


class Point(msgspec.Struct, frozen=True):
    """One size of cache: bytes, tokens, and its hit rates in percent of prompt tokens."""

    nbytes: int
    tokens: int
    hit_rate: float
    optimum: float


class Curve(msgspec.Struct, frozen=True):
    """Points by size, each twice the one before. knee: bytes beyond which doubling is not worth it.

    hbm: the hit rate of what fits into GPU memory alone. request_tokens: of a prompt and its
    answer, in the mean; at_a_time: how many of these fit into GPU memory. notes: of the trace.
    """

    trace: str
    requests: int
    skipped_lines: int
    notes: list[str]
    warmup: float
    hbm: Point
    points: list[Point]
    ceiling: float
    knee: int
    request_tokens: float
    at_a_time: int


def curve(
    trace: Trace,
    bytes_per_token: int,
    hbm_tokens: int,
    *,
    warmup: float = 0.5,
    tell: Callable[[str, int, int], None] | None = None,
) -> Curve:
    """Replay a trace at sizes from a five-hundredth of it to all of it, under LRU.

    hbm_tokens: what GPU memory has room for. All tiers together count as one: what leaves a
    faster one is in the slower, so the hit rate is that of the largest.
    """
    sizes = sorted({max(trace.unique >> shift, 1) for shift in range(_POINTS)})
    points = []
    for number, blocks in enumerate(sizes):
        if tell is not None:
            tell(f"{trace.name}: {blocks:,} blocks", number, len(sizes))
        points.append(_point(trace, blocks, bytes_per_token, warmup))
    tokens = sum(asked + trace.output(n) for n, (_, asked) in enumerate(trace.requests()))
    each = tokens / len(trace)
    hbm = max(hbm_tokens // trace.block_tokens, 1)
    return Curve(
        trace=trace.name,
        requests=len(trace),
        skipped_lines=trace.skipped,
        notes=trace.notes,
        warmup=warmup,
        hbm=_point(trace, min(hbm, trace.unique), bytes_per_token, warmup),
        points=points,
        ceiling=ceiling(trace, warmup=warmup).rate_tokens,
        knee=_knee(points),
        request_tokens=each,
        at_a_time=int(hbm_tokens / each) if each else 0,
    )


def _point(trace: Trace, blocks: int, bytes_per_token: int, warmup: float) -> Point:
    tokens = blocks * trace.block_tokens
    return Point(
        nbytes=tokens * bytes_per_token,
        tokens=tokens,
        hit_rate=simulate(trace, Lru, blocks, warmup=warmup).rate_tokens,
        optimum=optimum(trace, blocks, warmup=warmup).rate_tokens,
    )


def _knee(points: list[Point]) -> int:
    """Return the least size from which on no doubling gains a whole point."""
    for at in range(len(points) - 1, 0, -1):
        if points[at].hit_rate - points[at - 1].hit_rate >= _LEAST_GAIN:
            return points[at].nbytes
    return points[0].nbytes
