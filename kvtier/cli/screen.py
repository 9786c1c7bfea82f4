"""What a person reads on stdout. No table is cut: a figure that has lost digits is a wrong one."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_FILE_WIDTH: Final = 80  # of lines of words; a file has none of its own
_MOST_WIDTH: Final = 1 << 16


def screen() -> Console:
    """Return stdout, as wide as the terminal, or 80 columns where it is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def best_of(console: Console, *tables: Table) -> Table:
    """Return the first table that fits, or the narrowest where none does."""
    widths = [max(console.width, _width(console, table)) for table in tables]
    return tables[widths.index(min(widths))]


def print_table(console: Console, table: Table) -> None:
    """Print a table whole. Where it does not fit, its lines are as long as they have to be."""
    width, console.width = console.width, max(console.width, _width(console, table))
    try:
        console.print(table)
    finally:
        console.width = width


def _width(console: Console, table: Table) -> int:
    unbounded = console.options.update(max_width=_MOST_WIDTH)
    return Measurement.get(console, unbounded, table).maximum
