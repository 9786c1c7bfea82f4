"""What bounds a failing tier: the breaker, the count of hung calls, the time of a close."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from kvtier.errors import Unavailable
from kvtier.events import note
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.hands import Hands
from kvtier.testing.records import make_record
from kvtier.tiers import tier as module
from kvtier.tiers.ailments import IN_A_ROW
from kvtier.tiers.breaker import FAILURES, REST_SECONDS, Breaker
from kvtier.tiers.coding import is_failed
from kvtier.tiers.store import Status
from kvtier.tiers.tier import HUNG_SECONDS

SIZE = 5000
OK, ABSENT, FAILED = Status.OK, Status.ABSENT, Status.FAILED
VERBS = ("read", "write", "delete", "contains")


# ---------------------------------------------------------------------------- the breaker by itself


@pytest.fixture
def clock() -> Hands:
    return Hands(0.0)


@pytest.fixture
def breaker(clock: Hands) -> Breaker:
    return Breaker(clock)


def opened(breaker: Breaker) -> None:
    for _ in range(FAILURES):
        assert breaker.allow()
        breaker.report(ok=False)


def test_it_opens_at_the_fifth_failure_in_a_row(breaker: Breaker):
    assert FAILURES == 5
    for _ in range(FAILURES - 1):
        breaker.report(ok=False)
    assert breaker.closed
    breaker.report(ok=True)
    opened(breaker)
    assert not breaker.closed
    assert not breaker.allow()


def test_it_rests_then_lets_one_call_try(breaker: Breaker, clock: Hands):
    opened(breaker)
    clock.now += REST_SECONDS - 0.001
    assert not breaker.allow()
    clock.now += 0.001
    assert breaker.allow()
    assert not breaker.allow(), "half open means one"
    assert not breaker.closed


def test_the_one_decides(breaker: Breaker, clock: Hands):
    opened(breaker)
    for ok in (False, False, True):
        clock.now += REST_SECONDS
        assert breaker.allow()
        breaker.report(ok=ok)
        assert breaker.closed == ok
    assert all(breaker.allow() for _ in range(10))


def test_calls_that_end_late_keep_it_open_from_then(breaker: Breaker, clock: Hands):
    opened(breaker)
    clock.now += REST_SECONDS - 1
    breaker.report(ok=False)
    clock.now += REST_SECONDS - 1
    assert not breaker.allow()
    clock.now += 1
    assert breaker.allow()


def test_a_late_success_closes_it(breaker: Breaker):
    opened(breaker)
    breaker.report(ok=True)
    assert breaker.closed


def test_what_cannot_be_written_is_read_all_the_same(breaker: Breaker, clock: Hands):
    for _ in range(FAILURES):
        assert breaker.allow("write")
        breaker.report("write", ok=False)
    assert not breaker.closed
    assert not breaker.allow("write")
    assert breaker.reads
    assert not breaker.rests
    assert breaker.allow("look up")
    assert breaker.allow("read")
    breaker.report("look up", ok=False)  # it is no matter of writing alone
    assert breaker.rests
    assert not any(map(breaker.allow, ("read", "look up", "list", "write", "delete")))
    clock.now += REST_SECONDS
    assert not breaker.rests
    assert breaker.allow("read")
    assert not breaker.allow("look up"), "half open means one"
    breaker.report("read", ok=True)
    assert breaker.closed


def test_while_it_is_held_nothing_is_read(breaker: Breaker):
    breaker.held = True
    assert not breaker.reads
    assert breaker.rests
    assert not breaker.allow("read")


# ------------------------------------------------------------------------------------- over a tier


def test_the_breaker_opens_after_five_failed_calls_and_asks_one_after_its_rest(bench):
    bench.do("write")
    bench.fail(Unavailable("down"))
    for number in range(FAILURES):
        assert bench.tier.available
        assert bench.do("read") is FAILED
        assert bench.store.calls == 2 + number
    assert not bench.tier.available
    for verb in VERBS:
        assert bench.do(verb) is FAILED
    assert bench.store.calls == 1 + FAILURES, "an open breaker lets nothing through"
    bench.clock.now += REST_SECONDS
    assert bench.do("read") is FAILED
    assert bench.do("read") is FAILED
    assert bench.store.calls == 2 + FAILURES, "one call tried, and failed"
    bench.heal()
    bench.clock.now += REST_SECONDS
    assert bench.do("read") is OK
    assert bench.tier.available
    assert bench.count("tier_errors") == FAILURES + 1
    assert bench.count("fetched_bytes") == SIZE


@pytest.mark.parametrize("verb", ["write", "delete"])
def test_a_tier_that_cannot_be_written_is_read(bench, verb):
    """Rested as a whole, it would have no hit while prompts are saved, which is all the time."""
    assert bench.do("write") is OK

    def fault(asked: str) -> None:
        if asked in ("write_many", "delete_many"):
            raise Unavailable("read only")

    bench.store.fault = fault
    for _ in range(2 * FAILURES):
        assert bench.do(verb) is FAILED
    calls = bench.store.calls
    assert (bench.tier.available, bench.tier.readable, bench.tier.silent) == (False, True, False)
    assert f"{verb}: Unavailable: read only" in bench.tier.trouble
    assert (bench.do("contains"), bench.do("read")) == (OK, OK)
    assert bench.store.calls == calls + 2


def test_twin_of_all_calls_alike_it_would_not_be(bench, monkeypatch):
    monkeypatch.setattr("kvtier.tiers.breaker._READS", frozenset())
    monkeypatch.setattr(Breaker, "reads", Breaker.closed)
    bench.do("write")
    bench.fail(Unavailable("read only"))
    for _ in range(FAILURES):
        bench.do("write")
    bench.heal()
    assert bench.do("read") is FAILED


def test_without_it_a_dead_tier_would_be_asked_for_ever(bench, monkeypatch):
    monkeypatch.setattr(Breaker, "allow", lambda *_: True)
    bench.fail(Unavailable("down"))
    for _ in range(20):
        bench.do("read")
    assert bench.store.calls == 20


def test_a_batch_that_failed_in_part_is_no_failed_call(bench):
    records = [make_record(number, SIZE) for number in range(2)]
    bench.store.answer = lambda out: [FAILED, *out[1:]]
    for _ in range(2 * FAILURES):
        assert bench.flow.spawn(bench.tier.write(records)).result(10) == [FAILED, OK]
    assert bench.tier.available
    assert bench.count("tier_errors") == 2 * FAILURES


def hold(bench) -> tuple[threading.Event, threading.Semaphore]:
    """Make calls hang until the event is set; the semaphore counts those that arrived."""
    gate, arrived = threading.Event(), threading.Semaphore(0)

    def fault(verb: str) -> None:
        arrived.release()
        gate.wait(20)

    bench.store.fault = fault
    return gate, arrived


def broken(bench) -> None:
    """Open the breaker, then let its rest pass."""
    bench.fail(Unavailable("down"))
    for _ in range(FAILURES):
        bench.do("contains")
    bench.clock.now += REST_SECONDS


def cancel_the_probe(bench) -> None:
    broken(bench)
    gate, arrived = hold(bench)
    probe = bench.start("contains")
    assert arrived.acquire(timeout=10)
    probe.cancel()
    bench.settle()
    gate.set()
    bench.heal()
    bench.settle()


def test_a_cancelled_probe_still_decides(bench):
    cancel_the_probe(bench)
    deadline = time.monotonic() + 10
    while not bench.tier.available and time.monotonic() < deadline:
        bench.settle()
    assert bench.do("write") is OK


def test_lost_with_its_caller_it_would_leave_the_tier_dead(bench, monkeypatch):
    """The twin: cancelling the caller cancels the bookkeeping, too."""
    monkeypatch.setattr(module.asyncio, "shield", lambda task: task)
    cancel_the_probe(bench)
    bench.clock.now += 1000 * REST_SECONDS
    assert bench.do("write") is FAILED
    assert not bench.tier.available


# -------------------------------------------------------------------------------------- hung calls


def test_when_every_call_hangs_the_tier_is_left_alone_and_says_so(bench, caplog):
    gate, arrived = hold(bench)
    hung = [bench.start("contains") for _ in range(MemoryStore.THREADS)]
    for _ in hung:
        assert arrived.acquire(timeout=10)
    assert bench.tier.available, "slow is not hung"
    bench.clock.now += HUNG_SECONDS + 1
    assert not bench.tier.available
    for _ in range(3):
        assert bench.do("read") is FAILED
    assert bench.store.calls == len(hung), "no further call was made"
    assert bench.count("tier_errors") == 3
    assert caplog.messages == ["mem: every call hangs for more than 30 s"]
    gate.set()
    assert [call.result(10) for call in hung] == [[ABSENT]] * len(hung)
    bench.settle()
    assert bench.tier.available
    assert bench.do("write") is OK


def test_calls_that_wait_for_a_thread_do_not_count_as_hung(bench):
    """A slow tier with a long line of calls is busy: it answers, and must be asked further."""
    gates = [threading.Semaphore(0), threading.Semaphore(0)]
    arrived = threading.Semaphore(0)
    turns = iter([gates[0]] * MemoryStore.THREADS + [gates[1]] * MemoryStore.THREADS)

    def fault(verb: str) -> None:
        gate = next(turns)
        arrived.release()
        gate.acquire(timeout=20)

    bench.store.fault = fault
    calls = [bench.start("contains") for _ in range(2 * MemoryStore.THREADS)]
    for _ in range(MemoryStore.THREADS):
        arrived.acquire(timeout=10)
    bench.clock.now += HUNG_SECONDS + 1
    assert not bench.tier.available
    gates[0].release(MemoryStore.THREADS)
    for _ in range(MemoryStore.THREADS):
        arrived.acquire(timeout=10)
    bench.settle()
    assert bench.tier.available
    gates[1].release(MemoryStore.THREADS)
    assert [call.result(10) for call in calls] == [[ABSENT]] * len(calls)


def test_a_cancelled_caller_does_not_hide_a_hung_call(bench):
    gate, arrived = hold(bench)
    for _ in range(MemoryStore.THREADS):
        call = bench.start("contains")
        assert arrived.acquire(timeout=10)
        call.cancel()
    bench.settle()
    bench.clock.now += HUNG_SECONDS + 1
    assert bench.do("read") is FAILED
    assert bench.store.calls == MemoryStore.THREADS
    gate.set()


def test_uncounted_callers_would_queue_behind_hung_calls(bench, monkeypatch):
    """The twin: with no bound, the next caller waits as long as the medium likes."""
    monkeypatch.setattr(module, "HUNG_SECONDS", float("inf"))
    gate, arrived = hold(bench)
    for _ in range(MemoryStore.THREADS):
        bench.start("contains")
        assert arrived.acquire(timeout=10)
    bench.clock.now += HUNG_SECONDS + 1
    waiting = bench.start("contains")
    bench.settle()
    assert not waiting.done()
    gate.set()
    assert waiting.result(10) == [ABSENT]


# ------------------------------------------------------------------------------------------- close


@pytest.mark.parametrize("error", [Unavailable("x"), OSError(5, "EIO"), ValueError("lmdb")])
def test_close_survives_what_the_store_raises(new_bench, caplog, error):
    bench = new_bench()

    def close() -> None:
        raise error

    bench.store.close = close
    with caplog.at_level(logging.WARNING, "kvtier"):
        bench.tier.close()
    assert "close:" in caplog.text


def test_close_is_bounded_by_time_though_calls_and_store_hang(new_bench, monkeypatch, caplog):
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.05)
    bench = new_bench()
    gate, arrived = hold(bench)
    hung = [bench.start("contains") for _ in range(MemoryStore.THREADS)]
    for _ in hung:
        assert arrived.acquire(timeout=10)
    bench.store.close = gate.wait
    began = time.monotonic()
    bench.tier.close()
    assert time.monotonic() - began < 5
    assert "left behind" in caplog.text
    gate.set()
    for call in hung:
        call.result(10)
    bench.flow.close()


# --------------------------------------------------------------------------------- a full medium


def test_a_medium_that_is_full_below_the_capacity_is_said_and_the_capacity_is_not(bench):
    """Such a tier takes nothing for ever, and would be called well."""
    bench.store.write_many = lambda writes: [Status.FULL for _ in writes]
    for _ in range(IN_A_ROW):
        assert bench.do("write") is Status.FULL
    assert bench.tier.trouble == ""

    def full(writes):
        note("ENOSPC: no space left on device")
        return [Status.FULL for _ in writes]

    bench.store.write_many = full
    for _ in range(IN_A_ROW):
        assert bench.do("write") is Status.FULL
    assert bench.tier.trouble == "write: ENOSPC: no space left on device"
    assert bench.tier.available, "what it has is read"


def test_twin_unless_what_it_says_is_looked_at(bench, monkeypatch):
    monkeypatch.setattr(
        module, "blamed", lambda out, _: ["failed"] if all(map(is_failed, out)) else []
    )
    bench.store.write_many = lambda writes: (note("ENOSPC"), [Status.FULL for _ in writes])[1]
    for _ in range(IN_A_ROW):
        bench.do("write")
    assert bench.tier.trouble == ""
