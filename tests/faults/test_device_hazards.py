"""Every hazard between blocks and slots: harmless with its edges, caught twice without one."""

from __future__ import annotations

import json
import shutil
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
        "layer_read_early",
        "memory_freed_in_flight",
        "slot_freed_halfway",
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

    monkeypatch.setattr(CheckedFence, "holds", deaf)
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


def test_nothing_is_good_that_no_schedule_has_tried():
    assert not examine(HAZARDS[0], 0).good


# ------------------------------------------------------------------------------ the command's word


@pytest.mark.slow
@pytest.mark.timeout(300)  # compilers, and three processes that import torch
def test_the_last_line_says_what_was_run_and_what_was_not(tmp_path):
    """One in twenty of the changes of kernel and planner; `make device` tries all."""
    kept = tmp_path / "device.json"
    options = ("--schedules", "20", "--every", "20", "--json", str(kept))
    command = [sys.executable, "-m", "kvtier.testing.device", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(kept.read_text()) == said
    assert len(said["hazards"]) == len(HAZARDS) >= 14
    for row in said["hazards"]:
        assert row["schedules"] == 20
        assert row["corrupted"] == 0
        assert row["twin_caught_by_bytes"] > 0
        assert row["twin_caught_by_checker"] == 20
    assert said["gpu"] == "not run"
    for found in said["cuda_device_on_cpu"].values():
        assert len(found) == len(HAZARDS) - 1
        assert not any(row["corrupted"] or row["accused"] for row in found)
    built = said["compilers"]
    if shutil.which("g++") is None:
        assert said["kernel_mutants_alive"] == "not run"
        assert built["g++ plain"] == built["g++ sanitized"] == "not run"
        pytest.skip("g++ absent: the copy kernel was not compiled for the CPU")
    assert said["kernel_mutants_alive"] == 0
    assert said["kernel_mutants"]["kernel"] >= 4
    assert said["kernel_mutants"]["planner"] >= 4
    for kind in ("plain", "sanitized"):
        assert built[f"g++ {kind}"]["cases"] >= 200
        assert built[f"g++ {kind}"]["right"] is True
    for architecture in (80, 90, 100):
        found = built[f"nvcc sm_{architecture}"]
        assert found == "not run" or (found["spilled"] == 0 < found["registers"])
