"""Kinds of values that options take."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from kvtier.errors import ConfigError

__all__ = ["DIRECTORY", "Count"]


class Count(click.IntRange):
    """A whole number from `least` to `most`."""

    name = "whole number"

    def __init__(self, least: int = 1, most: int | None = None) -> None:
        super().__init__(min=least, max=most)


class _Directory(click.Path):
    """A path. An empty one is a variable that was not set, and would mean the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            raise ConfigError(f"{param.opts[0] if param else 'the directory'} is empty")
        return super().convert(value, param, ctx)


DIRECTORY: Final = _Directory(path_type=Path)
