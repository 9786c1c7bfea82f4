"""What an operator asks of a daemon that is away, or goes; or of a cache that closes meanwhile."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

import kvtier
from kvtier.catalog.sweep import Removed
from kvtier.daemon import messages, orders
from kvtier.daemon.link import Link
from kvtier.errors import ConfigError, MisuseError
from kvtier.testing.mortal import serves
from kvtier.testing.toy import CHUNK, GEOMETRY, dram, opened, prompt
from kvtier.testing.waiting import until

TOKENS = prompt(4 * CHUNK)


@pytest.fixture
def away(daemon):
    """Return a cache whose daemon is away, and comes back when its supervisor goes on."""
    toy = daemon.open()
    toy.save("a", TOKENS)
    os.kill(daemon.pid, signal.SIGSTOP)
    os.kill(daemon.server, signal.SIGKILL)
    until(lambda: toy.cache._desk.link.up is None)
    yield toy
    os.kill(daemon.pid, signal.SIGCONT)


def test_what_is_not_asked_in_time_is_said_not_to_have_been(away):
    cache = away.cache
    for order, what in (
        (lambda: cache.purge(timeout=0.1), "purge"),
        (lambda: cache.clear("dram", timeout=0.1), "clear dram"),
    ):
        with pytest.raises(TimeoutError, match=f"was not there to be asked to {what}; try again"):
            order()
    assert cache.invalidate(TOKENS, timeout=0.1) == Removed(0, 0, cache._desk.tiers)


@pytest.mark.parametrize("name", ["purge", "clear", "invalidate"])
def test_an_order_waits_for_a_daemon_that_comes_back(daemon, away, name):
    cache = away.cache
    order = {
        "purge": lambda: cache.purge(timeout=60),
        "clear": lambda: cache.clear("dram", timeout=60),
        "invalidate": lambda: cache.invalidate(TOKENS, timeout=60),
    }[name]
    with ThreadPoolExecutor(1) as pool:
        given = pool.submit(order)
        os.kill(daemon.pid, signal.SIGCONT)
        assert given.result(60) in (None, Removed(0, 0))
    serves(away)


def test_an_order_is_given_again_where_the_server_dies(daemon):
    toy = daemon.open()
    up = toy.cache._desk.link.up
    os.kill(daemon.server, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        given = pool.submit(toy.cache.purge, timeout=60)
        until(lambda: up.waits._waiting)
        os.kill(daemon.server, signal.SIGKILL)
        assert given.result(60) == Removed(0, 0)


def test_what_was_asked_and_not_answered_is_not_said_to_be_done(daemon, monkeypatch):
    monkeypatch.setattr(orders, "_GRACE", 0.0)
    toy = daemon.open()
    os.kill(daemon.server, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match="was asked to purge, and has not said that it is done"):
        toy.cache.purge(timeout=0.1)
    os.kill(daemon.server, signal.SIGCONT)


# ---- and closing


@pytest.mark.parametrize("looks", [True, False])
def test_who_would_join_while_the_last_one_closes_is_told(away, monkeypatch, looks):
    """The twin: who does not look waits for all of its time, at a link that has closed."""
    if not looks:
        monkeypatch.setattr(Link, "_check_open", lambda _: None)
        monkeypatch.setattr(orders.Orders.__init__, "__defaults__", (1.0,))
    link = away.cache._desk.link
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(away.cache.share, kvtier.Namespace("another", GEOMETRY))
        until(lambda: False in link._seats.values())
        away.cache.close()
        error, says = (MisuseError, "is closed") if looks else (ConfigError, "does not answer")
        with pytest.raises(error, match=says):
            joining.result(30)
    assert link._closed
    assert not link._seats


@pytest.mark.parametrize("looks", [True, False])
def test_who_asks_while_it_closes_is_told(daemon, monkeypatch, looks):
    """The twin says what the daemon said: a word of the wire."""
    toy = daemon.open()
    if not looks:
        monkeypatch.setattr(orders.Orders, "_check_left", lambda _: None)
    desk = toy.cache._desk
    desk.unpin()
    assert desk._begin(messages.Leave(0), 10.0, orders._told).result(10)
    for call in (
        lambda: toy.cache.flush(timeout=1),
        lambda: toy.cache.clear("dram", timeout=1),
        lambda: toy.cache.purge(timeout=1),
    ):
        with pytest.raises(MisuseError, match="this cache is closed" if looks else "say Join"):
            call()


def test_who_waits_for_a_cache_of_this_process_while_it_closes_is_told(monkeypatch):
    toy = opened(dram(8))

    def cancelled(work) -> Future[object]:
        work.close()
        future: Future[object] = Future()
        future.cancel()
        return future

    toy.save("a", TOKENS)
    with monkeypatch.context() as patched:
        patched.setattr(toy.cache._desk.depot.flow, "spawn", cancelled)
        for call in (
            lambda: toy.cache.clear("dram"),
            lambda: toy.cache.purge(timeout=1),
        ):
            with pytest.raises(MisuseError, match="this cache is closed"):
                call()
    flow = toy.cache._desk.depot.flow
    toy.close()
    with pytest.raises(MisuseError, match="this cache is closed"):
        flow.spawn(nothing())


async def nothing() -> None:
    return
