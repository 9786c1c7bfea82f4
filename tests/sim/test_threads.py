"""Engine threads in lock-step: the core is safe among them, and would not be without its lock."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvtier.testing.simconditions import Conditions
from kvtier.testing.simloop import simulate
from kvtier.testing.simscenario import Scenario
from kvtier.testing.simtask import Deadlock, SimError
from kvtier.testing.simthreads import Baton, SimLock, ThreadWorld
from kvtier.testing.simworld import run_world

SEEDS = 40
GROUP = 10
CALM = Conditions(stall_rate=0.0, slow_rate=0.0)


class NoLock:
    """Keeps nobody out, but knows whether anybody is inside."""

    def __init__(self) -> None:
        self.inside = 0

    def locked(self) -> bool:
        return self.inside > 0

    def __enter__(self) -> None:
        self.inside += 1

    def __exit__(self, *error: object) -> None:
        self.inside -= 1


class Unlocked(ThreadWorld):
    """A world whose Catalog has no lock. Below it a list that is torn may run in a circle."""

    traced = ("/kvtier/catalog/",)
    trace_rate = 0.2

    def open_cache(self, *args):
        cache = super().open_cache(*args)
        cache._desk.catalog._lock = NoLock()
        return cache


def world(seed: int) -> Scenario:
    """Return the world of a seed, as far as threads can live in it: nobody cancels a thread."""
    return replace(Scenario.draw(seed), crashes=(), hangs=False, cancel_rate=0.0)


# ------------------------------------------------------------------------------------ the core


@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_threads_share_a_cache(first):
    for seed in range(first, first + GROUP):
        run_world(seed, world(seed), kind=ThreadWorld)


def test_the_seed_decides_which_thread_runs():
    first, again, other = (run_world(s, world(s), kind=ThreadWorld).digest for s in (1, 1, 2))
    assert first == again != other


def test_a_catalog_without_its_lock_is_found():
    found = []
    for seed in range(20):
        try:
            run_world(seed, world(seed), kind=Unlocked)
        except Exception as error:  # noqa: BLE001  (how it shows differs with the seed)
            found.append(error)
    assert len(found) >= 3


# --------------------------------------------------------------------------------- the machinery


def shared(seed: int, work, threads: int = 2, trace_rate: float = 0.0):
    """Run ``work(baton, loop)`` on some threads."""

    async def main(loop):
        baton = Baton(loop, (__file__,), trace_rate)
        try:
            running = [baton.start(work(baton, loop), f"thread-{n}") for n in range(threads)]
            await asyncio.gather(*running)
        finally:
            baton.close()

    simulate(main, seed, CALM)


def test_a_thread_waits_where_its_coroutine_awaits():
    times = []

    async def work(baton, loop):
        await asyncio.sleep(5)
        times.append(loop.time())
        await asyncio.sleep(0)

    shared(0, work)
    assert [round(time) for time in times] == [5, 5]


def counted(seed: int, lock, trace_rate: float) -> int:
    """Return what two threads make of a counter when both add one five times."""
    count = [0]

    async def work(baton, loop):
        with lock(baton):
            pass
        for _ in range(5):
            with lock(baton):
                before = count[0]
                after = before + 1
                count[0] = after

    shared(seed, work, trace_rate=trace_rate)
    return count[0]


def test_lines_are_where_another_thread_comes_between():
    locks = {}

    def one_lock(baton):
        return locks.setdefault(baton, SimLock(baton))

    assert {counted(seed, lambda _: NoLock(), 0.0) for seed in range(10)} == {10}
    assert min(counted(seed, lambda _: NoLock(), 0.3) for seed in range(10)) < 10
    assert {counted(seed, one_lock, 0.3) for seed in range(10)} == {10}


def test_locks_taken_in_two_orders_deadlock():
    locks = {}

    async def work(baton, loop):
        pair = locks.setdefault(baton, [SimLock(baton), SimLock(baton)])
        mine = pair if baton.current().name == "thread-0" else pair[::-1]
        with mine[0], mine[1]:
            pass

    def ends(seed: int) -> bool:
        try:
            shared(seed, work)
        except Deadlock:
            return False
        return True

    assert {ends(seed) for seed in range(20)} == {False, True}


def test_the_loop_waits_for_a_thread_that_has_the_lock():
    def order(seed: int) -> str:
        seen = []

        async def main(loop):
            baton = Baton(loop, (), 0.0)
            lock = SimLock(baton)

            async def work():
                with lock:
                    seen.append("t")
                    baton.hop()
                    seen.append("t")

            running = baton.start(work(), "thread")
            for _ in range(3):
                await asyncio.sleep(0)
                with lock:
                    seen.append("l")
            await running
            baton.close()

        simulate(main, seed, CALM)
        return "".join(seen)

    assert {order(seed) for seed in range(40)} == {"ttlll", "lttll", "llttl", "llltt"}


def test_a_lock_that_is_held_across_an_await_is_found():
    async def main(loop):
        lock = SimLock(Baton(loop, (), 0.0))

        async def hold():
            with lock:
                await asyncio.sleep(1)

        await asyncio.gather(hold(), hold())

    with pytest.raises(SimError, match="held across an await"):
        simulate(main, 0, CALM)


def test_what_a_thread_raises_is_raised_where_it_is_awaited():
    async def work(baton, loop):
        raise KeyError(1)

    with pytest.raises(KeyError):
        shared(0, work, threads=1)


def test_a_run_that_fails_leaves_no_thread_behind():
    """The leak check of every test sees to it."""

    async def work(baton, loop):
        with SimLock(baton):
            await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        shared(0, work)
