"""Every hazard between blocks and slots: harmless with its edges, caught twice without one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvtier.device.accesses import History, Operation
from kvtier.device.chaos import ChaosStream
from kvtier.device.race import CheckedFence
from kvtier.testing.hazards import HAZARDS, examine, run

SCHEDULES = 200  # `make device` has 1,000
FEW = 20

each = pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.__name__)


@each
def test_with_its_edges_it_is_right_on_every_schedule_and_its_twin_is_caught(hazard):
    found = examine(hazard, SCHEDULES)
    assert (found.schedules, found.corrupted, found.accused) == (SCHEDULES, 0, 0)
    assert found.twin_caught_by_bytes > 0
    assert found.twin_caught_by_checker == SCHEDULES
    assert found.good


@each
def test_on_real_threads_the_checker_needs_no_luck(hazard):
    for _ in range(3):
        kept = run(hazard, None, edge=True)
        assert kept.right
        assert kept.races == ()
        assert run(hazard, None, edge=False).races


@each
def test_a_race_is_told_with_both_operations(hazard):
    for race in run(hazard, 0, edge=False).races:
        assert race.first
        assert race.second
        assert race.first != race.second
        assert race.first in str(race)
        assert race.second in str(race)
        assert race.low < race.high


def test_one_seed_is_one_outcome():
    for hazard in HAZARDS:
        for edge in (True, False):
            outcomes = [[run(hazard, seed, edge=edge).right for seed in range(FEW)] for _ in "ab"]
            assert outcomes[0] == outcomes[1]


# ------------------------------------------------------------ the twins of device and checker


def test_on_a_device_that_passes_fences_by_the_edges_are_of_no_use(monkeypatch):
    monkeypatch.setattr(ChaosStream, "gate", None)
    found = {hazard.__name__: examine(hazard, FEW * 5) for hazard in HAZARDS}
    spared = {name for name, one in found.items() if not one.corrupted}
    # In these no stream waits for another: it is the host that does.
    assert spared <= {
        "cancelled_load_lands",
        "half_a_batch_published",
        "memory_freed_in_flight",
    }
    assert not any(one.accused for one in found.values()), "the checker trusts the device"


@each
def test_a_checker_that_takes_everything_for_ordered_misses_it(hazard, monkeypatch):
    monkeypatch.setattr(Operation, "before", lambda self, clock: True)
    missed = not examine(hazard, FEW).twin_caught_by_checker
    assert missed == (hazard.__name__ != "half_a_batch_published")  # that is no matter of order


def test_a_checker_that_hears_of_no_failure_misses_the_half_batch(monkeypatch):
    def deaf(self, ask):
        try:
            done = ask()
        finally:
            self._checker.received(self.clock)
        return done

    monkeypatch.setattr(CheckedFence, "_learn", deaf)
    (hazard,) = (one for one in HAZARDS if one.__name__ == "half_a_batch_published")
    assert not examine(hazard, FEW).twin_caught_by_checker


@pytest.mark.parametrize("kind", ["reads", "writes"])
def test_a_checker_that_forgets_what_was_read_or_written_misses_some(kind, monkeypatch):
    note = History.note

    def forgets(self, operation, reads, writes):
        note(self, operation, () if kind == "reads" else reads, () if kind == "writes" else writes)

    monkeypatch.setattr(History, "note", forgets)
    assert sum(not examine(hazard, FEW).twin_caught_by_checker for hazard in HAZARDS) >= 3


def test_a_checker_without_fences_accuses_the_innocent(monkeypatch):
    init = CheckedFence.__init__
    monkeypatch.setattr(
        CheckedFence,
        "__init__",
        lambda self, checker, inner, clock, covers: init(self, checker, inner, {}, covers),
    )
    assert all(examine(hazard, FEW).accused == FEW for hazard in HAZARDS)


# ------------------------------------------------------------------------------ the command's word


def report(*arguments):
    command = [sys.executable, "-m", "kvtier.testing.hazards", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_the_last_line_says_what_was_run_and_what_was_not(tmp_path):
    status, said = report("--schedules", "20", "--json", str(tmp_path / "device.json"))
    assert status == 0
    assert len(said["hazards"]) == len(HAZARDS) >= 14
    for row in said["hazards"]:
        assert row["schedules"] == 20
        assert row["corrupted"] == 0
        assert row["twin_caught_by_bytes"] > 0
        assert row["twin_caught_by_checker"] == 20
    assert said["gpu"] == said["compilers"] == said["kernel_mutants_alive"] == "not run"
    assert json.loads((tmp_path / "device.json").read_text()) == said


def test_nothing_is_good_that_no_schedule_has_tried():
    status, said = report("--schedules", "0")
    assert status == 1
    assert {row["schedules"] for row in said["hazards"]} == {0}
