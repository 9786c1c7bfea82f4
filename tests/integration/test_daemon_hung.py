"""A daemon whose server hangs: it is killed, and started again. A healthy one never is."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import time

import pytest

import kvtier
from kvtier.daemon import supervisor as supervisors
from kvtier.daemon.settings import Settings
from kvtier.daemon.supervisor import Supervisor
from kvtier.testing.mortal import serves
from kvtier.testing.rawclient import RawClient, hello
from kvtier.testing.toy import NAMESPACE, Toy, dram
from kvtier.testing.waiting import until

SERVER = """
import threading
import kvtier.daemon.pulse as pulse
import kvtier.daemon.server as server
from kvtier.daemon.sessions import Sessions

pulse.BEAT_SECONDS = 0.2

def never(*_):
    threading.Event().wait()

async def not_even_the_flow():
    never()

{}
server.main()
"""
LOOP = "Sessions.first_plan = never"
FLOW = """
first = Sessions.first_plan
def first_plan(self, session):
    self._depot.flow.spawn(not_even_the_flow())
    return first(self, session)
Sessions.first_plan = first_plan
"""
FLOW_UNASKED = FLOW + "pulse.Pulse.flow = property(lambda self: None, lambda self, flow: None)"


class Soon(Supervisor):
    """Misses beats after a second, of a server that beats every 0.2 seconds."""

    program = ("-c", SERVER.format(""))


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """Start supervisors of servers with a defect."""
    monkeypatch.setattr(supervisors, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(supervisors, "_MISSED", 6)
    made = []

    def start(defect="", *tiers):
        class Other(Soon):
            program = ("-c", SERVER.format(defect))

        made.append(Other(Settings(tiers or (dram(64),), os.geteuid()), tmp_path / "s"))
        made[-1].start(60)
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("hang", "seen"),
    [(LOOP, True), (FLOW, True), (FLOW_UNASKED, False)],
    ids=["the loop", "the flow", "the flow, unasked"],
)
def test_a_server_that_hangs_is_killed_and_started_again(supervised, caplog, hang, seen):
    one = supervised(hang)
    first, pidfd = one.server, os.pidfd_open(one.server)
    with RawClient(one.path) as client, contextlib.suppress(EOFError, ConnectionError):
        own = os.pidfd_open(os.getpid())
        client.say(hello(), 1, passing=own)
        os.close(own)
        assert bool(select.select([pidfd], [], [], 20 if seen else 1.8)[0]) is seen
    os.close(pidfd)
    if seen:
        until(lambda: one.server not in {0, first})
        said = "the server hangs, or was stopped; it is killed; it starts again"
        assert said in caplog.text
    else:
        os.kill(first, signal.SIGKILL)


def test_a_server_that_is_stopped_is_replaced_and_counted(supervised):
    one = supervised()
    toy = Toy(kvtier.open(f"unix:{one.path}?timeout=60s", namespace=NAMESPACE))
    with contextlib.closing(toy):
        server = one.server
        os.kill(server, signal.SIGSTOP)
        until(lambda: one.server not in {0, server}, 20)
        serves(toy)
        counted = toy.cache.figures()
        assert counted['kvtier_server_restarts_total{reason="hung"}'] == 1
        assert counted['kvtier_server_restarts_total{reason="ended"}'] == 0


def test_without_that_it_would_hang_for_ever(supervised, monkeypatch):
    monkeypatch.setattr(supervisors, "_MISSED", math.inf)
    one = supervised()
    server, pidfd = one.server, os.pidfd_open(one.server)
    os.kill(server, signal.SIGSTOP)
    assert not select.select([pidfd], [], [], 1.8)[0]
    os.close(pidfd)
    assert one.server == server


# ---- who is stopped is not who hangs

DAEMON = """
import os, sys
from kvtier.daemon import pulse, supervisor
from kvtier.daemon.settings import Settings
from kvtier.clock import monotonic

class ByTheClock:
    beats = property(lambda self: (monotonic() - self.last) / 0.2)
    def __init__(self):
        self.last = float("inf")
    def broken(self):
        self.last = monotonic()
    def lasts(self):
        pass

supervisor.BEAT_SECONDS = 0.2
supervisor._MISSED = 6
if sys.argv[3] == "clock":
    supervisor.Silence = ByTheClock
supervisor.Supervisor.program = ("-c", sys.argv[2])
one = supervisor.Supervisor(Settings(("dram:8MiB",), os.geteuid()), sys.argv[1])
print(one.start().server, flush=True)
sys.stdin.read()
"""


def test_a_pause_of_both_kills_no_healthy_server(tmp_path):
    """As when the machine is suspended: the supervisor goes on first. The twin goes by a clock."""
    with contextlib.ExitStack() as undo:
        daemons, pidfds = {}, {}
        for by in ("beats", "clock"):
            command = [sys.executable, "-c", DAEMON, str(tmp_path / by), SERVER.format(""), by]
            daemons[by] = undo.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
        servers = {by: int(one.stdout.readline()) for by, one in daemons.items()}
        for by, server in servers.items():
            pidfds[by] = os.pidfd_open(server)
            undo.callback(os.close, pidfds[by])
        time.sleep(0.5)  # they beat
        for pid in (*servers.values(), *(one.pid for one in daemons.values())):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)  # what would be too long
        for one in daemons.values():
            os.kill(one.pid, signal.SIGCONT)
        assert select.select([pidfds["clock"]], [], [], 20)[0]
        signal.pidfd_send_signal(pidfds["beats"], signal.SIGCONT)
        killed = select.select([pidfds["beats"]], [], [], 2.0)[0]
        for one in daemons.values():
            one.communicate()
    assert not killed


# ---- the end


@pytest.mark.parametrize("go_on", [True, False])
def test_a_stopped_server_ends_in_order_all_the_same(
    supervised, tmp_path, monkeypatch, caplog, go_on
):
    """The twin is not told to go on: it is killed, and what waited is lost."""
    monkeypatch.setattr(supervisors, "_MISSED", math.inf)
    monkeypatch.setattr(supervisors, "_MISSED_AT_END", 5)
    if not go_on:
        send = signal.pidfd_send_signal
        monkeypatch.setattr(
            signal, "pidfd_send_signal", lambda fd, n: n == signal.SIGCONT or send(fd, n)
        )
    one = supervised("", dram(64), f"lmdb:{tmp_path}/kv?capacity=64MiB")
    os.kill(one.server, signal.SIGSTOP)
    one.close()
    assert ("is killed, and what waited is not written down" in caplog.text) is not go_on
