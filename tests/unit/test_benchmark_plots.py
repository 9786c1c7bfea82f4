"""The pictures of the scripts in ``benchmarks``: which figures a pattern takes, and a file."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plot.py"
RESULTS = SCRIPT.parent / "results"
spec = spec_from_file_location("plot", SCRIPT)
plot = module_from_spec(spec)
spec.loader.exec_module(plot)

REPORT = {
    "get": {"a b": {"gb_per_s": [1.0, 3.0, 2.0]}, "c": {"gb_per_s": 4, "cpu_s": 9, "ok": True}},
    "arm": {"x": {"p50": 5.0, "p10": 4.0, "p90": 7.0, "inner": {"median": 2}}},
    "word": "none",
    "empty": [],
}


@pytest.mark.parametrize(
    ("pattern", "rows", "line"),
    [
        ("get.*.gb_per_s", [("a b", 2.0, 1.0, 3.0), ("c", 4, 4, 4)], None),
        ("get.c.{gb_per_s,cpu_s}@1.5", [("gb per s", 4, 4, 4), ("cpu s", 9, 9, 9)], 1.5),
        ("arm.*", [("x", 5.0, 4.0, 7.0), ("x · inner", 2, 2, 2)], None),
        ("{arm}.x", [("arm", 5.0, 4.0, 7.0)], None),
        ("nothing.*", [], None),
    ],
)
def test_a_pattern_takes_figures_by_their_names(pattern, rows, line):
    found, at = plot.matching(list(plot.rows("", REPORT)), pattern)
    assert [tuple(row) for row in found] == rows
    assert at == line


def test_a_report_that_was_kept_is_drawn(tmp_path):
    """In a process of its own: matplotlib keeps fonts open."""
    picture = tmp_path / "a.png"
    command = [sys.executable, SCRIPT, RESULTS / "tiers-cpu.json", picture, "GB/s=gb_per_s.*@1"]
    subprocess.run(command, check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("picture", "panel", "says"),
    [
        ("a.gif", "a=gb_per_s.*", "draws .png, .svg, .pdf"),
        ("no/such/a.png", "a=gb_per_s.*", "cannot write"),
        ("a.png", "a=gb_per_h.*", "nothing of that is in the report"),
    ],
)
def test_what_cannot_be_drawn_is_told(tmp_path, picture, panel, says):
    command = [sys.executable, SCRIPT, RESULTS / "tiers-cpu.json", tmp_path / picture, panel]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode
    assert says in ran.stderr


def test_every_script_that_keeps_a_report_draws_it():
    """By ``option``, which adds both: none has a ``--json`` of its own."""
    own = [path.name for path in SCRIPT.parent.glob("*.py") if '"--json"' in path.read_text()]
    assert own == [SCRIPT.name]
