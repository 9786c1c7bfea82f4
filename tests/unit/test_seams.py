"""Threads and loops: order, bounds and ends; nothing hung blocks an exit; what an import costs."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from kvtier.errors import MisuseError
from kvtier.seams import IoPool, ThreadFlow

SECONDS = 10.0


@pytest.fixture
def pool() -> Iterator[IoPool]:
    found = IoPool("test", 2)
    yield found
    found.close()


@pytest.fixture
def flow() -> Iterator[ThreadFlow]:
    found = ThreadFlow()
    yield found
    found.close()


def ours() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("kvtier"))


# ------------------------------------------------------------------------------------------ IoPool


def test_no_thread_starts_before_it_is_needed(pool: IoPool):
    assert ours() == []
    assert pool.submit(int, "7").result(SECONDS) == 7
    assert ours() == ["kvtier-test-0"]


def test_calls_of_one_thread_keep_their_order():
    pool, seen = IoPool("one", 1), []
    for number in range(100):
        pool.submit(seen.append, number)
    pool.close()
    assert seen == list(range(100)), "and close lets queued calls finish"


def test_no_more_calls_run_than_there_are_threads(pool: IoPool):
    gate, arrived = threading.Event(), threading.Semaphore(0)

    def call(number: int) -> int:
        arrived.release()
        gate.wait(SECONDS)
        return number

    running = [pool.submit(call, number) for number in range(5)]
    assert arrived.acquire(timeout=SECONDS)
    assert arrived.acquire(timeout=SECONDS)
    assert len(ours()) == 2
    assert not arrived.acquire(blocking=False)
    assert [each.running() for each in running] == [True, True, False, False, False]
    assert running[4].cancel(), "what has not begun can be taken back"
    gate.set()
    assert [each.result(SECONDS) for each in running[:4]] == [0, 1, 2, 3]


def test_an_error_goes_to_whoever_waits_and_harms_nobody_else(pool: IoPool):
    for error in (ValueError("x"), SystemExit(3), KeyboardInterrupt()):

        def call(error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)):
            pool.submit(call).result(SECONDS)
    assert pool.submit(int).result(SECONDS) == 0
    assert len(ours()) <= 2


def test_map_is_in_order_and_raises_the_first_error_after_all_have_ended(pool: IoPool):
    assert pool.map(lambda n: n * n, range(10)) == [n * n for n in range(10)]
    ended = []

    def call(number: int) -> None:
        ended.append(number)
        if number in {3, 5}:
            raise ValueError(number)

    with pytest.raises(ValueError, match="3"):
        pool.map(call, range(8))
    assert sorted(ended) == list(range(8))
    assert pool.map(int, []) == []


def test_a_closed_pool_takes_no_calls_and_has_no_threads():
    pool = IoPool("test", 2)
    pool.submit(int).result(SECONDS)
    pool.close()
    pool.close()
    assert ours() == []
    with pytest.raises(MisuseError, match="kvtier-test is closed"):
        pool.submit(int)


def test_closing_waits_for_all_hung_calls_together(caplog):
    pool, gate = IoPool("hung", 4), threading.Event()
    running = [pool.submit(gate.wait, SECONDS) for _ in range(4)]
    pool.close(0.05)
    assert [message for message in caplog.messages if "left behind" in message]
    assert len(caplog.messages) == 4
    gate.set()
    assert all(each.result(SECONDS) for each in running)


def test_a_finished_call_holds_no_memory(pool: IoPool):
    class Buffer:
        pass

    buffer = Buffer()
    gone = weakref.ref(buffer)
    pool.submit(id, buffer).result(SECONDS)
    pool.map(int, ["1", "2", "3"])
    del buffer
    gc.collect()
    assert gone() is None


def test_with_no_more_threads_to_have_those_that_run_must_do(pool: IoPool, monkeypatch):
    assert pool.submit(int).result(SECONDS) == 0

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert pool.submit(int, "5").result(SECONDS) == 5
    empty = IoPool("empty", 1)
    with pytest.raises(RuntimeError, match="new thread"):
        empty.submit(int)
    empty.close()


HANG = """
import threading
from kvtier.seams import IoPool, ThreadFlow
pool, flow, arrived = IoPool("hung", 1), ThreadFlow(), threading.Event()
def call():
    arrived.set()
    threading.Event().wait()
{daemon}
async def work():
    await flow.io(pool, call)
flow.spawn(work())
arrived.wait()
print("done", flush=True)
"""


def test_a_hung_call_does_not_block_the_exit_of_the_process():
    command = [sys.executable, "-c", HANG.format(daemon="")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout == "done\n"
    assert done.stderr == ""


def test_on_threads_that_are_no_daemons_it_would():
    patch = (
        "real = threading.Thread.__init__\n"
        "threading.Thread.__init__ = lambda self, **k: real(self, **{**k, 'daemon': False})\n"
    )
    command = [sys.executable, "-c", HANG.format(daemon=patch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"done\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.kill()


# -------------------------------------------------------------------------------------- ThreadFlow


def test_a_coroutine_runs_on_the_loop_and_reports_its_end(flow: ThreadFlow):
    async def work(number: int) -> tuple[int, str]:
        await asyncio.sleep(0)
        return number + 1, threading.current_thread().name

    assert ours() == []
    assert flow.spawn(work(1)).result(SECONDS) == (2, "kvtier-flow")
    assert ours() == ["kvtier-flow"]


def test_an_error_in_a_coroutine_is_raised_where_it_is_waited_for(flow: ThreadFlow):
    async def work() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        flow.spawn(work()).result(SECONDS)
    assert flow.spawn(asyncio.sleep(0, "alive")).result(SECONDS) == "alive"


def test_a_blocking_call_does_not_block_the_loop(flow: ThreadFlow, pool: IoPool):
    gate = threading.Event()
    blocked = flow.spawn(flow.io(pool, gate.wait, SECONDS))
    assert flow.spawn(asyncio.sleep(0, "free")).result(SECONDS) == "free"
    assert not blocked.done()
    gate.set()
    assert blocked.result(SECONDS)


def test_cancelling_the_await_does_not_stop_the_call(flow: ThreadFlow, pool: IoPool):
    gate, arrived, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        arrived.set()
        gate.wait(SECONDS)
        ended.set()

    waiting = flow.spawn(flow.io(pool, call))
    assert arrived.wait(SECONDS)
    assert waiting.cancel()
    flow.spawn(asyncio.sleep(0)).result(SECONDS)
    assert not ended.is_set()
    gate.set()
    assert ended.wait(SECONDS)


def test_cancelling_from_outside_reaches_the_coroutine(flow: ThreadFlow):
    started, cancelled = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    running = flow.spawn(work())
    assert started.wait(SECONDS)
    assert running.cancel()
    assert cancelled.wait(SECONDS)


def test_close_cancels_what_runs_and_waits_for_it():
    flow, started, seen = ThreadFlow(), threading.Event(), []

    async def work(name: str) -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            seen.append(name)

    running = [flow.spawn(work(name)) for name in "ab"]
    assert started.wait(SECONDS)
    flow.spawn(asyncio.sleep(0)).result(SECONDS)
    flow.close()
    flow.close()
    assert sorted(seen) == ["a", "b"]
    assert all(each.cancelled() for each in running)
    assert ours() == []
    late = asyncio.sleep(0)
    with pytest.raises(MisuseError, match="closed"):
        flow.spawn(late)  # and it is closed, or Python would warn that it was never awaited


def test_nothing_is_started_behind_the_back_of_close(flow: ThreadFlow, monkeypatch):
    """Scheduled after the loop's last turn, a coroutine would never end, nor its future."""
    real, locked = asyncio.run_coroutine_threadsafe, []

    def start(work, loop):
        locked.append(flow._lock.locked())
        return real(work, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", start)
    flow.spawn(asyncio.sleep(0)).result(SECONDS)
    assert locked == [True]


def test_a_loop_that_gets_no_thread_is_tried_anew(flow: ThreadFlow, monkeypatch):
    """Or what is started afterwards would wait for a loop that never runs."""
    with monkeypatch.context() as full:

        def refuse(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            flow.spawn(asyncio.sleep(0))
    assert flow.spawn(asyncio.sleep(0, "ran")).result(SECONDS) == "ran"


def test_a_flow_that_never_ran_closes():
    flow = ThreadFlow()
    flow.close()
    with pytest.raises(MisuseError):
        flow.spawn(asyncio.sleep(0))


def test_closing_is_bounded_when_a_coroutine_blocks_the_loop(caplog):
    flow, gate, started = ThreadFlow(), threading.Event(), threading.Event()

    async def rude() -> None:
        started.set()
        gate.wait(SECONDS)

    running = flow.spawn(rude())
    assert started.wait(SECONDS)
    flow.close(0.05)
    assert "left behind" in caplog.text
    gate.set()
    running.result(SECONDS)


# -------------------------------------------------------------------------------------- the import

HEAVY = ("torch", "boto3", "botocore", "lmdb", "zstandard", "multiprocessing")
LOOK = """
import sys, threading
import kvtier
{more}
print(sorted(name for name in {heavy} if name in sys.modules), threading.active_count())
"""


def imported(more: str = "") -> str:
    command = [sys.executable, "-c", LOOK.format(more=more, heavy=HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def test_importing_kvtier_imports_nothing_heavy_and_starts_no_thread():
    assert imported() == "[] 1"


def test_an_import_that_did_would_show():
    more = "import lmdb; from kvtier.seams import IoPool; IoPool('x', 1).submit(int)"
    assert imported(more) == "['lmdb'] 2"
