"""Reports go where they can be written, and that is found out before the work begins."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from kvtier.cli.main import run
from kvtier.cli.output import write_report
from kvtier.cli.progress import progress
from kvtier.errors import ConfigError

PLAN = ("plan", "llama-3-70b", "--gpu-memory", "80GB", "--weights", "fp4")
LINE = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Return a trace of two requests."""
    path = tmp_path / "trace.jsonl"
    path.write_text((json.dumps(LINE) + "\n") * 2)
    return str(path)


def commands(trace: str) -> list[list[str]]:
    return [
        [*PLAN],
        ["replay", trace, "--capacity-blocks", "5"],
        ["sim", "--schedules", "1"],
        ["bench", "no-reuse"],
    ]


@pytest.mark.parametrize("number", range(4))
def test_a_report_that_cannot_be_written_is_said_in_one_line(number, trace, tmp_path, capsys):
    command = commands(trace)[number]
    for file in (tmp_path / "nowhere" / "report.json", tmp_path, "a\0b"):
        assert run([*command, "--json", str(file)]) == 2
        told = capsys.readouterr()
        assert told.err.startswith("error: cannot write")
        assert told.err.count("\n") == 1
        assert not told.out


def test_what_is_written_is_what_stdout_would_have(trace, tmp_path, capsys):
    for command in commands(trace)[:2]:
        assert run([*command, "--json", "-"]) == 0
        printed = capsys.readouterr().out
        assert run([*command, "--json", str(tmp_path / "report.json")]) == 0
        capsys.readouterr()
        assert (tmp_path / "report.json").read_text() == printed
        assert json.loads(printed)


def test_a_disk_that_is_full_is_said_too(monkeypatch, tmp_path):
    def full(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match=r"cannot write .*No space left.*name another file"):
        write_report({}, str(tmp_path / "report.json"))


@pytest.mark.parametrize("part", ["nan", "1", "-0.1", "x"])
def test_a_warmup_that_is_no_part_is_refused(part, trace, capsys):
    for command in ([*PLAN, "--trace", trace], ["replay", trace, "--capacity-blocks", "5"]):
        assert run([*command, "--warmup", part]) == 2
        assert "error: Invalid value for '--warmup'" in capsys.readouterr().err


def test_long_work_says_now_and_then_where_it_is_without_a_terminal(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("kvtier.cli.progress.time.monotonic", lambda: now[0])
    with progress() as tell:
        for now[0] in (101.0, 129.0, 131.0, 150.0, 162.0):
            tell("reading", int(now[0]) - 100, 1000)
    assert capsys.readouterr().err == "31 s: reading (31 of 1,000)\n62 s: reading (62 of 1,000)\n"
