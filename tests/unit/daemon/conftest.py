"""A server's loop that a test starts, and that ends with it."""

from __future__ import annotations

import pytest

from kvtier.testing.daemonloop import RunningLoop


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
