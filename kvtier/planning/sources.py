"""Where requests come from: files that recorded them, or descriptions of a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kvtier.errors import ConfigError
from kvtier.planning.files import TraceFiles, trace_files
from kvtier.planning.trace import Trace, read_trace
from kvtier.planning.workloads import PREFIX, Workload, parse_workload

Source = TraceFiles | Workload

UNITS: Final = {"ms": 1e-3, "s": 1.0}
"""Seconds of what a file's timestamps may be in."""


def sources(named: Iterable[str]) -> list[Source]:
    """Return what was named: the traces of files first, then what ``workload:`` describes.

    Raises ConfigError for a description that is none.
    """
    names = list(named)
    described = [parse_workload(name) for name in names if name.startswith(PREFIX)]
    return [*trace_files(name for name in names if not name.startswith(PREFIX)), *described]


def read_source(
    source: Source,
    block_tokens: int | None,
    *,
    skip_bad: bool,
    time_unit: str,
    tell: Callable[[int, int], None] | None = None,
) -> Trace:
    """Read, or draw, the requests.

    block_tokens: None for the source's own, or what is usual there. time_unit: a key of UNITS, of
    a file's timestamps; those of recordings and of workloads are known. tell: called now and then
    with how much is done, of how much. Raises ConfigError, of a file with line and field, and where
    no prompt fills a block.
    """
    if isinstance(source, Workload):
        trace = source.draw(block_tokens, tell=tell)
    else:
        trace = read_trace(source, block_tokens, skip_bad=skip_bad, tell=tell)
        trace.seconds_per_unit = UNITS["ms" if trace.recording else time_unit]
    if not trace.uses:
        raise ConfigError(
            f"{trace.name}: no prompt fills a block of {trace.block_tokens} tokens, so nothing "
            "could be found again; is --block-size right?"
        )
    return trace
