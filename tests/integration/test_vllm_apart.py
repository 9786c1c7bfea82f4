"""vLLM's worker apart from its scheduler, on a daemon's memory, without vLLM: see vllm_steps."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvtier
from kvtier.connectors import vllm_seat
from kvtier.connectors.vllm_absent import AbsentSide
from kvtier.connectors.vllm_seat import ApartPlace, open_for, open_or_absent, take_seat
from kvtier.connectors.vllm_step import StepPlans
from kvtier.daemon.worker import Worker
from kvtier.device.cpu import CpuDevice
from kvtier.errors import ConfigError, MisuseError
from kvtier.testing.daemon import running
from kvtier.testing.vllm_steps import BLOCK, BLOCKS, FULL, SLIDING, VllmSteps

TOKENS = np.random.default_rng(0).integers(0, 1000, 200).tolist()
TABLE = list(range(1, 14))
OTHER = list(range(30, 43))
WINDOW = list(range(14, 27))


def saved_and_loaded(steps: VllmSteps) -> bool:
    groups = steps.groups
    first = steps.serve("a", TOKENS, *(TABLE, WINDOW)[:groups])
    steps.settle()
    second = steps.request("b", TOKENS)
    assert steps.load(second, *(OTHER, [0] * 8 + list(range(50, 55)))[:groups]) == {}
    return steps.holds(second, range(12), first)


@pytest.mark.parametrize("components", [(FULL,), (FULL, SLIDING)], ids=["full", "hybrid"])
def test_a_worker_that_was_there_first_finds_the_memory_of_the_scheduler_s_daemon(components):
    steps = VllmSteps(*components, engine=f"steps-{os.getpid()}")
    try:
        assert saved_and_loaded(steps)
    finally:
        steps.close()


def test_what_one_engine_left_with_a_daemon_another_loads():
    with running("dram:4MiB") as daemon:
        one = VllmSteps(FULL, tiers=[daemon.url], engine="one")
        first = one.serve("a", TOKENS, TABLE)
        one.settle()
        one.close()
        other = VllmSteps(FULL, tiers=[f"{daemon.url}?patience=2s"], engine="other")
        try:
            second = other.request("b", TOKENS)
            assert other.load(second, OTHER) == {}
            assert other.holds(second, range(12), first)
        finally:
            other.close()


def test_loads_from_a_daemon_that_was_killed_fail_and_requests_go_on():
    with running("dram:4MiB") as daemon:
        steps = VllmSteps(FULL, tiers=[f"{daemon.url}?patience=2s"], engine="one")
        try:
            steps.serve("a", TOKENS, TABLE)
            steps.settle()
            second = steps.request("b", TOKENS)
            offered, _ = steps.scheduler.match(second, 0)
            assert offered == 192
            os.kill(daemon.supervisor_pid, signal.SIGKILL)
            daemon.process.wait(20)
            blocks = SimpleNamespace(get_block_ids=lambda: (OTHER,))
            steps.scheduler.allocated(second, blocks, offered)
            arrived: set[str] = set()
            while "b" not in arrived:
                arrived, failed = steps.step()
            assert failed in ({}, {"b": tuple(range(30, 42))})
            while steps.scheduler.match(steps.request("c", TOKENS), 0) != (0, False):
                steps.step()
            while steps.scheduler.busy:
                steps.step()
        finally:
            steps.close()


ABSENT = "unix:/nowhere/kv.sock?timeout=50ms"


def test_an_optional_daemon_that_is_not_there_is_done_without(caplog):
    namespace = kvtier.Namespace("tiny", kvtier.Geometry((FULL,), "float32", (BLOCK,), 64))
    for apart in (False, True):
        assert open_or_absent([ABSENT], namespace, "e", 1, apart=apart) is None
        assert "runs without a cache until it is started anew: no daemon answers" in caplog.text
        caplog.clear()
        with pytest.raises(ConfigError, match="no daemon answers"):
            open_for([ABSENT], namespace, "e", 1, apart=apart)
    with pytest.raises(ConfigError, match="did you mean 'timeout'"):
        open_or_absent(["unix:/nowhere/kv.sock?timout=1s"], namespace, "e", 1, apart=False)


def test_without_a_cache_both_halves_do_nothing():
    seat = take_seat("absent", "SCHEDULER", lambda: None, b"digest")
    assert take_seat("absent", "WORKER", lambda: None, b"another") is seat
    with pytest.raises(MisuseError, match="runs without a cache"):
        _ = seat.cache
    side = AbsentSide()
    assert side.match(None, 0) == (0, False)
    assert side.step(None) == StepPlans()
    assert side.arrived(idle=True) == (set(), {})
    assert (side.report(), side.busy) == (None, False)
    for nothing in (side.ended, side.finish, side.bind, side.before, side.load, side.save):
        nothing(None)
    side.allocated(None, None, 0)
    side.close()
    for role in ("SCHEDULER", "WORKER"):
        seat.leave(role)


def test_kv_of_another_shape_is_refused_before_there_is_a_daemon():
    namespace = kvtier.Namespace("tiny", kvtier.Geometry((FULL,), "float32", (BLOCK,), 64))
    place = ApartPlace(["dram:4MiB"], namespace, "nobody", (0, 1))
    with pytest.raises(ConfigError, match="check dtype, block size"):
        place.check([[torch.zeros(BLOCKS, 1, BLOCK, 8)] * 2], CpuDevice())


def test_the_daemon_hears_of_a_plan_that_was_refused(monkeypatch):
    """Or it would keep the slots for this rank where the scheduler has died."""
    told = []
    steps = VllmSteps(FULL, engine=f"refused-{os.getpid()}")
    monkeypatch.setattr(steps.place._worker, "ended", told.append)
    try:
        steps.serve("a", TOKENS, TABLE)
        steps.settle()
        told.clear()
        assert set(steps.load(steps.request("b", TOKENS), [*OTHER[:11], BLOCKS, 43])) == {"b"}
        assert len(told) == 1
    finally:
        steps.close()


def test_a_daemon_that_cannot_be_reached_is_waited_for_once(monkeypatch):
    waits = []

    def absent(_worker, *_, timeout: float, **__):
        waits.append(timeout)
        raise ConfigError("no daemon answers")

    monkeypatch.setattr(Worker, "bind", absent)
    steps = VllmSteps(FULL)
    try:
        steps.worker._place = ApartPlace(["dram:4MiB"], steps.namespace, "nobody", (0, 1))
        steps.worker._pages = None
        for name in "abc":
            steps.serve(name, [*TOKENS, ord(name)][1:], TABLE)
            steps.settle()
        assert waits == [vllm_seat._BIND_SECONDS, 0.0, 0.0]
    finally:
        steps.worker._place = steps.place
        steps.close()


def test_without_a_daemon_a_plan_fails_and_the_worker_goes_on(monkeypatch):
    monkeypatch.setattr(vllm_seat, "_BIND_SECONDS", 0.0)
    source = VllmSteps(FULL)
    lost = VllmSteps(FULL)
    try:
        lost.worker._place = ApartPlace(["dram:4MiB"], lost.namespace, "nobody", (0, 1))
        lost.worker._pages = None
        lost.serve("a", TOKENS, TABLE)
        lost.settle()
        assert lost.scheduler.match(lost.request("b", TOKENS), 0) == (0, False)
        assert saved_and_loaded(source)
    finally:
        source.close()
        lost.worker._place.close({})
        lost.worker._place = lost.place
        lost.close()
