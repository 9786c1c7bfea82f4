"""Every guard in the catalog's source, taken away: something notices, or there is a reason."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.catalog.index import DRAM, Index
from kvtier.cli.main import run
from kvtier.testing import harmless
from kvtier.testing.bounded import Endless, bounded
from kvtier.testing.campaign import hunt
from kvtier.testing.guards import guards
from kvtier.testing.mutations import chosen
from kvtier.testing.simschedule import Schedule, live

HERE = Path(__file__).parent
SAMPLE = 8
EASY = "index.Index.leaf:without-*"


def found(pattern: str, schedules: int = 5):
    return hunt(Schedule(0), chosen(pattern), schedules, 1, lambda done: None)


def test_every_module_of_the_catalog_has_guards():
    modules = {name.partition(".")[0] for name in guards()}
    catalog = HERE.parents[1] / "kvtier" / "catalog"
    assert modules == {file.stem for file in catalog.glob("[!_]*.py")}
    assert len(guards()) > 500


def test_a_guard_is_away_and_back_again_for_whoever_kept_its_function():
    leaf = Index.leaf
    index = Index(1)
    row = index.ensure(b"name", None, 0, 1, 0)
    index.add(row, DRAM)
    index.hold(row, 1)
    (name,) = [name for name in chosen(EASY) if "self.holds[row] in" in guards()[name].guard]
    assert not leaf(index, row, DRAM)
    with guards()[name].removed():
        assert leaf(index, row, DRAM)
    assert not leaf(index, row, DRAM)


def test_a_guard_that_is_taken_away_is_missed():
    outcomes = {one.name: one for one in found(EASY)}
    assert len(outcomes) >= 4
    assert any(one.found_after is not None for one in outcomes.values())


@pytest.mark.parametrize("pattern", ["catalog.Catalog.settle:*", "index.Index.hold:*"])
def test_a_schedule_repeats_how_a_guard_was_missed(pattern):
    missed = [one for one in found(pattern) if one.seed is not None]
    assert missed
    for one in missed:
        assert f"--mutate {one.name}" in one.replay
        assert live(Schedule(one.seed, mutation=one.name)).message.startswith(
            one.how.partition(": ")[2]
        )


# ---- the tables


def test_nothing_in_the_tables_is_out_of_date():
    """Review what the guards have become; ``--tidy`` drops them from the list of tests."""
    assert harmless.stale() == []


def test_a_guard_stands_in_one_table_once():
    names = [*harmless.found_by(), *harmless.harmless()]
    assert len(names) == len(set(names))


def test_the_tests_that_are_named_fail_without_the_guard():
    """A sample, in processes of their own: without a guard they would spoil this one.

    ``python tests/sim/under_guards.py --table`` tries them all.
    """
    table = sorted(harmless.found_by().items())
    wanted = dict(table[:: len(table) // SAMPLE + 1])
    command = [sys.executable, HERE / "under_guards.py"]
    answer = subprocess.run(
        command, input=json.dumps(wanted), check=True, capture_output=True, text=True
    )
    failed = dict(json.loads(line) for line in answer.stdout.splitlines())
    assert failed == wanted


@pytest.fixture
def no_tables(tmp_path, monkeypatch):
    """Nobody knows why a guard is not missed; one name is out of date."""
    monkeypatch.setattr(harmless, "FOUND_BY", tmp_path / "found_by.txt")
    harmless.FOUND_BY.touch()
    monkeypatch.setattr(harmless, "HARMLESS", {"none": ("index.Index.prune:dropped-0000",)})
    tables = (harmless.found_by, harmless.harmless)
    for table in tables:
        table.cache_clear()
    yield
    for table in tables:
        table.cache_clear()


@pytest.mark.usefixtures("no_tables")
def test_what_nobody_misses_is_a_failure(capsys):
    command = ["sim", "--schedules", "1", "--mutate", "index.Index.prune:dropped-*"]
    assert run([*command, "--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert "NEVER" in said
    assert "not in the source any more: index.Index.prune:dropped-0000" in said


# ---- bounds


def never_end():
    while True:
        with contextlib.suppress(Exception):  # as the code may that lost its guard
            sum(range(1000))


def test_what_never_ends_is_ended():
    with pytest.raises(Endless), bounded(0.1):
        never_end()


def test_what_wants_all_memory_gets_none():
    with pytest.raises(MemoryError), bounded(10.0):
        bytearray(4 << 30)
    assert len(bytearray(2 << 20)) == 2 << 20
