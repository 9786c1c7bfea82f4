"""The tether: how soon a client comes back to a daemon whose server ended."""

from __future__ import annotations

import fcntl
import os
import resource

import pytest

from kvtier.daemon.tether import Tether
from kvtier.errors import ProtocolError

GONE, RESET = ConnectionRefusedError("gone"), ConnectionResetError("reset")
REFUSED, SLOW = ProtocolError("another version"), TimeoutError("slow")


@pytest.fixture
def tried():
    """Let come_up fail in these ways, and return what was waited before each time."""

    def run(*ways: Exception | None, lost: str = "") -> list[float]:
        left, waits = list(ways), []

        def come_up(until: float) -> None:
            del until
            way = left.pop(0)
            tether.closing = not left
            if way is not None:
                raise way

        tether = Tether("p", "t", watch=bool, come_up=come_up, gone=bool)
        tether._pause = waits.append
        if lost:
            tether.lost(lost)
        tether._run()
        tether.end()
        return waits

    return run


def test_it_comes_back_soon_where_a_server_was_ended_however_often_that_happens(tried):
    assert tried(*[RESET] * 5) == [0.0] + [0.05] * 4
    assert tried(REFUSED, REFUSED, REFUSED, RESET, RESET)[3:] == [0.2, 0.05]


@pytest.mark.parametrize("way", [GONE, REFUSED])
def test_it_asks_less_often_where_there_is_none_but_within_a_quarter_of_a_second(tried, way):
    assert tried(*[way] * 6) == [0.0, 0.05, 0.1, 0.2, 0.25, 0.25]


def test_it_goes_on_at_once_where_it_has_waited_for_the_greeting(tried):
    assert tried(REFUSED, SLOW, SLOW, SLOW) == [0.0, 0.05, 0.0, 0.0]


@pytest.mark.parametrize("down", [True, False])
def test_it_says_once_that_the_daemon_is_not_there_and_once_that_it_is_back(
    tried, caplog, monkeypatch, down
):
    """The twin, which does not know that it has said so, says each time why."""
    if not down:
        monkeypatch.setattr(
            Tether, "_down", property(lambda _: False, lambda *_: None), raising=False
        )
    tried(RESET, SLOW, ConnectionResetError("once more"), None, None, lost="the server ended")
    said = [one.getMessage().removeprefix("the daemon at p: ") for one in caplog.records]
    until = "; every call is a miss until it is back"
    if down:
        assert said == [f"the server ended{until}", "it is back"]
    else:
        assert len(said) == 4


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048, reason="no 2048 open files are allowed"
)
def test_it_waits_in_a_process_with_a_thousand_open_files():
    """select() knows descriptors below 1024 alone."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    tether = Tether("p", "t", watch=bool, come_up=print, gone=bool)
    try:
        low, tether.wake = tether.wake, fcntl.fcntl(tether.wake, fcntl.F_DUPFD_CLOEXEC, 1500)
        os.close(low)
        tether._pause(0.001)
        tether.poke()
        tether._pause(0.001)
    finally:
        tether.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
