"""Whatever clients do with their sockets, the loop goes on, and its counts come back to zero."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable

import pytest

from kvtier.daemon.frames import encode
from kvtier.daemon.limits import Limits
from kvtier.daemon.messages import Bye, Bypass, Figures, Flush, Leave, Release, Renew
from kvtier.testing.daemonloop import RunningLoop
from kvtier.testing.rawclient import RawClient, hello
from kvtier.testing.waiting import until

SEEDS = range(150)
LIMITS = Limits(connections=16, unread=256 << 10, total=4 << 20, seconds=0.2)
MESSAGES = [Figures(), Figures(), Flush(1, 1.0), Release(7), Renew(1, 1.0)]
MESSAGES += [Release(1), Bypass(1, None), Leave(1), Bye()]


def frames(rng: random.Random) -> bytes:
    """Return some messages, now and then spoilt."""
    count = rng.randrange(1, 20)
    data = bytearray(b"".join(encode(rng.choice(MESSAGES), rng.randrange(3)) for _ in range(count)))
    if rng.random() < 0.3:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.2:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


def greet(client: RawClient, rng: random.Random) -> None:
    if rng.random() < 0.8:
        client.greet()
        return
    pidfd = os.pidfd_open(os.getpid() if rng.random() < 0.5 else os.getppid())
    try:
        client.say(hello(rng.randbytes(16)), rng.randrange(3), passing=pidfd)
    finally:
        os.close(pidfd)


def send(client: RawClient, rng: random.Random) -> None:
    data = frames(rng)
    while data:
        size = rng.randrange(1, len(data) + 1)
        client.sock.sendall(data[:size])
        data = data[size:]


def read(client: RawClient, rng: random.Random) -> None:
    client.sock.settimeout(0.0)
    with contextlib.suppress(BlockingIOError):
        client.sock.recv(rng.randrange(1, 1 << 20))
    client.sock.settimeout(1.0)


def half_close(client: RawClient, rng: random.Random) -> None:
    client.sock.shutdown(rng.choice([socket.SHUT_RD, socket.SHUT_WR]))


def garbage(client: RawClient, rng: random.Random) -> None:
    client.sock.sendall(rng.randbytes(rng.randrange(1, 1 << 16)))


ACTIONS: list[Callable[[RawClient, random.Random], None]] = [greet, send, send, send, read]
ACTIONS += [half_close, garbage]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    one = RunningLoop(tmp_path_factory.mktemp("loop"), LIMITS)
    assert one.serves()  # it keeps this process's pidfd from now on
    yield one
    one.end()


def misbehave(path, rng: random.Random) -> None:
    """Let a few clients do what they like, in turns, and leave without a word."""
    with contextlib.ExitStack() as clients:
        each = [clients.enter_context(RawClient(path, timeout=1.0)) for _ in range(3)]
        for _ in range(rng.randrange(3, 15)):
            with contextlib.suppress(OSError, EOFError, TypeError):
                rng.choice(ACTIONS)(rng.choice(each), rng)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_loop_goes_on_and_counts_right(running, seed):
    misbehave(running.path, random.Random(seed))
    server, sessions = running.server, running.sessions
    until(lambda: not server._connections and not sessions.open)
    until(lambda: (server._held, server._unread, server._late, server._more) == (0, 0, {}, {}))
    assert running.serves()
