"""A client's link with its daemon: what may happen to its thread, and as it closes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

import kvtier
from kvtier.copyplan import CopyPlan
from kvtier.daemon import link as link_module
from kvtier.daemon import messages
from kvtier.daemon.mapped import MappedArena
from kvtier.daemon.waits import Waits
from kvtier.testing.mortal import Mortal, figure, serves
from kvtier.testing.toy import CHUNK, NAMESPACE, dram, prompt
from kvtier.testing.waiting import until
from kvtier.transfer import CopyResult, CopyStatus

OK = CopyResult(CopyStatus.OK)
TOKENS = prompt(4 * CHUNK + 1)
PATIENCE = 0.05


def test_who_fails_at_being_told_of_progress_hears_it_and_the_link_goes_on(daemon):
    toy = daemon.open()
    toy.save("a", TOKENS[: 4 * CHUNK])
    until(lambda: toy.cache.match(TOKENS).tokens)

    def fails(parts: int) -> None:
        raise ZeroDivisionError(parts)

    with pytest.raises(ZeroDivisionError):
        toy.cache.purge(timeout=5, progress=fails)
    serves(toy)  # also when the purge's own answer has come


def test_a_defect_of_the_links_keeps_nobody_waiting(daemon, monkeypatch):
    toy = daemon.open()
    turn, fails = Waits.turn, iter([True])

    def turned(self: Waits) -> None:
        if self._waiting and next(fails, False):
            raise RuntimeError
        turn(self)

    monkeypatch.setattr(Waits, "turn", turned)
    assert toy.cache.fetch(toy.cache.match(TOKENS), timeout=60, deadline=60).result(10) is None
    serves(toy)


def test_why_the_daemon_closed_a_connection_is_said(daemon, caplog):
    toy = daemon.open()
    link, before = toy.cache._desk.link, toy.cache._desk.link.up
    before.calls._link.sendall(bytes(16))
    until(lambda: link.up not in (None, before))
    assert "this is not the protocol of kvtier" in caplog.text
    serves(toy)


def test_plans_may_be_settled_while_the_link_comes_back(daemon):
    toy = daemon.open()
    plans = [toy.cache.plan_save(toy.cache.prefix(prompt(65, at)), range(4)) for at in (1, 2)]
    assert all(plans)
    link, before = toy.cache._desk.link, toy.cache._desk.link.up

    class Looked:
        """Another thread settles a plan just as the link looks which of them stand."""

        @property
        def arena(self) -> int:
            link.out.pop(next(iter(link.out)), None)
            return 0

    link.out[Looked(), 1] = link.out[Looked(), 2] = toy.cache._desk
    daemon.kill_server()
    until(lambda: link.up not in (None, before))
    serves(toy)


@pytest.mark.parametrize("twin", [False, True])
def test_slots_that_came_too_late_for_a_closed_cache_are_given_back(daemon, monkeypatch, twin):
    other, toy = daemon.open(), daemon.open(PATIENCE)
    if twin:
        monkeypatch.setattr(link_module, "resuming", lambda _: messages.Bye())
    os.kill(daemon.server, signal.SIGSTOP)
    assert toy.cache.plan_save(toy.cache.prefix(prompt(257, 5)), range(16)) is None
    toy.close()
    os.kill(daemon.server, signal.SIGCONT)
    until(lambda: figure(other, "sessions") == 1)
    assert figure(other, "plans_out") == (1 if twin else 0)


def test_what_waits_ends_also_where_the_link_closes_just_as_it_has_come_up(daemon, monkeypatch):
    toy = daemon.open()
    link, before = toy.cache._desk.link, toy.cache._desk.link.up
    match = toy.cache.match(TOKENS)
    came, go = threading.Event(), threading.Event()
    come_up = link._come_up

    def held_up(time: float) -> None:
        come_up(time)
        came.set()
        assert go.wait(10)

    monkeypatch.setattr(link._tether, "come_up", held_up)
    daemon.kill_server()
    assert came.wait(10)
    up = link.up
    assert up not in (None, before)
    waiting = toy.cache.fetch(match, timeout=60, deadline=60)
    closing = threading.Thread(target=link.close)
    closing.start()
    until(lambda: link._closed)
    go.set()
    closing.join()
    assert waiting.result(20) is None
    assert up.calls.fileno() == up.waits.wire.fileno() == -1


# ---------------------------------------------------------------------------------------- refused


def test_what_the_daemon_refuses_is_a_miss_and_no_exception_of_an_engines(nursery):
    geometry = kvtier.Geometry(
        (kvtier.Component(layers=64, heads=64, head_size=8),), block_tokens=(16,), chunk_tokens=64
    )
    daemon = Mortal(nursery, "dram:32MiB")
    toy = daemon.open()
    cache = kvtier.open(
        f"unix:{daemon.path}?patience=5s",
        namespace=kvtier.Namespace("wide", geometry),
        shards=64,
        stages=64,
    )
    most = cache.prefix(prompt(64 * 64 + 1))
    more = cache.prefix(prompt(65 * 64 + 1))
    match = cache.match(more)
    assert (match.tokens, match.pending) == (0, False)
    assert cache.plan_save(more, range(65 * 4)) is None
    assert "262144 parts of a prompt at most" in cache.explain(more).end.why
    assert cache.explain(most).end.chunk == 0
    cache.loaded(match, {"dram": 64}, 0)
    assert cache.fetch(match, timeout=5, deadline=5).result(10) is None
    cache.close()
    serves(toy)
    daemon.close()


def test_a_prompt_that_no_message_holds_is_a_miss(daemon, monkeypatch):
    monkeypatch.setattr(messages, "MOST_CHUNKS", 3)
    toy = daemon.open()
    match = toy.cache.match(TOKENS)
    assert (match.tokens, match.pending) == (0, False), "else an engine would ask for ever"
    monkeypatch.setattr(messages.Loaded, "MOST", 64)  # as it would be with so many keys
    toy.cache.loaded(match, {"dram": 64}, 0)
    monkeypatch.undo()
    serves(toy)


def test_a_pin_whose_plan_is_refused_is_let_go_at_both_ends(nursery):
    """One client has so much of the arena, for leases and plans together: here all of it."""
    daemon = Mortal(nursery, dram(8))
    toy = daemon.open()
    toy.save("a", TOKENS[: 4 * CHUNK])
    match = until(lambda: (found := toy.cache.match(TOKENS)).tokens and found)
    pin = toy.cache.pin(match, seconds=600, timeout=5).result(10)
    lease, more = [toy.cache.lease(match, deadline=600) for _ in range(2)]
    assert lease
    assert more
    assert figure(toy, "pinned_parts") == 4
    assert toy.cache.plan_load(pin, range(16)) is None
    assert not pin.held
    until(lambda: figure(toy, "pinned_parts") == 0)
    assert toy.cache.settle(toy.cache.plan_load(lease, range(16)), OK) is None
    lease.release()
    more.release()
    daemon.close()


# ------------------------------------------------------------------------- a rank that comes late

SCHEDULER = """
import os, sys
import kvtier
from kvtier.testing.toy import NAMESPACE, prompt
cache = kvtier.open(sys.argv[1], namespace=NAMESPACE)
plan = cache.plan_save(cache.prefix(prompt(257, 5)), range(16))
print(bytes(plan).hex(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("twin", [False, True])
def test_a_plan_of_a_dead_scheduler_is_not_executed_by_a_rank_that_comes_late(
    nursery, monkeypatch, twin
):
    """Nobody had the memory when the scheduler died: so its slots were given to others.

    Which slots they are is not said: two prompts have all that there are.
    """
    daemon = Mortal(nursery, dram(8))
    if twin:
        mapped = MappedArena.map
        monkeypatch.setattr(MappedArena, "map", lambda self, fd, first=0: mapped(self, fd, 0))
    toy = daemon.open()
    command = [sys.executable, "-c", SCHEDULER, f"unix:{daemon.path}?engine=late"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as scheduler:
        plan = CopyPlan.decode(bytes.fromhex(scheduler.stdout.readline().decode()))
        assert figure(toy, "plans_out") == 1
        scheduler.kill()
    until(lambda: figure(toy, "plans_out") == 0)
    prompts = [prompt(4 * CHUNK + 1, seed) for seed in (0, 1)]
    for tokens in prompts:
        until(lambda tokens=tokens: toy.save("a", tokens) or toy.cache.match(tokens).tokens)
    toy.kv[:, :, :16] = 255  # what the late rank would write
    worker = kvtier.Worker("late", daemon.path)
    pages = worker.bind(NAMESPACE.geometry, toy.kv, toy.device)
    done = pages.execute(plan, ()).result(20)
    assert done.status is (CopyStatus.OK if twin else CopyStatus.FAILED)
    loads = [toy.load(f"b-{seed}", tokens) for seed, tokens in enumerate(prompts)]
    assert [offered for offered, *_ in loads] == [4 * CHUNK] * 2
    assert all(exact for *_, exact in loads) is not twin, "the bytes of another engine"
    worker.close()
    daemon.close()
