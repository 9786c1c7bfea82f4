"""``kvtier sim``: what it writes, its exit status, and that a failure can be repeated."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.catalog.catalog import Catalog
from kvtier.cli.main import run
from kvtier.testing import campaign
from kvtier.testing.mutations import MUTATIONS
from kvtier.testing.simdevice import SimDevice
from kvtier.testing.simevents import EVENTS
from kvtier.testing.simschedule import Schedule
from kvtier.testing.waiting import until


@pytest.fixture(autouse=True)
def shortened_a_little(monkeypatch):
    """To shorten a schedule as far as it goes takes a while."""
    monkeypatch.setattr("kvtier.testing.simhistory._RUNS", 40)


def report(capsys, *args):
    """Run the command, and return its exit status and its JSON."""
    status = run(["sim", *args, "--json", "-"])
    return status, json.loads(capsys.readouterr().out)


def test_a_clean_run_says_what_it_reached(capsys):
    status, found = report(capsys, "--schedules", "12", "--seed", "5")
    assert status == 0
    assert [found[name] for name in ("violations", "deadlocks", "leaks")] == [0, 0, 0]
    assert found["schedules"] == 12
    assert found["steps"] > 1000
    assert found["schedules_per_s"] > 0
    assert found["steps_per_s"] > found["schedules_per_s"]
    assert list(found["events"]) == list(found["reached"]) == list(EVENTS)
    assert found["events"]["request_cancelled"] >= found["reached"]["request_cancelled"] > 0
    assert found["failures"] == found["mutations"] == []


def test_the_result_does_not_depend_on_the_number_of_processes(capsys):
    args = ("--schedules", "24", "--seed", "3", "--ops", "4")
    one, two = (report(capsys, *args, "--jobs", jobs)[1] for jobs in ("1", "2"))
    for name in ("digest", "events", "reached", "steps"):
        assert one[name] == two[name]


def test_the_rounds_of_a_schedule_can_be_limited(capsys):
    few, more = (
        report(capsys, "--schedules", "1", "--seed", "1", "--ops", ops)[1] for ops in ("2", "40")
    )
    assert few["steps"] < more["steps"]
    assert few["digest"] != more["digest"]


def test_the_order_of_a_world_can_be_another(capsys):
    first, second = (
        report(capsys, "--schedules", "1", "--seed", "1", "--shuffle", number)[1]
        for number in ("0", "1")
    )
    assert first["digest"] != second["digest"]


def test_a_violation_is_shortened_and_its_command_repeats_it(capsys, monkeypatch):
    monkeypatch.setattr(Catalog, "settle", lambda self, lease: None)
    status, found = report(capsys, "--schedules", "1", "--seed", "1")
    assert status == 1
    assert found["leaks"] + found["violations"] == len(found["failures"]) == 1
    failure = found["failures"][0]
    assert failure["message"] == "Leak: a lease is left"
    assert "plan load" in "\n".join(failure["history"])
    assert failure["history"][-1] == "leak: Leak: a lease is left"
    words = failure["replay"].split()
    assert words[:2] == ["kvtier", "sim"]
    status, again = report(capsys, *words[2:])
    assert status == 1
    assert again["failures"][0]["message"] == failure["message"]


def test_a_mutation_is_found_and_its_command_repeats_it(capsys):
    args = ("--schedules", "5", "--mutate", "publish-before-the-read")
    status, found = report(capsys, *args)
    assert status == 0
    assert found["violations"] == 0
    (mutation,) = found["mutations"]
    assert mutation["name"] == "publish-before-the-read"
    assert mutation["guard"]
    assert 1 <= mutation["found_after"] <= 5
    assert "published bytes" in mutation["how"]
    assert "published bytes" in mutation["history"][-1]
    words = mutation["replay"].split()
    status, again = report(capsys, *words[2:])
    assert status == 0
    assert again["mutations"][0]["found_after"] == 1
    assert "published bytes" in again["mutations"][0]["how"]


def test_a_sweep_that_fails_names_the_cancellation(capsys, monkeypatch):
    save = SimDevice.save

    def bound(self, rng, plan, prefix, *, good):
        copy = save(self, rng, plan, prefix, good=good)
        asyncio.current_task().add_done_callback(lambda task: task.cancelled() and copy.cancel())
        return copy

    monkeypatch.setattr(SimDevice, "save", bound)
    monkeypatch.setattr("kvtier.cli.sim._EXPLAINED", 0)  # to shorten it takes longer
    args = ("--seed", "13", "--schedules", "1", "--sweep", "5", "--ops", "40", "--jobs", "1")
    status, found = report(capsys, *args, "--without", "cancels")
    assert status == 1
    assert found["schedules"] == 1
    assert found["swept"] > 10
    failure = found["failures"][0]
    words = failure["replay"].split()
    assert "--cancel" in words
    status, again = report(capsys, *words[2:])
    assert status == 1
    assert again["failures"][0]["message"] == failure["message"]


def test_a_mutation_that_nothing_notices_is_a_failure(capsys, monkeypatch):
    monkeypatch.setattr("kvtier.testing.simschedule.removed", lambda name: memoryview(b""))
    assert run(["sim", "--schedules", "1", "--mutate", "forget-the-checksum"]) == 1
    assert "0 of 1 guards were missed" in capsys.readouterr().out


def test_no_mutation_costs_no_schedule():
    assert campaign.hunt(Schedule(0), [], 10**9, 1, print) == []


def test_there_are_many_mutations():
    assert len(MUTATIONS) >= 20


def test_a_person_gets_a_table(capsys, tmp_path):
    file = tmp_path / "sim.json"
    assert run(["sim", "--schedules", "2", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "a fetch waits for a read that another fetch began" in shown
    assert "0 violations, 0 deadlocks, 0 leaks in 2 schedules" in shown
    assert json.loads(file.read_text())["digest"] in shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--schedules", "0"], "--schedules"),
        (["--schedules", "-3"], "--schedules"),
        (["--schedules", "many"], "--schedules"),
        (["--seed", "-1"], "--seed"),
        (["--ops", "0"], "--ops"),
        (["--jobs", "0"], "--jobs"),
        (["--shuffle", "-1"], "--shuffle"),
        (["--mutate", "forget-checksum"], "did you mean 'forget-the-checksum'"),
        (["--mutate", ""], "unknown mutation ''"),
        (["--without", "fault"], "did you mean 'faults'"),
        (["--only", "1"], "--schedules 1"),
        (["--only", "x", "--schedules", "1"], "numbers of clients"),
        (["--only", "99", "--schedules", "1"], "has clients 0 to"),
        (["--json", "/nowhere/at/all.json"], "cannot write"),
        (["--mutat", "all"], "did you mean"),
        (["--sweep", "-1"], "--sweep"),
        (["--cancel", "request-0.0:7"], "a task, a step and a phase"),
        (["--cancel", "request-0.0:x:after"], "a task, a step and a phase"),
        (["--cancel", "request-0.0:7:during"], "a task, a step and a phase"),
    ],
)
def test_bad_input_is_said_in_one_line(args, said, capsys):
    assert run(["sim", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1


@contextlib.contextmanager
def started(module, *args):
    """Start a module in a session of its own, as a terminal starts a command.

    Which takes interrupts: a shell's background, where the tests may run, leaves them ignored.
    """
    kept = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, kept)
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def interrupted(process):
    """Press Ctrl-C; return what is said on stderr."""
    os.killpg(process.pid, signal.SIGINT)
    return process.communicate(timeout=30)[1]


def catches_interrupts(pid):
    """Say whether a process has its handler for SIGINT, as Python has soon after its start."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGINT - 1) & 1)


def test_who_interrupts_it_hears_nothing_of_its_processes():
    with started("kvtier", "sim", "--schedules", "100000", "--jobs", "2") as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        workers = until(lambda: len(found := children.read_text().split()) == 2 and found)
        assert until(lambda: all(map(catches_interrupts, workers)))
        assert not interrupted(process).strip()
        assert process.returncode == 130


def test_twin_a_process_of_it_that_gets_the_interrupt_says_where_it_was():
    with started("kvtier.testing.simworker") as process:
        assert until(lambda: catches_interrupts(process.pid))
        assert "KeyboardInterrupt" in interrupted(process)
