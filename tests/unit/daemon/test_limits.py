"""What one client takes of the loop: time, memory, connections, and turns."""

from __future__ import annotations

import contextlib
import errno
import threading

import pytest

from kvtier.daemon import loop
from kvtier.daemon.answers import Answer, Failed
from kvtier.daemon.frames import HEADER, encode
from kvtier.daemon.limits import Limits
from kvtier.daemon.messages import Figures, Leave, Release
from kvtier.testing.rawclient import RawClient, hello
from kvtier.testing.waiting import until

QUICK = Limits(seconds=0.3)


# ---- limits


def who_says_nothing(client):
    pass


def who_says_half_of_hello(client):
    client.sock.sendall(encode(hello(), 1)[:20])


def who_says_half_of_a_message(client):
    client.greet()
    client.sock.sendall(encode(Figures(), 1)[:10])


def who_says_more_and_half(client):
    client.greet()
    client.sock.sendall(encode(Figures(), 1) + encode(Figures(), 2)[:10])


SLOW = [who_says_nothing, who_says_half_of_hello, who_says_half_of_a_message]
SLOW += [who_says_more_and_half]


@pytest.mark.parametrize("way", SLOW, ids=lambda way: way.__name__)
def test_who_does_not_go_on_is_let_go(start, way):
    running = start(QUICK)
    with RawClient(running.path) as client:
        way(client)
        assert client.ended()
    assert running.serves()


@pytest.mark.parametrize("way", SLOW, ids=lambda way: way.__name__)
def test_without_the_clock_he_would_stay(start, way, monkeypatch):
    running = start(QUICK)
    monkeypatch.setattr(running.server, "_late", Forgetful())
    with RawClient(running.path, timeout=1.0) as client:
        way(client)
        assert not client.ended()


class Forgetful(dict):
    def __setitem__(self, key, value):
        pass


def test_who_is_idle_stays(start):
    running = start(QUICK)
    with RawClient(running.path) as client:
        client.greet()
        ticks = running.sessions.ticks
        until(lambda: running.sessions.ticks >= ticks + 3)
        assert client.ask(Figures(), Answer)


def flooding(client):
    """Ask for 120 MB of answers, and read none."""
    client.greet()
    client.say(Leave(1), 1)


def test_who_does_not_read_is_let_go_at_the_cap(start, caplog):
    running = start(Limits(unread=1 << 20))
    with RawClient(running.path) as client:
        flooding(client)
        until(lambda: running.sessions.open == 0)
        assert client.ended()
    assert "does not read its answers" in caplog.text
    assert running.serves()
    assert running.server._unread == 0


def test_without_the_cap_all_that_would_be_kept(start):
    running = start(Limits(unread=1 << 30))
    with RawClient(running.path) as client:
        flooding(client)
        until(lambda: running.server._unread > 100 << 20)
        assert running.sessions.open == 1
        for _ in range(2000):
            client.heard(Answer)
        assert client.ask(Figures(), Answer).figures == {"one": 1.0}
    until(lambda: running.server._unread == 0)


def test_what_all_together_have_begun_to_send_is_bounded(start):
    running = start(Limits(total=200_000))
    body = HEADER.pack(b"KV", 1, 10, 1 << 20, 1)
    with RawClient(running.path) as first, RawClient(running.path) as second:
        first.greet()
        second.greet()
        first.sock.sendall(body + bytes(150_000))
        until(lambda: running.server._held > 100_000)
        second.sock.sendall(body + bytes(100_000))
        assert "too much to read; connect again later" in second.heard(Failed).text
        assert second.ended()
        until(lambda: running.sessions.open == 1)
    until(lambda: running.server._held == 0)
    assert running.serves()


def test_who_says_all_at_once_is_served_whatever_others_have_begun(start):
    running = start(Limits(total=200_000))
    body = HEADER.pack(b"KV", 1, 10, 1 << 20, 1)
    with RawClient(running.path) as first, RawClient(running.path) as second:
        first.greet()
        second.greet()
        first.sock.sendall(body + bytes(199_990 - len(body)))
        until(lambda: running.server._held == 199_990)
        assert second.ask(Figures(), Answer).figures == {"one": 1.0}
        assert running.sessions.open == 2
    until(lambda: running.server._held == 0)


def test_without_that_bound_both_would_stay(start):
    running = start(Limits(total=1 << 30))
    body = HEADER.pack(b"KV", 1, 10, 1 << 20, 1)
    with RawClient(running.path) as first, RawClient(running.path) as second:
        for client in (first, second):
            client.greet()
            client.sock.sendall(body + bytes(150_000))
        until(lambda: running.server._held > 300_000)
        assert running.sessions.open == 2


def test_connections_are_capped_and_the_next_is_told(start):
    running = start(Limits(connections=2))
    with RawClient(running.path) as first, RawClient(running.path) as second:
        first.greet()
        second.greet()
        with RawClient(running.path) as third:
            failed = third.heard(Failed)
            assert failed.error == "ConfigError"
            assert "has 2 connections, and takes no more; close some" in failed.text
            assert third.ended()
        assert first.ask(Figures(), Answer)
    until(lambda: running.sessions.open == 0)
    assert running.serves()


class Full:
    """A listening socket of a process that has no descriptor left, for so many calls."""

    def __init__(self, door, times) -> None:
        self.door = door
        self.left = times

    def fileno(self):
        return self.door.fileno()

    def accept(self):
        self.left -= 1
        if self.left >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return self.door.accept()


def test_without_descriptors_the_loop_rests_and_then_goes_on(served, caplog):
    server = served.server
    server._listening = Full(server._listening, 2)
    ticks = served.sessions.ticks
    assert served.serves()
    assert served.sessions.ticks >= ticks + 2, "it tried once a tick"
    assert caplog.text.count("Too many open files") == 1, "it says so once in ten seconds"


def rounds_of(running, ticks) -> int:
    """Count how often the loop wakes up while so many ticks go by."""
    server, rounds = running.server, []
    whole = server._send_posted
    server._send_posted = lambda: (rounds.append(0), whole())
    last = running.sessions.ticks + ticks
    until(lambda: running.sessions.ticks >= last)
    return len(rounds)


def test_idle_connections_wake_nobody_up(served):
    with contextlib.ExitStack() as clients:
        for _ in range(256):
            clients.enter_context(RawClient(served.path)).greet()
        assert len(served.server._connections) == 256
        assert not served.server._late
        assert rounds_of(served, 4) <= 6
    until(lambda: served.sessions.open == 0)


# ---- turns


def turns_of(running, most) -> int:
    """Return how many of a flood's messages came before another client's one."""
    sessions = running.sessions
    with RawClient(running.path) as flood, RawClient(running.path) as other:
        flood.greet()
        other.greet()
        gate = Gate(running)
        flood.sock.sendall(encode(Release(2)) * most)
        other.say(Figures(), 1)
        gate.open()
        assert other.heard(Answer)
        until(lambda: sessions.heard.count("Release") == most)
        return sessions.heard.index("Figures")


class Gate:
    """Holds the loop until both clients have sent what they have."""

    def __init__(self, running) -> None:
        self._held, self._open = threading.Event(), threading.Event()

        def wait() -> None:
            running.server._send_posted = posted
            self._held.set()
            self._open.wait()

        ticks = running.sessions.ticks
        until(lambda: running.sessions.ticks >= ticks + 2)  # the system forgets who was ready first
        posted = running.server._send_posted
        running.server._send_posted = wait
        self._held.wait()

    def open(self) -> None:
        self._open.set()


def test_a_flood_keeps_nobody_waiting(served):
    assert turns_of(served, 2000) <= 2 * loop._TURN_FRAMES


def test_without_turns_it_would(served, monkeypatch):
    monkeypatch.setattr(loop, "_TURN_FRAMES", 1 << 30)
    assert turns_of(served, 2000) > 1000


def test_large_messages_take_fewer_a_turn(served, monkeypatch):
    monkeypatch.setattr(loop, "_TURN_BYTES", 1)
    assert turns_of(served, 2000) <= 2
