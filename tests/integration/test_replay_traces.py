"""Recorded traces give the hit rates that independent simulators gave for them."""

from __future__ import annotations

import pytest

from kvtier.planning.replay import replay
from kvtier.planning.trace import read_trace

CAPACITIES = (1000, 10_000, 30_000)
# Token-weighted over the last half of the requests: kvcache.ai's kvcache-simulator.
LAST_HALF = {
    "mooncake_conversation_trace": {"lru": (4.7, 22.0, 34.4), "optimal": (19.7, 39.8, 39.8)},
    "mooncake_synthetic_trace": {"lru": (13.0, 60.4, 83.8), "optimal": (36.4, 82.6, 86.3)},
}
# Blocks of all requests of the synthetic trace, from a cold start, where any block may leave.
COLD = {
    "lru": (8.4, 42.4, 62.4),
    "fifo": (8.2, 40.2, 59.4),
    "lfu-unaged": (4.2, 36.1, 62.6),
    "sieve": (4.2, 36.1, 62.6),
    "s3fifo": (8.7, 41.6, 61.2),
    "2q": (8.6, 41.9, 59.4),
    "arc": (9.6, 43.6, 62.6),
    "w-tinylfu": (7.3, 38.1, 60.3),
    "optimal": (27.7, 61.8, 64.0),
}


@pytest.mark.parametrize("name", LAST_HALF)
def test_rates_of_the_last_half(traces, name):
    trace = read_trace(traces / f"{name}.jsonl.zst", 512)
    found = replay(trace, ["lru", "optimal"], CAPACITIES, warmup=0.5)
    for policy, expected in LAST_HALF[name].items():
        rates = [one.hit_rate_tokens for one in found.results if one.policy == policy]
        assert rates == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("policy", COLD)
def test_rates_from_a_cold_start(traces, policy):
    trace = read_trace(traces / "mooncake_synthetic_trace.jsonl.zst", 512)
    found = replay(trace, [policy], CAPACITIES, warmup=0.0, servable=False)
    rates = [one.hit_rate_blocks for one in found.results]
    # Room is made before it is known what for, and W-TinyLFU would compare the two.
    near = 0.15 if policy == "w-tinylfu" else 0.1
    assert rates == pytest.approx(COLD[policy], abs=near)
