"""What a real vLLM's scheduler said once, said to the connector again: it plans the same copies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.connectors.vllm_scheduler import SchedulerSide
from kvtier.testing.vllm_record import Recorder, Replay, read_record, write_record
from kvtier.testing.vllm_steps import FULL, VllmSteps

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "vllm-steps.json.gz"


def test_the_plans_of_a_real_vllm_s_requests_are_as_they_were():
    record = read_record(RECORDED)
    assert record["engine"].startswith("vLLM 0.32")
    replay = Replay(record, tiny=True)
    replay.run()
    assert replay.made == replay.recorded
    assert sum(kind == "save" for kind, _ in replay.made) >= 64
    assert max(count for count, _ in replay.step_seconds) == 64


def test_a_connector_that_plans_otherwise_shows(monkeypatch):
    monkeypatch.setattr(SchedulerSide, "_present", lambda _, tables: [ids[::-1] for ids in tables])
    replay = Replay(read_record(RECORDED), tiny=True)
    replay.run()
    assert replay.made != replay.recorded


def test_loads_are_said_again_too(tmp_path):
    steps = VllmSteps(FULL)
    try:
        recorder = Recorder(SimpleNamespace(_side=steps.scheduler, cache=steps.cache))
        tokens = list(range(200))
        first = steps.request("a", tokens)
        steps.allot(first, list(range(1, 14)))
        assert steps.scheduler.match(first, 0) == (0, False)
        steps.step(a=200)
        steps.settle()
        second = steps.request("b", tokens)
        assert steps.load(second, list(range(20, 33))) == {}
        steps.scheduler.finish(second)
        path = tmp_path / "steps.json.gz"
        write_record(recorder.record(engine="stand-in"), path)
    finally:
        steps.close()
    replay = Replay(read_record(path), tiny=True)
    replay.run()
    assert [kind for kind, _ in replay.made] == ["save", "load"]
    assert replay.made == replay.recorded


def test_a_record_of_another_version_is_refused(tmp_path):
    write_record({"version": 0}, tmp_path / "old")
    with pytest.raises(ValueError, match="of version 0, not 1"):
        read_record(tmp_path / "old")
