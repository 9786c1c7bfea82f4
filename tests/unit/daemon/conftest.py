"""What tests of a daemon start, and what ends with them: its loop, or its sessions without one."""

from __future__ import annotations

import pytest

from kvtier.testing.daemonloop import RunningLoop
from kvtier.testing.small_daemon import SLOTS, SmallDaemon


@pytest.fixture
def start(tmp_path):
    """Start a server, with limits if need be; it ends with the test."""
    running = []

    def begin(limits=None) -> RunningLoop:
        running.append(RunningLoop(tmp_path, limits))
        return running[-1]

    yield begin
    for one in running:
        one.end()


@pytest.fixture
def served(start) -> RunningLoop:
    return start()


@pytest.fixture
def daemon():
    made = SmallDaemon(SLOTS)
    yield made
    made.close()


@pytest.fixture
def client(daemon):
    made = daemon.client(1)
    made.join()
    return made
