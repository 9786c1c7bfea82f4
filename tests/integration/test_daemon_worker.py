"""A rank's own connection: what it says arrives, also when the daemon did not read for a while."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import numpy as np
import pytest

from kvtier.daemon.worker import Worker
from kvtier.device.cpu import CpuDevice
from kvtier.testing.daemon import running
from kvtier.testing.toy import GEOMETRY

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
