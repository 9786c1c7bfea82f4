"""Deadlines in virtual time: on a wire that drips, between two tries, in a queue, in a Tier."""

from __future__ import annotations

import threading
from http.client import HTTPResponse
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ReadTimeoutError

from kvtier import seams
from kvtier.deadline import NEVER, Deadline, current, under
from kvtier.errors import Unavailable
from kvtier.seams import IoPool
from kvtier.storage_backends.memory import MemoryStore
from kvtier.storage_backends.s3_errors import BrokenError, LateError
from kvtier.storage_backends.s3_send import Answer, Request, Sender
from kvtier.storage_backends.s3_wire import Wire
from kvtier.testing.hands import Hands
from kvtier.testing.records import NAMESPACE, aligned
from kvtier.tiers.breaker import FAILURES
from kvtier.tiers.store import Capabilities, Status
from kvtier.tiers.tier import Wanted

SILENCE, SLOWEST = 5.0, 20.0
SAID = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 100\r\n\r\n" + b"x" * 100
ENDS = (LateError, BrokenError, TimeoutError, ReadTimeoutError)


class Dripping:
    """A socket on which a byte comes each `gap` seconds of a clock that it moves."""

    def __init__(self, clock: Hands, gap: float) -> None:
        self.clock, self.gap = clock, gap
        self.said = iter(SAID)
        self.timeout = 0.0

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0
        self.timeout = seconds

    def recv_into(self, into: memoryview) -> int:
        self.clock.now += min(self.gap, self.timeout)
        if self.timeout < self.gap:
            raise TimeoutError("timed out")
        for byte in self.said:
            into[0] = byte
            return 1
        return 0

    def recvmsg_into(self, into: list[memoryview]) -> tuple[int]:
        return (self.recv_into(into[0]),)

    def send(self, data: memoryview) -> int:
        return len(data)


def answered(clock: Hands, gap: float, deadline: Deadline, *, spread: bool = False) -> bytes:
    wire = Wire(Dripping(clock, gap), SILENCE, clock)
    wire.begin(deadline)
    wire.send([memoryview(b"GET / HTTP/1.1\r\n\r\n")])
    wire.begin(deadline, SLOWEST)
    response = HTTPResponse(wire.as_socket(), method="GET")
    response.begin()
    body = memoryview(bytearray(100))
    if spread:
        Answer(response, wire, lambda _: None).spread([body[:30], body[30:]])
    else:
        assert response.readinto(body) == len(body)
    return bytes(body)


@pytest.mark.parametrize("gap", [0.001, 0.3, 0.9, 3.0, 6.0])
@pytest.mark.parametrize("seconds", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("spread", [False, True])
def test_a_server_that_drips_is_left_at_the_deadline(gap, seconds, spread):
    clock = Hands()
    deadline = Deadline(clock() + seconds)
    try:
        whole = answered(clock, gap, deadline, spread=spread)
    except ENDS:
        assert gap * len(SAID) > seconds
    else:
        assert whole == b"x" * 100
    assert clock() <= deadline.until + gap * 0.01


@pytest.mark.parametrize("spread", [False, True])
def test_unheeded_it_would_hold_its_thread(monkeypatch, spread):
    """The twin: a wire that looks at its silence alone."""
    monkeypatch.setattr(Deadline, "left", lambda self, now: 1e9)
    clock = Hands()
    deadline = Deadline(clock() + 1.0)
    answered(clock, 0.1, deadline, spread=spread)
    assert clock() > deadline.until + 10


def test_without_a_deadline_an_answer_has_four_silences():
    clock = Hands()
    with pytest.raises(ENDS):
        answered(clock, 0.3, NEVER)
    assert clock() <= 100.0 + SLOWEST + 0.3
    with pytest.raises(TimeoutError):
        answered(clock, SILENCE + 0.1, NEVER)


def test_a_deadline_that_is_put_off_meanwhile_holds():
    clock = Hands()
    deadline = Deadline(clock() + 1.0)
    socket = Dripping(clock, 0.01)
    wire = Wire(socket, SILENCE, clock)
    wire.begin(deadline)
    taken = 0

    def take() -> None:
        nonlocal taken
        while wire.receive(memoryview(bytearray(9))):
            taken += 1
            if taken == 50:
                deadline.extend(clock() + 1.0)
                deadline.extend(clock() + 0.1)  # it never comes nearer

    with pytest.raises(ENDS):
        take()
    assert 140 <= taken <= 151


# ------------------------------------------------------------------------------------- two tries


class Scripted(Sender):
    """A Sender whose tries take `took` seconds each, and come to `fates`."""

    def __init__(self, took: float, *fates: Any) -> None:
        self.now, self.took, self.fates, self.slept = 100.0, took, list(fates), []

        def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            self.now += seconds

        super().__init__(
            (1.0, SILENCE),
            4,
            "",
            {},
            clock=lambda: self.now,
            sleep=sleep,
            draw=lambda _, most: most,
        )

    def _try(self, request, deadline):
        self.now += self.took
        fate = self.fates.pop(0)
        if isinstance(fate, Exception):
            raise fate
        return Fake(fate)


class Fake(SimpleNamespace):
    """An answer of which only the status matters."""

    def __init__(self, status: int) -> None:
        super().__init__(status=status, all=bytes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def sent(sender: Scripted, seconds: float) -> int:
    with under(Deadline(sender.now + seconds)):
        return sender.send(Request("GET", "http://h/b", {})).status


@pytest.mark.parametrize(
    ("seconds", "status", "left"),
    [(1.0, 200, 0), (0.401, 200, 0), (0.39, 503, 1), (0.15, 503, 1), (0.01, 503, 1)],
)
def test_no_pause_and_no_try_begins_that_cannot_end_in_time(seconds, status, left):
    """A try takes a tenth, and the pause is a fifth of a second at most: drawn as that here."""
    sender = Scripted(0.1, 503, 200)
    until = sender.now + max(seconds, 0.1)
    assert sent(sender, seconds) == status
    assert len(sender.fates) == left
    assert len(sender.slept) == 1 - left
    assert sender.now <= until


def test_unheeded_it_would_sleep_through_its_deadline(monkeypatch):
    """The twin."""
    monkeypatch.setattr(Deadline, "left", lambda self, now: 1e9)
    sender = Scripted(0.1, 503, 200)
    until = sender.now + 0.15
    assert sent(sender, 0.15) == 200
    assert sender.now > until + 0.2


def test_a_try_is_the_last_where_the_server_was_silent():
    sender = Scripted(0.1, LateError("over"), 200)
    with pytest.raises(LateError):
        sent(sender, 100.0)
    assert not sender.slept


def test_twice_is_all_there_is():
    assert sent(Scripted(0.1, 503, 429, 200), 100.0) == 429


# ------------------------------------------------------------------------------------- a queue


@pytest.fixture
def busy():
    """Yield a pool of one thread, and what lets go of that thread."""
    pool, gate, taken = IoPool("busy", 1), threading.Event(), threading.Event()

    def hold() -> None:
        taken.set()
        gate.wait(30)

    held = pool.submit(hold)
    assert taken.wait(10)
    yield pool, gate
    gate.set()
    held.result(10)
    pool.close()


def test_what_has_no_thread_at_the_deadline_is_not_begun(busy):
    pool, _ = busy
    begun: list[int] = []
    with under(Deadline(0.0)):
        assert pool.each(begun.append, range(3), "late") == ["late"] * 3
    assert not begun


def test_unheeded_it_would_wait_for_the_thread(busy, monkeypatch):
    """The twin."""
    pool, gate = busy
    begun: list[int] = []
    monkeypatch.setattr(seams, "current", lambda: NEVER)
    gate.set()
    with under(Deadline(0.0)):
        assert pool.each(begun.append, range(3), "late") == [None] * 3
    assert begun == [0, 1, 2]


def test_a_job_has_the_deadline_of_whoever_submits_it(busy):
    pool, gate = busy
    deadline = Deadline(1e12)
    with under(deadline):
        job = pool.submit(current)
    gate.set()
    assert job.result(10) is deadline
    assert pool.submit(current).result(10) is NEVER
    assert current() is NEVER


# --------------------------------------------------------------------------------------- a tier


@pytest.fixture
def heeding(monkeypatch, new_bench):
    """Return a Tier over a store that heeds Deadlines."""
    monkeypatch.setattr(
        MemoryStore, "capabilities", property(lambda self: Capabilities(deadlines=True))
    )
    bench = new_bench()
    bench.do("write")
    yield bench
    bench.tier.close()
    bench.flow.close()


def read(bench, deadline: Deadline):
    wanted = Wanted(bench.record.header.id, NAMESPACE, 5000, aligned(5000))
    (fetched,) = bench.flow.spawn(bench.tier.read([wanted], deadline)).result(10)
    return fetched


def slow(bench, seconds: float, seen: list[Deadline] | None = None) -> None:
    """Let calls take that long, and fail when their time is over."""

    def fault(verb: str) -> None:
        if seen is not None:
            seen.append(current())
        bench.clock.now += seconds
        if current().left(bench.clock()) <= 0:
            raise Unavailable("late")

    bench.store.fault = fault


def test_the_store_is_told_until_when_the_fetch_waits(heeding):
    seen: list[Deadline] = []
    slow(heeding, 0.0, seen)
    deadline = Deadline(heeding.clock() + 1.0)
    assert read(heeding, deadline).status is Status.OK
    assert heeding.do("contains") is Status.OK
    assert seen == [deadline, NEVER]


def test_a_read_that_failed_at_its_deadline_says_nothing_of_the_record(heeding):
    slow(heeding, 0.5)
    fetched = read(heeding, Deadline(heeding.clock() + 0.4))
    assert (fetched.status, fetched.late) == (Status.FAILED, True)
    heeding.fail(Unavailable("down"))
    fetched = read(heeding, Deadline(heeding.clock() + 0.4))
    assert (fetched.status, fetched.late) == (Status.FAILED, False)


def test_a_store_that_does_not_heed_is_never_late(bench):
    slow(bench, 0.5)
    fetched = read(bench, Deadline(bench.clock() + 0.4))
    assert (fetched.status, fetched.late) == (Status.FAILED, False)


def test_what_was_over_before_it_was_begun_is_not_asked_of_the_store(heeding):
    calls = heeding.store.calls
    for _ in range(2 * FAILURES):
        assert read(heeding, Deadline(heeding.clock())).late
    assert heeding.store.calls == calls
    assert heeding.tier.available


@pytest.mark.parametrize(("given", "opens"), [(0.05, False), (0.2, True)])
def test_who_gives_no_time_does_not_open_the_breaker(heeding, given, opens):
    slow(heeding, 1.0)
    for _ in range(FAILURES):
        assert heeding.tier.available
        assert heeding.tier.trouble == ""
        read(heeding, Deadline(heeding.clock() + given))
    assert heeding.tier.available is not opens
    assert bool(heeding.tier.trouble) is opens


def test_an_impatient_call_that_tries_a_broken_tier_leaves_the_trial_to_the_next(heeding):
    slow(heeding, 1.0)
    for _ in range(FAILURES):
        read(heeding, Deadline(heeding.clock() + 0.5))
    heeding.clock.now += 10
    read(heeding, Deadline(heeding.clock() + 0.01))
    heeding.heal()
    assert read(heeding, NEVER).status is Status.OK
    assert heeding.tier.available
