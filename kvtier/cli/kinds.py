"""Kinds of values that options take."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Final

import click

from kvtier.errors import ConfigError
from kvtier.retention import Retention
from kvtier.units import parse_seconds

_LEAST_RATE: Final = 1e-6
_MOST_RATE: Final = 1e12


class Count(click.IntRange):
    """A whole number from `least` to `most`."""

    name = "whole number"

    def __init__(self, least: int = 1, most: int | None = None) -> None:
        super().__init__(min=least, max=most)


class _Part(click.FloatRange):
    """A fraction below one, and not NaN, which no comparison refuses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        part = super().convert(value, param, ctx)
        if math.isnan(part):
            self.fail(f"{value} is not a number.", param, ctx)
        return part


PART: Final = _Part(0, 1, max_open=True)


class _AboveZero(click.types.FloatParamType):
    """A number of something in a second: above nothing, and neither endless nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not _LEAST_RATE <= number <= _MOST_RATE:
            self.fail(f"{value} is no number from {_LEAST_RATE:g} to {_MOST_RATE:g}.", param, ctx)
        return number


ABOVE_ZERO: Final = _AboveZero()


class _Directory(click.Path):
    """A path. An empty one is a variable that was not set, and would mean the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            raise ConfigError(f"{param.opts[0] if param else 'the directory'} is empty")
        try:
            return super().convert(value, param, ctx)
        except ValueError as error:  # a name that the system cannot have
            raise ConfigError(f"{str(value)!r} names no directory that can be used") from error


DIRECTORY: Final = _Directory(path_type=Path)


class _Ttl(click.types.StringParamType):
    """A time above nothing, in seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        del param, ctx
        seconds = value if isinstance(value, float) else parse_seconds(value)
        if not seconds > 0:
            raise ConfigError(f"a ttl of {value} keeps nothing; leave it out to keep all")
        return seconds


TTL: Final = _Ttl()


class _Priority(click.types.StringParamType):
    """Tokens [start, stop) of every prompt, and their priority: start, stop or None, level."""

    name = "priority"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        del param, ctx
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d*):(\d*)=(-?\d+)", value)
        if found is None:
            raise ConfigError(f"a priority looks like 0:2048=10, or 2048:=-1, not {value!r}")
        start, stop, level = found.groups()
        one = Retention(int(start or 0), int(stop) if stop else None, int(level))
        return one.start, one.stop, one.priority


PRIORITY: Final = _Priority()
