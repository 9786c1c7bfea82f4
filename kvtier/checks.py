"""Checks of what callers pass: is it of the kind that is meant, and a number that can be?

A bool is no number here, though Python counts with it; numpy's numbers are. What is wrong with a
call is a MisuseError, what is wrong with a setting is a ConfigError: `error` says which.
"""

from __future__ import annotations

import errno
import math
from numbers import Integral, Real
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any, Final

from kvtier.errors import KvtierError, MisuseError

_SHOWN: Final = 80  # characters of what was passed that an error repeats

_MOST_SETTINGS: Final = 16 << 20  # bytes of a file of them


def read_settings(path: Path) -> bytes:
    """Return what a file of settings holds, or a pipe.

    Raises OSError, also for what is larger than any: a device has no end, and took all memory.
    """
    with path.open("rb") as file:
        found = file.read(_MOST_SETTINGS + 1)
    if len(found) > _MOST_SETTINGS:
        raise OSError(errno.EFBIG, f"it is larger than {_MOST_SETTINGS >> 20} MiB")
    return found


def what_is_wrong(error: Exception) -> str:
    """Return why a text is no JSON, or no TOML, in words that are about the text."""
    of_python = type(error) in (ValueError, RecursionError)  # its limits, and how to raise them
    return "too long a number, or too deep" if of_python else str(error)


def is_number(value: Any) -> bool:
    """Say whether it is a real number; infinity is one, NaN is none."""
    return _counts(value, Real) and bool(value >= -math.inf)


def check_kind(
    what: str, value: object, kind: type, error: type[KvtierError] = MisuseError
) -> None:
    """Raise `error` for what is not of that kind."""
    if not isinstance(value, kind):
        raise error(f"{what} must be a {kind.__name__}, not {shown(value)}")


def check_whole(
    what: str,
    value: Any,
    least: int = 0,
    most: int | None = None,
    error: type[KvtierError] = MisuseError,
) -> None:
    """Raise `error` for what is no whole number from `least` to `most`."""
    if not _counts(value, Integral) or value < least or (most is not None and value > most):
        end = "on" if most is None else f"to {most}"
        raise error(f"{what} must be a whole number from {least} {end}, not {shown(value)}")


def check_first(first: object) -> None:
    """Raise MisuseError for what is no number of a chunk."""
    check_whole("the first chunk", first)


def check_seconds(what: str, seconds: Any) -> None:
    """Raise MisuseError for what no clock can count; to wait for less than nothing is allowed."""
    if not is_number(seconds) or not -TIMEOUT_MAX <= seconds <= TIMEOUT_MAX:
        raise MisuseError(f"{what} of {shown(seconds)} seconds is no time to wait")


def check_wait(what: str, seconds: Any) -> None:
    """Raise MisuseError for what no clock can count, and for what is negative."""
    check_seconds(what, seconds)
    if seconds < 0:
        raise MisuseError(f"{what} of {seconds} seconds is no time to wait")


def check_ahead(what: str, seconds: Any) -> None:
    """Raise MisuseError unless `seconds`, which a clock can count, lie in the future."""
    if not is_number(seconds) or not 0 < seconds <= TIMEOUT_MAX:
        raise MisuseError(f"{what} lies {shown(seconds)} seconds ahead; it must be in the future")


def _counts(value: object, kind: type) -> bool:
    plain = type(value)  # an abstract class takes a microsecond to ask
    if plain is int or (plain is float and kind is Real):
        return True
    return isinstance(value, kind) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Return what an error repeats of what was passed: its beginning."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
