"""The simulated loop itself: what it runs, what it finds, and that a seed is a schedule."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from kvtier.errors import MisuseError
from kvtier.seams import CancelledError, IoPool
from kvtier.testing.simconditions import ORDERS, Conditions
from kvtier.testing.simflow import SimFlow
from kvtier.testing.simloop import SimLoop, simulate
from kvtier.testing.simtask import Deadlock, Leak, Livelock

CALM = Conditions(stall_rate=0.0, slow_rate=0.0)


def outcome(main, seed=0, conditions=CALM):
    """Run ``main(loop)`` and return what it returned."""
    found = []

    async def outer(loop):
        found.append(await main(loop))

    simulate(outer, seed, conditions)
    return found[0]


# ------------------------------------------------------------------------- asyncio runs unchanged


async def busy(loop):
    queue, order = asyncio.Queue(2), []

    async def produce():
        for number in range(5):
            await queue.put(number)
            await asyncio.sleep(0.01)

    async def consume():
        while True:
            try:
                async with asyncio.timeout(0.5):
                    order.append(await queue.get())
            except TimeoutError:
                return

    async with asyncio.TaskGroup() as group:
        group.create_task(produce())
        group.create_task(consume())
        group.create_task(consume())
    assert await asyncio.gather(*(asyncio.to_thread(pow, 2, n) for n in range(4))) == [1, 2, 4, 8]
    assert await asyncio.shield(asyncio.sleep(0.1, "shielded")) == "shielded"
    return order


@pytest.mark.parametrize("order", ORDERS)
def test_queues_groups_timeouts_and_threads_run_as_they_do_elsewhere(order):
    for seed in range(20):
        assert sorted(outcome(busy, seed, Conditions(order=order))) == [0, 1, 2, 3, 4]


def test_time_is_virtual():
    async def main(loop):
        before = loop.time()
        await asyncio.sleep(3000)
        return loop.time() - before

    assert 3000 <= outcome(main) < 3000.1


def test_a_context_variable_stays_with_its_task():
    variable = contextvars.ContextVar("variable", default=0)

    async def main(loop):
        async def child(number):
            variable.set(number)
            await asyncio.sleep(0.001)
            return variable.get()

        return await asyncio.gather(*(child(number) for number in range(5)))

    assert outcome(main) == [0, 1, 2, 3, 4]


# ----------------------------------------------------------------------------- a seed is a schedule


def test_the_same_seed_takes_the_same_course():
    first, again = (simulate(busy, 7, keep_trace=True) for _ in range(2))
    assert first.trace == again.trace
    assert first.digest == again.digest


def test_other_seeds_take_other_courses():
    assert len({simulate(busy, seed).digest for seed in range(50)}) == 50


def test_ready_callbacks_run_in_any_order_unless_told_otherwise():
    async def main(loop):
        seen = []
        for number in range(4):
            loop.call_soon(seen.append, number)
        await asyncio.sleep(0.01)
        return tuple(seen)

    assert len({outcome(main, seed) for seed in range(200)}) == 24
    fifo = Conditions(order="fifo", stall_rate=0.0)
    assert {outcome(main, seed, fifo) for seed in range(20)} == {(0, 1, 2, 3)}


def test_a_set_of_tasks_has_the_same_order_every_time():
    async def main(loop):
        waiting = [loop.create_task(asyncio.sleep(0.1, number)) for number in range(8)]
        done, _ = await asyncio.wait(waiting)
        loop.note("order", repr([task.result() for task in done]))

    assert len({simulate(main, 3).digest for _ in range(5)}) == 1


def test_what_a_program_notes_enters_the_digest():
    async def main(loop, what):
        loop.note("state", what)

    one, other = (simulate(lambda loop, w=w: main(loop, w), 0).digest for w in ("a", "b"))
    assert one != other


# --------------------------------------------------------------------------------- blocking calls


def test_a_call_that_has_started_keeps_its_effect_when_its_await_is_cancelled():
    async def main(loop):
        effects = []
        call = loop.run_in_executor(None, effects.append, "written")
        await asyncio.sleep(2e-3)  # it is queued for a third of its 5 ms, so it has started
        call.cancel()
        before = list(effects)
        await asyncio.sleep(1)
        return before, effects

    steady = Conditions(stall_rate=0.0, slow_rate=0.0, io_seconds=(5e-3, 5.1e-3))
    assert outcome(main, 0, steady) == ([], ["written"])


def test_a_call_that_is_cancelled_in_the_queue_never_happens():
    async def main(loop):
        effects = []
        loop.run_in_executor(None, effects.append, "written").cancel()
        await asyncio.sleep(1)
        return effects

    assert outcome(main) == []


def test_what_a_call_raises_is_raised_where_it_is_awaited():
    async def main(loop):
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 / 0)

    outcome(main)


# -------------------------------------------------------------------------------- what it finds


def test_a_deadlock_says_where_each_task_waits():
    async def main(loop):
        event = asyncio.Event()

        async def inner():
            await event.wait()

        async def outer():
            await inner()

        await loop.create_task(outer(), name="stuck")

    with pytest.raises(Deadlock, match=r"stuck: .*outer:\d+ > .*inner:\d+ > Event.wait:\d+ on"):
        simulate(main, 0)


def test_daemons_that_tick_do_not_hide_a_deadlock():
    async def reap():
        for _ in range(10_000):
            await asyncio.sleep(1)

    async def main(loop):
        loop.create_task(reap(), name="x.reap")
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="only daemons ran"):
        simulate(main, 0)


def test_a_loop_that_never_ends_is_a_livelock():
    async def main(loop):
        for _ in range(10_000):
            await asyncio.sleep(0)

    with pytest.raises(Livelock):
        simulate(main, 0, Conditions(max_steps=1000))


def test_a_task_that_is_left_behind_is_a_leak():
    async def main(loop):
        loop.create_task(asyncio.sleep(5), name="forgotten")
        await asyncio.sleep(0.1)

    with pytest.raises(Leak, match="forgotten"):
        simulate(main, 0)


def test_an_error_that_nobody_looks_at_is_a_leak():
    async def fail():
        raise KeyError(1)

    async def main(loop):
        loop.create_task(fail(), name="failing")
        await asyncio.sleep(0.1)

    with pytest.raises(Leak, match="failing ended by KeyError"):
        simulate(main, 0)


def test_a_coroutine_that_is_never_awaited_is_a_leak():
    async def main(loop):
        asyncio.sleep(1)

    with pytest.raises(Leak, match="never awaited"):
        simulate(main, 0)


def test_a_failing_check_ends_the_run_and_names_the_seed():
    async def main(loop):
        loop.on_step = lambda: 1 // (loop.steps < 5)
        await asyncio.sleep(1)
        for _ in range(10):
            await asyncio.sleep(0.1)

    with pytest.raises(ZeroDivisionError) as caught:
        simulate(main, 12)
    assert caught.value.__notes__ == [caught.value.__notes__[0]]
    assert caught.value.__notes__[0].startswith("seed 12, step 5")


# -------------------------------------------------------------------------------- cancellation


async def requests(loop):
    async def work(seen):
        for number in range(10):
            await asyncio.sleep(0.001)
            seen.append(number)

    seen = [[] for _ in range(5)]
    tasks = [loop.create_task(work(one), name=f"request-{n}") for n, one in enumerate(seen)]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [len(one) for one in seen]


def test_chosen_tasks_are_cancelled_at_an_await():
    assert outcome(requests) == [10] * 5
    lengths = [n for s in range(20) for n in outcome(requests, s, Conditions(cancel_rate=0.05))]
    assert set(lengths) == set(range(11))


@pytest.mark.parametrize(("phase", "length"), [("before", 2), ("after", 3)])
def test_a_cancellation_can_be_aimed(phase, length):
    aimed = Conditions(cancel_at=("request-2", 4, phase))
    assert outcome(requests, 0, aimed) == [10, 10, length, 10, 10]


# ------------------------------------------------------------------------------------- the flow


def test_a_flow_hands_back_a_future_that_can_be_awaited_and_blocked_on():
    async def work():
        await asyncio.sleep(1)
        return 5

    async def main(loop):
        flow = SimFlow(loop)
        awaited = await asyncio.wrap_future(flow.spawn(work()))
        blocked = flow.spawn(work()).result(timeout=2)
        with pytest.raises(TimeoutError):
            flow.spawn(work()).result(timeout=0.5)
        await asyncio.sleep(1)
        flow.close()
        return awaited, blocked

    assert outcome(main) == (5, 5)


def test_everything_else_goes_on_while_a_task_blocks():
    async def main(loop):
        flow, ticks = SimFlow(loop), []

        async def tick():
            for _ in range(5):
                ticks.append(loop.time())
                await asyncio.sleep(0.1)

        ticking = loop.create_task(tick())
        flow.spawn(asyncio.sleep(1)).result()
        assert asyncio.current_task().get_name() == "main"
        await ticking
        flow.close()
        return len(ticks)

    assert outcome(main) == 5


def test_blocking_calls_pass_through_the_simulated_executor():
    async def main(loop):
        flow, pool = SimFlow(loop), IoPool("unused", 1)
        before = loop.time()
        result = await flow.io(pool, pow, 2, 10)
        flow.close()
        return result, loop.time() > before

    assert outcome(main) == (1024, True)


def test_closing_a_flow_cancels_its_tasks_and_theirs_alone():
    async def main(loop):
        flow, ended = SimFlow(loop), []

        async def inner():
            try:
                await asyncio.sleep(1e6)
            finally:
                ended.append("inner")

        async def outer():
            child = asyncio.create_task(inner())
            try:
                await asyncio.sleep(1e6)
            finally:
                ended.append("outer")
                await asyncio.wait((child,))

        other = loop.create_task(asyncio.sleep(1, "other"))
        running = flow.spawn(outer())
        await asyncio.sleep(0.1)
        flow.close()
        with pytest.raises(CancelledError):
            running.result(1)
        refused = asyncio.sleep(1)
        with pytest.raises(MisuseError):
            flow.spawn(refused)
        return sorted(ended), await other

    assert outcome(main) == (["inner", "outer"], "other")


def test_what_a_spawned_coroutine_raises_fails_the_run():
    async def fail():
        raise KeyError(1)

    async def main(loop):
        flow = SimFlow(loop)
        flow.spawn(fail())
        await asyncio.sleep(0.1)
        flow.close()

    with pytest.raises(Leak, match="fail ended by KeyError"):
        simulate(main, 0)


def test_cancelling_the_future_of_a_spawned_coroutine_cancels_it():
    async def main(loop):
        flow = SimFlow(loop)
        running = flow.spawn(asyncio.sleep(1e6))
        await asyncio.sleep(0.1)
        assert running.cancel()
        await asyncio.sleep(0.1)
        flow.close()
        return isinstance(loop, SimLoop)

    assert outcome(main)
