"""Sizes and durations as text, and the tree of errors."""

from __future__ import annotations

import inspect

import pytest

from kvtier import errors
from kvtier.errors import ConfigError, KvtierError, StoreError, check_known, unknown
from kvtier.units import (
    format_bytes,
    format_least,
    format_seconds,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1B", 1),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        (" 1.5MiB ", 3 << 19),
        ("500MB", 500_000_000),
        ("1.005kB", 1005),  # 1004.9999 in binary floating point
        ("9007199254740993B", 9007199254740993),  # beyond the whole numbers of a double
        ("1048576TiB", 1 << 60),
    ],
)
def test_a_size_is_read_exactly(text: str, value: int):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "8", "GiB", "8 G", "8GB/s", "-8GiB", "8e3MB", "0GiB", "0.5B", "1048577TiB"),
        *("٣GiB", "1_0B", "infGiB", "nanB", "8GiB8GiB", ".5GiB", "8.GiB", "9" * 400 + "GiB"),
    ],
)
def test_what_is_no_size_is_one_error_that_shows_how_to_write_it(text: str):
    with pytest.raises(ConfigError, match=r"GiB|EiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"), [("20ms", 0.02), ("1.5s", 1.5), ("8us", 8e-6), ("2m", 120), ("1H", 3600)]
)
def test_a_duration_is_read(text: str, value: float):
    assert parse_seconds(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("text", ["", "20", "ms", "-1s", "1d", "9" * 400 + "s", "1.2.3s"])
def test_what_is_no_duration_is_an_error(text: str):
    with pytest.raises(ConfigError, match="20ms"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (8 << 30, "8 GiB"), (1 << 60, "1048576 TiB")],
)
def test_bytes_are_written_in_the_largest_unit(count: int, text: str):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 us"), (8e-6, "8 us"), (0.0351, "35.1 ms"), (0.9996, "1000 ms"), (1234.4, "1234 s")],
)
def test_seconds_are_written_without_exponents(seconds: float, text: str):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("count", [1, 1000, 1 << 20, 123_456_789, (1 << 40) - 1, 1 << 50])
def test_written_bytes_read_back_to_four_digits(count: int):
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=1e-3)


@pytest.mark.parametrize("count", [1, 1023, 2_424_832, 123_456_789, (1 << 40) + 1, (1 << 60) - 1])
def test_at_least_is_rounded_up_and_by_little(count: int):
    """To give what a message asks for is enough, which a rounded figure may not be."""
    assert count <= parse_bytes(format_least(count)) <= count * 1.001
    assert parse_bytes(format_bytes(2_424_832)) < 2_424_832 <= parse_bytes(format_least(2_424_832))


# ---------------------------------------------------------------------------------------- errors


def test_every_error_is_in_the_tree_and_in_its_drawing():
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    for kind in kinds:
        if kind.__module__ == errors.__name__:
            assert issubclass(kind, KvtierError)
            assert kind.__name__ in (errors.__doc__ or "")


def test_what_a_store_says_is_no_configuration_error():
    kinds = (errors.Unavailable, errors.Full, errors.Corrupt)
    assert all(issubclass(kind, StoreError) for kind in kinds)
    assert not issubclass(StoreError, ConfigError)


def test_the_first_name_that_is_not_known_is_told():
    check_known("tier", ["s3", "lmdb"], ["lmdb", "s3"])
    with pytest.raises(ConfigError, match="unknown tier 'lmbd'; did you mean 'lmdb'"):
        check_known("tier", ["s3", "lmbd", "floppy"], ["lmdb", "s3"])


def test_an_unknown_name_is_answered_by_the_nearest_or_by_all():
    assert str(unknown("tier", "lmbd", ["s3", "lmdb"])).endswith("did you mean 'lmdb'?")
    assert str(unknown("tier", "floppy", ["s3", "lmdb"])).endswith("choose from: lmdb, s3")
