"""Sizes and durations as people write them: ``8GiB``, ``512MB``, ``1.5s``, ``20ms``."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from kvtier.errors import ConfigError

_BYTES: Final = {
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "pib": 1 << 50,
    "eib": 1 << 60,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
}
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER: Final = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-zA-Z]*)\s*")
_FRACTION: Final = re.compile(r"[0-9]{1,20}(?:\.[0-9]{1,20})?")
_MAX_BYTES: Final = 1 << 60
_LONGEST_WAIT: Final = 3600.0  # seconds


def parse_bytes(text: str) -> int:
    """Return the bytes that ``8GiB`` or ``500MB`` means; a unit is required.

    Raises ConfigError for anything else, and for less than one byte or more than 1 EiB.
    """
    number, unit = _split(text, "size", "8GiB")
    if unit not in _BYTES:
        raise ConfigError(f"size {text!r} has no known unit; write it like 8GiB, 512MiB or 500MB")
    value = int(number * _BYTES[unit])
    if not 1 <= value <= _MAX_BYTES:
        raise ConfigError(f"size {text!r} is out of range; between 1B and 1EiB is possible")
    return value


def parse_seconds(text: str) -> float:
    """Return the seconds that ``20ms`` or ``1.5s`` means; a unit is required."""
    number, unit = _split(text, "duration", "20ms")
    if unit not in _SECONDS:
        raise ConfigError(f"duration {text!r} has no known unit; write it like 20ms, 1.5s or 2m")
    return float(number) * _SECONDS[unit]


def parse_fraction(value: object) -> float:
    """Return the fraction that ``"10%"``, ``"0.1"`` or ``0.1`` means. Raises ConfigError."""
    text = f"{value:.20f}" if isinstance(value, float) else str(value)
    number, percent = text.removesuffix("%"), text.endswith("%")
    if isinstance(value, bool) or not _FRACTION.fullmatch(number):
        raise ConfigError(f"{value!r} is not a fraction; write it like 10% or 0.1")
    return float(number) / 100 if percent else float(number)


def parse_timeout(text: str) -> float:
    """Return seconds, above zero and not for ever. Raises ConfigError."""
    seconds = parse_seconds(text)
    if not 0 < seconds <= _LONGEST_WAIT:
        raise ConfigError(f"the timeout {text!r} must be above zero and at most 1h, like 5s")
    return seconds


def format_bytes(count: int, digits: int = 4) -> str:
    """Return `count` bytes in the largest binary unit that keeps it at one or more."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= _BYTES[unit.lower()]:
            return f"{_short(count / _BYTES[unit.lower()], digits)} {unit}"
    return f"{count} B"


def format_least(count: int) -> str:
    """Return `count` bytes or little more: who gives "at least 2.313 MiB" gives enough."""
    unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if count >= _BYTES[u.lower()]), "B")
    size = _BYTES[unit.lower()]
    places = 10 ** max(0, 4 - len(str(count // size)))
    return f"{-(-count * places // size) / places:.10g} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration with three significant digits: ``1.2 s``, ``35 ms``, ``8 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_short(seconds / size, 3)} {unit}"
    return f"{_short(seconds / 1e-6, 3)} us"


def _short(number: float, digits: int) -> str:
    """Round to so many significant digits, but never above the point, and without exponent."""
    whole = len(str(int(number)))
    return f"{number:.0f}" if whole >= digits else f"{number:.{digits}g}"


def _split(text: object, kind: str, example: str) -> tuple[Decimal, str]:
    found = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ConfigError(f"{text!r} is not a {kind}; write it like {example}")
    return Decimal(found[1]), found[2].lower()
