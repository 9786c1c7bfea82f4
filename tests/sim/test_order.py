"""The order in which a simulated loop runs what is ready: by seeded priorities."""

from __future__ import annotations

import asyncio
import itertools

from kvtier.testing.simconditions import Conditions
from kvtier.testing.simloop import simulate

CALM = {"stall_rate": 0.0, "slow_rate": 0.0}


def changes(seed: int, order: str) -> int:
    """Return how often three tasks that never wait took turns."""
    seen = []

    async def work(number):
        for _ in range(20):
            seen.append(number)
            await asyncio.sleep(0)

    async def main(loop):
        await asyncio.gather(*(work(number) for number in range(3)))

    simulate(main, seed, Conditions(order=order, **CALM))
    return sum(one != after for one, after in itertools.pairwise(seen))


def test_by_priority_a_task_runs_until_it_waits_or_is_put_last():
    turns = [changes(seed, "pct") for seed in range(50)]
    assert min(turns) == 2
    assert 2 < sum(turns) / 50 < 8
    assert sum(changes(seed, "random") for seed in range(50)) / 50 > 30
    assert changes(0, "fifo") == 59


def test_priorities_are_part_of_the_seed():
    assert changes(7, "pct") == changes(7, "pct")
    assert len({changes(seed, "pct") for seed in range(20)}) > 3
