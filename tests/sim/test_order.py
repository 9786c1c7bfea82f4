"""What finds more than a fair draw: seeded priorities, and cancellations at every step."""

from __future__ import annotations

import asyncio
import itertools

from kvtier.testing.simconditions import PHASES, Conditions
from kvtier.testing.simdevice import SimDevice
from kvtier.testing.simloop import simulate
from kvtier.testing.simschedule import Schedule, live
from kvtier.testing.simsweep import swept

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


# --------------------------------------------------------------------------------- aimed cancels


SEED = 7


def test_a_sweep_cancels_each_request_of_a_client_at_each_of_its_steps_once():
    aims = [schedule.cancel for schedule in swept(Schedule(SEED, ops=40))]
    assert len({task.partition(".")[0] for task, _, _ in aims}) == 1
    last: dict[str, int] = {}
    for task, step, _ in aims:
        last[task] = max(step, last.get(task, 0))
    assert last
    steps = [(task, step) for task, count in last.items() for step in range(1, count + 1)]
    assert aims == [(task, step, phase) for task, step in steps for phase in PHASES]


def test_what_a_sweep_cancels_ends_well():
    for schedule in swept(Schedule(SEED, ops=40)):
        outcome = live(schedule)
        assert not outcome.kind, (schedule.command(), outcome.message)
        assert outcome.events["request_cancelled"] <= 1


def test_a_copy_that_ends_with_its_request_is_found_by_a_sweep(monkeypatch):
    save = SimDevice.save

    def bound(self, rng, plan, prefix, *, good):
        copy = save(self, rng, plan, prefix, good=good)
        asyncio.current_task().add_done_callback(lambda task: task.cancelled() and copy.cancel())
        return copy

    monkeypatch.setattr(SimDevice, "save", bound)
    calm = [Schedule(seed, ops=40, without=("cancels",)) for seed in range(SEED, SEED + 20)]
    assert not any(live(one).kind for one in calm[:5])
    failed = next(one for schedule in calm for one in swept(schedule) if live(one).kind)
    assert f"--cancel {':'.join(map(str, failed.cancel))}" in failed.command()
