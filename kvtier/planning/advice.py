"""Advice: the tiers to buy for a trace, and what they would bring.

A disk of the size from which on doubling it stops paying, and above it DRAM of an eighth of that,
or of the longest prompt with its answer, since all of it comes up into DRAM. Speeds are those of
one NVMe drive and of one PCIe 4.0 x16 link, as round numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvtier.planning.curve import Curve
from kvtier.planning.prices import Prices
from kvtier.planning.stack import Level, Speeds, Stack, simulate_stack
from kvtier.planning.trace import Trace
from kvtier.policies.lru import Lru

_DRAM_SHARE: Final = 8
_DRAM_BYTES_PER_S: Final = 25e9
_DISK_BYTES_PER_S: Final = 5e9
_DISK_SECONDS: Final = 1e-4


def advised(
    trace: Trace,
    curve: Curve,
    bytes_per_token: int,
    *,
    prefill: float,
    prices: Prices,
    at_times: bool = False,
    tell: Callable[[str, int, int], None] | None = None,
) -> Stack:
    """Replay a trace through the tiers that are advised.

    prefill: tokens that the engine computes in a second. at_times: requests wait for each other.
    """
    longest = max(len(blocks) for blocks, _, _ in trace.served()) * trace.block_tokens
    dram = max(curve.knee // _DRAM_SHARE, max(longest, trace.block_tokens) * bytes_per_token)
    levels = [
        Level("dram", dram, _DRAM_BYTES_PER_S),
        Level("lmdb", max(curve.knee, dram), _DISK_BYTES_PER_S, _DISK_SECONDS),
    ]
    return simulate_stack(
        trace,
        levels,
        ("lru", Lru),
        bytes_per_token=bytes_per_token,
        speeds=Speeds(1 / prefill),
        prices=prices,
        warmup=curve.warmup,
        seconds_per_unit=trace.seconds_per_unit,
        at_times=at_times,
        tell=tell,
    )
