"""Where a report goes: a file that can be written or stdout."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from kvtier.errors import ConfigError

_SUFFIXES: Final = (".png", ".svg", ".pdf")


class _ReportFile(click.ParamType[str]):
    """A file that can be written, or - for stdout: found out before minutes of work."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        del param, ctx
        text = str(value)
        if text != "-":
            check_file(Path(text))
        return text


REPORT: Final = _ReportFile()


class _PlotFile(click.ParamType[str]):
    """A file that a plot can be drawn into: found out before minutes of work."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        del param, ctx
        check_plot(str(value))
        return str(value)


PLOT: Final = _PlotFile()


def check_plot(path: str) -> None:
    """Raise ConfigError when no plot can be drawn into this file."""
    if find_spec("matplotlib") is None:
        raise ConfigError('--plot needs matplotlib: pip install "kvtier[plot]"')
    if Path(path).suffix not in _SUFFIXES:
        raise ConfigError(f"--plot draws {', '.join(_SUFFIXES)}, not {path!r}")
    check_file(Path(path))


def check_file(path: Path) -> None:
    """Raise ConfigError for a file that cannot be written."""
    try:
        was_there = path.exists()
        path.open("a").close()
        if not was_there:
            path.unlink()  # leave no empty one
    except (OSError, ValueError) as error:
        raise not_written(path, error) from error


def write_report(found: object, file: str) -> None:
    """Write plain data as JSON, to stdout for -. Raises ConfigError where that cannot be done."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"
    if file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise not_written(Path(file), error) from error


def drop_stdout() -> None:
    """Send what is left to say nowhere, where stdout takes nothing any more."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


def not_written(path: Path, error: Exception) -> ConfigError:
    """Return what to say of a file that could not be written."""
    cause = getattr(error, "strerror", None) or error
    return ConfigError(f"cannot write {path} ({cause}); name another file")
