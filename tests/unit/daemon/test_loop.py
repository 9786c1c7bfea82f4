"""The server's loop: whom it lets in, what it refuses, and how it ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.daemon import process as processes
from kvtier.daemon.answers import Answer, Closing, Count, Failed, Progress, Told, Welcome
from kvtier.daemon.connection import Connection
from kvtier.daemon.frames import HEADER, encode
from kvtier.daemon.limits import Limits
from kvtier.daemon.messages import (
    Bye,
    Bypass,
    Figures,
    Flush,
    Hello,
    Leave,
    Release,
    Renew,
    Unpin,
)
from kvtier.testing.daemonloop import RunningLoop
from kvtier.testing.rawclient import RawClient, hello
from kvtier.testing.waiting import until


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# ---- what is let in


def test_a_client_is_welcomed_with_the_arena_and_answered(served):
    with RawClient(served.path) as client:
        assert client.greet() == Welcome(1, 2, 3, ("dram",))
        assert [os.fstat(one).st_ino for one in client.descriptors] == [
            os.fstat(served.arena).st_ino
        ]
        assert client.ask(Figures(), Answer).figures == {"one": 1.0}
        assert client.ask(Flush(1, 1.0), Told).value, "from another thread"
        assert client.ask(Renew(1, 1.0), Failed) == Failed("MisuseError", "no such lease")
        assert client.ask(Figures(), Answer), "a caller's mistake ends nothing"
    until(lambda: served.sessions.open == 0)


def test_what_wants_no_answer_gets_none(served):
    with RawClient(served.path) as client:
        client.greet()
        for message in (Figures(), Renew(1, 1.0), Release(7)):
            client.say(message)
        assert client.ask(Flush(1, 1.0), Told).value


def test_a_message_may_come_in_pieces(served):
    with RawClient(served.path) as client:
        client.greet()
        for byte in encode(Figures(), 5):
            client.sock.sendall(bytes([byte]))
        assert client.read() == (Answer({"one": 1.0}), 5)


def test_the_end_of_a_process_is_told_once(served):
    program = (
        "import sys; from kvtier.testing.rawclient import RawClient; c = RawClient(sys.argv[1]);"
        "c.greet(); d = RawClient(sys.argv[1]); d.greet(); print(flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(served.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        child.stdout.readline()
        assert served.sessions.open == 2
        child.kill()
    until(lambda: served.sessions.dead == [child.pid] and not served.sessions.open)
    assert served.serves()


# ---- what is refused


def without_its_pidfd(client):
    client.say(hello(), 1)
    return client.heard(Failed)


def with_a_file(client):
    with Path(__file__).open() as file:
        client.say(hello(), 1, passing=file.fileno())
    return client.heard(Failed)


def with_anothers_pidfd(client):
    pidfd = os.pidfd_open(os.getppid())
    client.say(hello(), 1, passing=pidfd)
    os.close(pidfd)
    return client.heard(Failed)


def before_hello(client):
    client.say(Figures(), 1)
    return client.heard(Failed)


def garbage(client):
    client.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    return client.heard(Failed)


def of_another_version(client):
    client.sock.sendall(HEADER.pack(b"KV", 9, 1, 0, 1))
    return client.heard(Failed)


def hello_again(client):
    client.greet()
    return client.ask(hello(), Failed)


def longer_than_its_kind(client):
    client.greet()
    client.sock.sendall(HEADER.pack(b"KV", 1, Figures.KIND, 1 << 30, 1))
    return client.heard(Failed)


def what_only_a_daemon_says(client):
    client.greet()
    return client.ask(Count(1), Failed)


def half_a_message(client):
    client.greet()
    client.sock.sendall(HEADER.pack(b"KV", 1, Renew.KIND, 1, 1) + b"\x90")
    return client.heard(Failed)


def what_sessions_refuse(client):
    client.greet()
    client.say(Release(1))
    return client.heard(Failed)


REFUSED = {
    without_its_pidfd: "no pidfd came with Hello",
    with_a_file: "is no pidfd; pass os.pidfd_open",
    with_anothers_pidfd: "which connected; pass os.pidfd_open",
    before_hello: "the first message of a connection is Hello",
    garbage: "is it another program's socket?",
    of_another_version: "protocol version 9; this kvtier speaks 1: install the same release",
    hello_again: "Hello comes once",
    longer_than_its_kind: "a Figures of 1073741824 bytes; at most",
    what_only_a_daemon_says: "a Count is said by the daemon",
    half_a_message: "not a Renew",
    what_sessions_refuse: "no such thing",
}


@pytest.mark.parametrize("way", REFUSED, ids=lambda way: way.__name__)
def test_what_breaks_the_rules_is_told_why_and_closed_and_others_go_on(served, way):
    with RawClient(served.path) as other:
        other.greet()
        with RawClient(served.path) as client:
            failed = way(client)
            assert failed.error == "ProtocolError"
            assert REFUSED[way] in failed.text
            assert client.ended()
        assert other.ask(Figures(), Answer)
    until(lambda: served.sessions.open == 0)


def test_unchecked_another_process_would_be_watched_in_its_place(served, monkeypatch):
    monkeypatch.setattr(processes, "_check", lambda pidfd, pid: None)
    with RawClient(served.path) as client:
        pidfd = os.pidfd_open(os.getppid())
        client.say(hello(), 1, passing=pidfd)
        os.close(pidfd)
        assert client.heard(Welcome)


def test_another_user_is_refused_and_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    running = RunningLoop(tmp_path, None, uid=4_000_001)
    try:
        with RawClient(running.path) as client:
            pidfd = os.pidfd_open(os.getpid())
            client.say(hello(), 1, passing=pidfd)
            os.close(pidfd)
            failed = client.heard(Failed)
            assert failed.error == "ConfigError"
            assert f"not for the user {os.getuid()}; connect to" in failed.text
            assert client.ended()
        assert running.sessions.open == 0
    finally:
        running.end()


def test_an_answer_does_not_overtake_what_another_thread_said_before(served):
    with RawClient(served.path) as client:
        client.greet()
        client.say(Unpin(1), 5)
        assert [client.read() for _ in range(2)] == [(Progress(1), 5), (Told(value=True), 5)]


def test_a_defect_ends_one_connection(served, caplog):
    with RawClient(served.path) as client:
        client.greet()
        client.say(Bypass(1, None), 1)
        assert client.ended()
    assert "a request could not be dealt with" in caplog.text
    assert served.serves()


def test_bye_closes(served):
    with RawClient(served.path) as client:
        client.greet()
        client.say(Bye())
        assert client.ended()
    until(lambda: served.sessions.open == 0)


def test_many_descriptors_at_once_close_the_connection_and_none_stays_open(served):
    before = descriptors()
    with RawClient(served.path) as client:
        files = [os.memfd_create("x") for _ in range(100)]
        socket.send_fds(client.sock, [encode(hello(), 1)], files)
        for one in files:
            os.close(one)
        assert client.ended()
    until(lambda: descriptors() <= before)
    assert served.serves()


# ---- the end


def test_at_the_end_clients_are_told(tmp_path):
    running = RunningLoop(tmp_path, None)
    with RawClient(running.path) as client:
        client.greet()
        running.end()
        assert client.read() == (Closing(), 0)
        assert client.ended()


def flooding(client):
    """Ask for 120 MB of answers, and read none."""
    client.greet()
    client.say(Leave(1), 1)


def test_at_the_end_nobody_waits_for_who_does_not_read(tmp_path):
    running = RunningLoop(tmp_path, Limits(unread=1 << 30))
    with RawClient(running.path) as client:
        flooding(client)
        until(lambda: running.server._unread > 0)
        began = time.monotonic()
        running.end()
        assert time.monotonic() - began < 5.0


def test_an_answer_after_the_end_of_its_connection_goes_nowhere(served):
    with RawClient(served.path) as client:
        client.greet()
        client.say(Flush(1, 1.0), 1)
    until(lambda: served.sessions.open == 0)
    assert served.serves()


def test_an_answer_too_long_to_send_is_a_failure_that_says_so(served, monkeypatch):
    monkeypatch.setattr(Answer, "MOST", 3)
    with RawClient(served.path) as client:
        client.greet()
        assert "a Answer of" in client.ask(Figures(), Failed).text


def test_what_a_client_said_before_it_closed_counts():
    """It may have settled plans: their slots would stay out until its process ends."""
    ours, theirs = socket.socketpair()
    theirs.sendall(encode(Hello(bytes(16), "", "scheduler"), 1))
    theirs.close()
    connection: Connection[None] = Connection(ours)
    connection.send(b"an answer that nobody takes")
    assert not connection.broken
    assert connection.waiting == 0
    assert connection.read(memoryview(bytearray(1 << 16)))
    assert connection.frame()
    connection.close()
