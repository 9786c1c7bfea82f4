"""What a scheduler says to a rank that does not read: bounded, and without a word half said."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from contextlib import closing

import pytest

from kvtier.connectors import ranks
from kvtier.connectors.ranks import Channel, RankCopies, RankedPages
from kvtier.copyplan import CopyPlan, PlanPart
from kvtier.device.cpu import CpuDevice
from kvtier.errors import ConfigError
from kvtier.transfer import CopyStatus

FILLER = bytes(1 << 20)


def plan(number: int) -> CopyPlan:
    part = PlanPart(0, 4096, 1, 0, 0, 1, 0, 1, 0, (3,))
    return CopyPlan(2, number, "load", 7, 16, (part,))


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def process():
    """Return a process that a test ends, and its pidfd."""
    with subprocess.Popen(["/bin/sleep", "100"]) as child:
        pidfd = os.pidfd_open(child.pid)
        yield child, pidfd
        os.close(pidfd)
        child.kill()


def test_a_stopped_rank_holds_its_scheduler_up_for_a_while_only(ends, process, monkeypatch):
    monkeypatch.setattr(ranks, "_SEND_SECONDS", 0.05)
    ours, theirs = ends
    channel = Channel(ours)
    pages = RankedPages([channel], [process[1]])
    assert channel.send("step", 1)
    assert not channel.send("step", FILLER)
    assert not channel.closed, "it may still write to what it was told of before"
    result = pages.execute(plan(1), ()).result(20)
    assert result.status is CopyStatus.FAILED
    assert "stopped" in result.cause
    other = Channel(theirs)
    assert other.receive(20.0) == ["step", 1]
    assert other.receive(0.05) is None, "the rest, and the plan, never came whole"


def test_without_a_deadline_it_would_wait_for_ever(ends, monkeypatch):
    """The twin."""
    monkeypatch.setattr(ranks, "_SEND_SECONDS", None)
    channel = Channel(ends[0])
    sending = threading.Thread(target=channel.send, args=("step", FILLER), daemon=True)
    sending.start()
    sending.join(0.5)
    assert sending.is_alive()
    ends[1].close()
    sending.join(20)
    assert channel.closed


@pytest.mark.parametrize("twin", [False, True])
def test_plans_sent_before_are_out_until_the_rank_has_ended(ends, process, monkeypatch, twin):
    """Its channel may close before: the twin takes that for its end, and its slots are reused."""
    monkeypatch.setattr(ranks, "_SEND_SECONDS", 0.05)
    channel = Channel(ends[0])
    if twin:
        monkeypatch.setattr(ranks, "_has_ended", lambda *_: True)
    before = RankedPages([channel], [process[1]]).execute(plan(1), ())
    assert not channel.send("step", FILLER)
    assert before.result(0.05).status is CopyStatus.TIMEOUT
    ends[1].close()
    assert before.result(0.05).status is (CopyStatus.FAILED if twin else CopyStatus.TIMEOUT)
    process[0].kill()
    assert before.result(20).status is CopyStatus.FAILED


def test_a_plan_that_a_rank_never_had_is_over_at_once(ends, process):
    ends[1].close()
    after = RankedPages([Channel(ends[0])], [process[1]]).execute(plan(2), ())
    assert after.result(20).cause == "OSError: rank 0: gone"


def test_a_rank_that_cannot_copy_a_plan_says_so_and_goes_on(ends):
    """Its memory cannot be pinned, say: the scheduler would wait for its word till a deadline."""

    class Pages:
        def execute(self, plan, after):
            raise ConfigError("CUDA does not pin the arena")

    told = []
    with closing(CpuDevice()) as device:
        copies = RankCopies(Channel(ends[1]), Pages(), device, told.append)
        copies.execute(bytes(plan(3)))
        assert not copies.report()
    assert Channel(ends[0]).receive(20.0) == ["copied", 7, 3, "CUDA does not pin the arena"]
    assert told == [3]
