"""Which way a copy goes: defaults, what was measured, and files that are none."""

from __future__ import annotations

import itertools

import pytest

from kvtier.device.paths import DEFAULT, Choice, Speed, Table, kept_table, table_path
from kvtier.errors import ConfigError

KIB = 1 << 10


def test_before_anything_is_measured_long_runs_are_batched():
    for role in ("load", "store"):
        assert DEFAULT.choose(role, 64 * 32 * KIB, 64).way == "batch"
    assert DEFAULT.choose("store", 64 * 8 * KIB, 64).way == "staged"
    assert DEFAULT.choose("load", 64 * 8 * KIB, 64) == Choice("direct", 8)


def test_a_driver_without_batched_copies_has_other_ways():
    assert DEFAULT.choose("store", 64 * 32 * KIB, 64, batches=False).way == "staged"
    assert DEFAULT.choose("load", 64 * 32 * KIB, 64, batches=False).way == "direct"


def measured() -> Table:
    """A GPU whose batched copies are best from 64 KiB on, where they are not too many."""
    speeds = [
        Speed(role, size, runs, Choice(way), fast)
        for role, size, runs in itertools.product(
            ("load", "store"), (8 * KIB, 64 * KIB), (16, 4096)
        )
        for way, fast in (
            ("batch", 50.0 if size == 64 * KIB and runs == 16 else 5.0),
            ("direct", 30.0 if role == "load" else 20.0),
            ("staged", 25.0),
        )
    ]
    return Table("a GPU", tuple(speeds))


@pytest.mark.parametrize(
    ("role", "size", "runs", "way"),
    [
        ("load", 64 * KIB, 16, "batch"),
        ("load", 50 * KIB, 20, "batch"),
        ("load", 200 * KIB, 1, "batch"),
        ("load", 64 * KIB, 9000, "direct"),
        ("store", 64 * KIB, 9000, "staged"),
        ("load", 4 * KIB, 16, "direct"),
        ("store", 20 * KIB, 4096, "staged"),
    ],
)
def test_the_fastest_of_the_nearest_that_was_measured_is_taken(role, size, runs, way):
    assert measured().choose(role, size * runs, runs).way == way


def test_what_the_driver_does_not_have_is_not_taken():
    assert measured().choose("load", 16 * 64 * KIB, 16, batches=False).way == "direct"


def test_a_table_is_kept_for_its_gpu_alone(tmp_path):
    table = measured()
    path = table.keep(tmp_path / "new")
    assert path == table_path(tmp_path / "new", "a GPU")
    assert kept_table(tmp_path / "new", "a GPU") == table
    assert kept_table(tmp_path / "new", "another GPU") == Table("another GPU")
    assert kept_table(tmp_path, "a GPU") == Table("a GPU")
    assert table_path(tmp_path / "new", "a/GPU") == path, "whose names are not told apart there"
    assert kept_table(tmp_path / "new", "a/GPU") == Table("a/GPU")
    assert list(path.parent.iterdir()) == [path]
    assert path.parent.stat().st_mode & 0o077 == 0


def test_another_version_is_no_table_of_today(tmp_path):
    Table("a GPU", measured().speeds, version=0).keep(tmp_path)
    assert kept_table(tmp_path, "a GPU") == Table("a GPU")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"gpu": "a GPU", "speeds": [1]}',
        (
            '{"gpu": "a GPU", "speeds": [{"role": "load", "run_bytes": 0, "runs": 1, '
            '"choice": {"way": "batch"}, "gb_per_s": 1}]}'
        ),
        (
            '{"gpu": "a GPU", "speeds": [{"role": "load", "run_bytes": 1, "runs": 1, '
            '"choice": {"way": "magic"}, "gb_per_s": 1}]}'
        ),
        (
            '{"gpu": "a GPU", "speeds": [{"role": "load", "run_bytes": 1, "runs": 1, '
            '"choice": {"way": "batch"}, "gb_per_s": -1}]}'
        ),
        '{"gpu": "a GPU", "of a later version": ' + "[" * 9999,
    ],
)
def test_a_file_that_is_no_table_is_told_with_its_remedy(tmp_path, text):
    table_path(tmp_path, "a GPU").write_text(text)
    with pytest.raises(ConfigError, match=r"is no table of copy paths .*kvtier doctor --device"):
        kept_table(tmp_path, "a GPU")
