"""What a scheduler says to a rank that does not read: bounded, and without a word half said."""

from __future__ import annotations

import socket
import threading

import pytest

from kvtier.connectors import ranks
from kvtier.connectors.ranks import Channel, RankedPages
from kvtier.copyplan import CopyPlan, PlanPart
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


def test_a_stopped_rank_holds_its_scheduler_up_for_a_while_only(ends, monkeypatch):
    monkeypatch.setattr(ranks, "_SEND_SECONDS", 0.05)
    ours, theirs = ends
    channel = Channel(ours)
    pages = RankedPages([channel])
    assert channel.send("step", 1)
    assert not channel.send("step", FILLER)
    assert not channel.closed, "it may still write to what it was told of before"
    result = pages.execute(plan(1), ()).result(1.0)
    assert result.status is CopyStatus.FAILED
    assert "stopped" in result.cause
    other = Channel(theirs)
    assert other.receive(1.0) == ["step", 1]
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


def test_plans_sent_before_are_out_until_the_rank_has_ended(ends, monkeypatch):
    monkeypatch.setattr(ranks, "_SEND_SECONDS", 0.05)
    channel = Channel(ends[0])
    before = RankedPages([channel]).execute(plan(1), ())
    assert not channel.send("step", FILLER)
    assert before.result(0.05).status is CopyStatus.TIMEOUT
    ends[1].close()
    assert before.result(5.0).status is CopyStatus.FAILED
