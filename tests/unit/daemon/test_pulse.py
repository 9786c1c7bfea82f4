"""A server's pulse: it costs the loop nothing, and beats only when the flow does."""

from __future__ import annotations

import socket
import threading

import pytest

from kvtier.daemon.pulse import BEAT, BEAT_SECONDS, Pulse, Silence
from kvtier.seams import ThreadFlow
from kvtier.testing.waiting import until


@pytest.fixture
def link():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


def heard(link) -> int:
    count = 0
    while True:
        try:
            assert link.recv(100) == BEAT
        except BlockingIOError:
            return count
        count += 1


def test_it_beats_when_it_is_due(link):
    now = [0.0]
    pulse = Pulse(link[1], lambda: now[0])
    for _ in range(5):
        pulse.beat()
    assert heard(link[0]) == 1
    now[0] += BEAT_SECONDS
    pulse.beat()
    assert heard(link[0]) == 1


def test_a_supervisor_that_does_not_listen_keeps_nobody_waiting(link):
    now = [0.0]
    pulse = Pulse(link[1], lambda: now[0])
    for _ in range(20_000):  # more than the socket takes
        now[0] += BEAT_SECONDS
        pulse.beat()
    assert 0 < heard(link[0]) < 20_000
    link[0].close()
    now[0] += BEAT_SECONDS
    pulse.beat()


def test_it_is_silent_while_the_flow_hangs(link):
    now, flow, hang = [0.0], ThreadFlow(), threading.Event()

    async def hangs():
        hang.wait()

    pulse = Pulse(link[1], lambda: now[0])
    pulse.flow = flow
    flow.spawn(hangs())
    for _ in range(5):
        now[0] += BEAT_SECONDS
        pulse.beat()
    assert heard(link[0]) == 1  # with the first it asks
    hang.set()

    def again():
        now[0] += BEAT_SECONDS
        pulse.beat()
        return heard(link[0])

    until(again)
    flow.close()


def test_it_beats_through_what_blocks(link):
    pulse, end = Pulse(link[1], lambda: 0.0), threading.Event()

    def blocks():
        end.wait()
        raise TimeoutError("its own")

    thread = threading.Timer(0.05, end.set)
    thread.start()
    with pytest.raises(TimeoutError, match="its own"):
        pulse.through(blocks)
    thread.join()
    assert heard(link[0]) >= 1


def test_nothing_is_missed_before_something_was_heard():
    silence = Silence()
    for _ in range(3):
        silence.lasts()
    assert silence.beats < 0
    silence.broken()
    silence.lasts()
    silence.lasts()
    assert silence.beats == 2
