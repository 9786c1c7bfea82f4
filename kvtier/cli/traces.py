"""Reading a trace for a command: with progress, and with a word on what is missing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from kvtier.planning.files import TraceFiles
    from kvtier.planning.trace import Trace

__all__ = ["BLOCK_SIZE", "SKIP_BAD", "read"]

BLOCK_SIZE: Final = click.option(
    "--block-size",
    type=click.IntRange(min=1),
    help="Tokens of a block: what the trace's hashes are of.  [default: as recorded, or 512]",
)
SKIP_BAD: Final = click.option(
    "--skip-bad", is_flag=True, help="Count bad lines instead of refusing the file."
)


def read(
    files: TraceFiles,
    block_size: int | None,
    tell: Callable[[str, int, int], None],
    *,
    skip_bad: bool,
) -> Trace:
    """Read a trace, and tell on stderr what was left out. Raises ConfigError."""
    from kvtier.planning.trace import read_trace

    name = f"reading {files.path.name}"
    trace = read_trace(
        files, block_size, skip_bad=skip_bad, tell=lambda done, count: tell(name, done, count)
    )
    if len(files.paths) > 1:
        click.echo(f"{trace.name}: of {len(files.paths)} files", err=True)
    if trace.skipped:
        click.echo(f"{trace.name}: {trace.skipped:,} bad lines were left out", err=True)
    for note in trace.notes:
        click.echo(note, err=True)
    return trace
