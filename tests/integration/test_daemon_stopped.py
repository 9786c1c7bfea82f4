"""A daemon's cache while the server is stopped: no call waits longer than its patience."""

from __future__ import annotations

import os
import signal
import time

import pytest

import kvtier
from kvtier.daemon import client as client_module
from kvtier.daemon import link as link_module
from kvtier.daemon import wire as wire_module
from kvtier.errors import ConfigError, MisuseError
from kvtier.testing.bounded import own_clock
from kvtier.testing.mortal import arenas, figure, serves
from kvtier.testing.toy import CHUNK, NAMESPACE, prompt
from kvtier.testing.waiting import until
from kvtier.transfer import CopyResult, CopyStatus

OK = CopyResult(CopyStatus.OK)
TOKENS = prompt(4 * CHUNK + 1)
PATIENCE = 0.05
SLACK = 1.0  # for a machine that does other things as well


# ----------------------------------------------------------------------------------------- stopped


def timed(call):
    begin = time.monotonic()
    result = call()
    took = time.monotonic() - begin
    assert took < PATIENCE + SLACK, took
    return result


def test_a_stopped_server_keeps_no_call_beyond_its_patience(daemon):
    toy = daemon.open(PATIENCE)
    toy.save("a", TOKENS[: 4 * CHUNK])
    cache, match = toy.cache, toy.cache.match(TOKENS)
    lease = until(lambda: cache.lease(match, deadline=60))
    plan = cache.plan_load(lease, range(16))
    os.kill(daemon.server, signal.SIGSTOP)
    found = timed(lambda: cache.match(TOKENS))
    assert (found.pending, found.tokens) == (True, 0)
    for _ in range(3):
        assert timed(lambda: cache.match(TOKENS)).pending
    assert timed(lambda: cache.lease(match, deadline=60)) is None
    assert timed(lambda: cache.plan_load(lease, range(16))) is None
    assert timed(lambda: cache.plan_save(cache.prefix(prompt(257, 5)), range(16))) is None
    running = timed(lambda: cache.fetch(match, timeout=0.1, deadline=5))
    assert timed(lambda: cache.loaded(match, {"dram": 64}, 0)) is None
    timed(lambda: cache.settle(plan, OK))
    timed(lease.release)
    assert running.result(20) is None
    os.kill(daemon.server, signal.SIGCONT)
    again = until(lambda: (got := cache.match(TOKENS)).tokens and got)
    assert (again.tokens, again.pending) == (4 * CHUNK, False)
    assert until(lambda: cache.lease(again, deadline=60)).release() is None
    until(lambda: figure(toy, "leased_parts") == figure(toy, "plans_out") == 0)
    serves(toy)


def test_what_comes_too_late_is_given_back(daemon, monkeypatch):
    """A lease, a plan of it, and the slots of a save that were asked for while it was stopped."""
    toy = daemon.open(PATIENCE)
    toy.save("a", TOKENS[: 4 * CHUNK])
    match = toy.cache.match(TOKENS)
    asks = {
        "lease": lambda: toy.cache.lease(match, deadline=600),
        "save": lambda: toy.cache.plan_save(toy.cache.prefix(prompt(257, 5)), range(16)),
        "load": lambda: toy.cache.plan_load(lease, range(16)),
    }
    for ask in asks.values():
        lease = until(lambda: toy.cache.lease(match, deadline=600))
        os.kill(daemon.server, signal.SIGSTOP)
        assert ask() is None
        os.kill(daemon.server, signal.SIGCONT)
        if lease.held:
            lease.release()
        until(lambda: figure(toy, "leased_parts") == figure(toy, "plans_out") == 0)
    monkeypatch.setattr(client_module, "_unlease", lambda *_: None)
    os.kill(daemon.server, signal.SIGSTOP)
    assert asks["lease"]() is None
    os.kill(daemon.server, signal.SIGCONT)
    until(lambda: figure(toy, "leased_parts") == 4)  # the twin: till its deadline
    toy.close()


def test_a_late_answer_is_the_next_ones(daemon):
    """A daemon that always takes longer than its patience would else never be of use."""
    toy = daemon.open(PATIENCE)
    toy.save("a", TOKENS[: 4 * CHUNK])
    os.kill(daemon.server, signal.SIGSTOP)
    assert toy.cache.match(TOKENS).pending
    os.kill(daemon.server, signal.SIGCONT)
    desk = toy.cache._desk
    until(lambda: desk._late)
    os.kill(daemon.server, signal.SIGSTOP)
    found = toy.cache.match(TOKENS)
    assert (found.tokens, found.pending) == (4 * CHUNK, False)
    os.kill(daemon.server, signal.SIGCONT)


def test_a_long_silence_costs_calls_nothing_more(daemon):
    toy = daemon.open(PATIENCE)
    os.kill(daemon.server, signal.SIGSTOP)
    until(lambda: toy.cache.match(TOKENS).pending)
    time.sleep(0.3)  # what the silence lasts until nobody waits any more
    begin = own_clock()
    for _ in range(100):
        assert toy.cache.match(TOKENS).pending
    assert own_clock() - begin < 100 * PATIENCE / 4
    os.kill(daemon.server, signal.SIGCONT)


@pytest.mark.parametrize("twin", [False, True])
def test_opening_has_one_deadline_for_all_of_it(daemon, monkeypatch, twin):
    """Both connections and the joining. The twin gives each of its waits all the time anew."""
    waits, give = [], wire_module._give

    def given(link, until):
        until = time.monotonic() + 1.0 if twin else until
        waits.append(until)
        give(link, until)

    def joins(self, seat, seconds):
        waits.append(time.monotonic() + seconds)
        raise ConfigError("enough was seen")

    monkeypatch.setattr(wire_module, "_give", given)
    monkeypatch.setattr(link_module.Link, "join", joins)
    url = f"unix:{daemon.path}?timeout=1s"
    with pytest.raises(ConfigError, match="enough was seen"):
        kvtier.open(url, namespace=NAMESPACE)
    assert len(waits) == 2 * 4 + 1
    assert (len(set(waits[:-1])) == 1) is not twin
    assert waits[-1] - waits[0] < 0.5, "joining has what is left"
    os.kill(daemon.server, signal.SIGSTOP)
    with pytest.raises(ConfigError, match=r"within 1 s .*kvtier serve"):
        kvtier.open(url, namespace=NAMESPACE)
    os.kill(daemon.server, signal.SIGCONT)


# ------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("how", ["alive", "killed", "stopped", "gone"])
def test_closing_ends_in_time_whatever_the_daemon_does(daemon, how):
    toy = daemon.open(PATIENCE)
    toy.save("a", TOKENS[: 4 * CHUNK])
    if how == "killed":
        daemon.kill_server()
    elif how == "stopped":
        os.kill(daemon.server, signal.SIGSTOP)
    elif how == "gone":
        daemon.kill()
    begin = time.monotonic()
    toy.close()
    assert time.monotonic() - begin < 5
    assert arenas() == 0
    with pytest.raises(MisuseError, match="closed"):
        toy.cache.match(TOKENS)
    if how == "gone":
        daemon.start()


@pytest.mark.parametrize("twin", [False, True])
def test_a_copy_that_ends_after_its_cache_has_closed_gives_its_slots_back(
    daemon, monkeypatch, twin
):
    other, toy = daemon.open(), daemon.open()
    if twin:
        monkeypatch.setattr(link_module, "stand_down", lambda *_: None)
    plans = [toy.cache.plan_save(toy.cache.prefix(prompt(65, at)), range(4)) for at in (1, 2)]
    toy.close()
    for left, plan in ((2, plans[0]), (1, plans[1])):
        assert figure(other, "plans_out") == (2 if twin else left)
        toy.cache.settle(plan, OK)
        until(lambda left=left: figure(other, "plans_out") == (2 if twin else left - 1))
