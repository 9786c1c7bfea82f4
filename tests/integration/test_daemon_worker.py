"""A rank's own connection: what it says arrives, also when the daemon did not read for a while."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kvtier.daemon import worker as module
from kvtier.daemon.worker import Worker
from kvtier.device.cpu import CpuDevice
from kvtier.testing.daemon import running
from kvtier.testing.mortal import figure, serves
from kvtier.testing.toy import GEOMETRY
from kvtier.testing.waiting import until

ENDED = 40_000  # more than a socket takes


@pytest.mark.parametrize("poked", [True, False])
def test_what_a_stopped_daemon_did_not_take_is_said_when_it_goes_on(monkeypatch, poked):
    """Without being poked, the twin, the thread would not know that there is more to say."""
    kv = np.zeros((2, 2, 4, 16, 2, 8), np.uint16)
    with running("dram:4MiB") as daemon, contextlib.closing(CpuDevice()) as device:
        worker = Worker("stopped", daemon.path)
        worker.bind(GEOMETRY, kv, device)
        poke = worker._tether.poke
        if not poked:
            monkeypatch.setattr(worker._tether, "poke", lambda: None)
        os.kill(daemon.server_pid(), signal.SIGSTOP)
        try:
            for number in range(ENDED):
                worker.ended(number + 1)
            assert worker._unsaid
        finally:
            os.kill(daemon.server_pid(), signal.SIGCONT)
        until = time.monotonic() + (20 if poked else 1)
        while worker._unsaid and time.monotonic() < until:
            time.sleep(0.01)
        assert bool(worker._unsaid) != poked
        monkeypatch.setattr(worker._tether, "poke", poke)
        worker.close()


SCHEDULER = """
import sys
import kvtier
from kvtier.testing.toy import NAMESPACE, prompt
cache = kvtier.open(sys.argv[1], namespace=NAMESPACE)
plan = cache.plan_save(cache.prefix(prompt(257, 5)), range(16))
print(plan.id, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("twin", [False, True])
def test_what_a_dead_server_did_not_read_is_said_to_the_next(daemon, monkeypatch, twin):
    """Both the scheduler and the server die: only the rank knows that the plan has ended."""
    if twin:
        monkeypatch.setattr(module, "_SAID", 0)
    toy = daemon.open()
    worker = Worker("lost", daemon.path)
    with contextlib.closing(CpuDevice()) as device, contextlib.closing(worker):
        worker.bind(GEOMETRY, np.zeros((2, 2, 4, 16, 2, 8), np.uint16), device)
        command = [sys.executable, "-c", SCHEDULER, f"unix:{daemon.path}?engine=lost"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as scheduler:
            plan = int(scheduler.stdout.readline())
            os.kill(daemon.server, signal.SIGSTOP)
            worker.ended(plan)
            assert not worker._unsaid, "it is on its way"
            scheduler.kill()
        before = daemon.server
        daemon.kill_server()
        until(lambda: daemon.server != before)
        serves(toy)
        until(lambda: figure(toy, "sessions") == 2)
        serves(toy, 1)
        assert figure(toy, "plans_out") == (1 if twin else 0)
