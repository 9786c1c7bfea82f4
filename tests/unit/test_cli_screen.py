"""Tables on stdout: whole, however narrow the terminal is and however large the figures are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.table import Table

from kvtier.cli import screen, status
from kvtier.cli.main import run
from kvtier.cli.screen import best_of, print_table
from kvtier.daemon.status import Status

TIERS = ("dram", "lmdb", "mooncake")
LARGE = {
    "tier_used_bytes": 1.123 * 2**40,
    "tier_capacity_bytes": 1.234 * 2**40,
    "tier_parts": 1_234_567,
    "hit_tokens_total": 123_456_789_012,
    "fetched_bytes_total": 1234 * 2**40,
    "spilled_bytes_total": 111.9 * 2**40,
    "tier_errors_total": 12_345,
}
SHOWN = "1.123 TiB 1.234 TiB 1,234,567 123,456,789,012 1234 TiB 111.9 TiB 12,345"


def status_of_a_large_daemon():
    figures = {f'kvtier_{name}{{tier="{t}"}}': one for name, one in LARGE.items() for t in TIERS}
    status._show("/run/kv.sock", Status(1, 1 << 40, TIERS, {}, figures))


def words(text):
    return re.sub(" +", " ", text)


def test_a_large_daemons_status_is_whole(capsys):
    status_of_a_large_daemon()
    said = words(capsys.readouterr().out)
    assert all(f"{tier} {SHOWN}" in said for tier in TIERS)
    assert "…" not in said


def test_twin_rich_cuts_what_does_not_fit(capsys, monkeypatch):
    monkeypatch.setattr(screen, "_width", lambda *_: 0)
    status_of_a_large_daemon()
    assert "…" in capsys.readouterr().out


def test_lines_of_words_are_as_wide_as_before(capsys):
    console = screen.screen()
    wide = Table("x" * 200)
    print_table(console, wide)
    assert console.width == 80
    assert "x" * 200 in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "head"),
    [
        (["--capacity-blocks", "10,20"], "policy 10 20"),
        (
            ["--capacity-blocks", ",".join(map(str, range(1000, 1030)))],
            "blocks lru optimal ceiling",
        ),
        (["--sweep", "--bytes-per-token", "320KiB"], "bytes lru optimal ceiling"),
    ],
)
def test_a_replay_of_many_capacities_is_turned(capsys, options, head):
    assert run(["replay", "workload:rag?documents=50&requests=300", *options]) == 0
    lines = [words(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[2].strip() == head
    assert not any("…" in line for line in lines)


def test_of_tables_that_do_not_fit_the_narrowest_is_taken():
    console = screen.screen()
    small, large, larger = (Table("x" * size) for size in (60, 90, 95))
    assert best_of(console, large, larger) is large
    assert best_of(console, larger, large) is large
    assert best_of(console, large, small) is small
    assert best_of(console, small, Table("x")) is small


FOLDER = Path(screen.__file__).parent
SHORTENS = {"simreport.py"}  # how a guard was missed, which its JSON has whole


def test_all_commands_print_their_tables_so():
    for path in sorted(FOLDER.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "rich.table import Table" in text and path.name not in {"screen.py", *SHORTENS}:
            assert "print_table" in text, path.name
            assert "console.print(table" not in text, path.name
