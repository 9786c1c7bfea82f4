"""Plots of replays: the hit rate of each policy over the capacity, below what is possible."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.cli.output import not_written
from kvtier.planning.replay import OPTIMAL
from kvtier.planning.workloads import PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvtier.planning.replay import Replay

_INCHES: Final = (7.0, 4.5)
_TITLE: Final = 60  # characters of a line
_MARKS: Final = "osD^vP*X<>"


def draw(replays: Sequence[Replay], path: Path) -> None:
    """Draw replays, one beside the other, into a file."""
    from matplotlib.figure import Figure

    width, height = _INCHES
    figure = Figure((width * len(replays), height), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(replays), squeeze=False)[0]
    for one, axes in zip(replays, panels, strict=True):
        _panel(one, axes)
    try:
        figure.savefig(path)
    except OSError as error:
        raise not_written(path, error) from error


def title(trace: str) -> str:
    """Return what a trace is called above its panel: a file without how it is packed."""
    if not trace.startswith(PREFIX):
        return trace.split(".", maxsplit=1)[0] or trace
    return "\n".join(textwrap.wrap(trace.replace("&", " "), _TITLE))


def _panel(found: Replay, axes: Axes) -> None:
    marks = itertools.cycle(_MARKS)
    for policy in dict.fromkeys(one.policy for one in found.results):
        points = [one for one in found.results if one.policy == policy]
        best = policy == OPTIMAL
        axes.plot(
            [one.capacity_blocks for one in points],
            [one.hit_rate_tokens for one in points],
            label="optimum" if best else policy,
            marker="" if best else next(marks),
            color="black" if best else None,
            linewidth=2 if best else 1.2,
            markersize=4,
        )
    axes.axhline(found.ceiling.hit_rate_tokens, color="grey", linestyle="--", label="ceiling")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"capacity, blocks of {found.block_tokens} tokens")
    axes.set_ylabel("hit rate, % of prompt tokens")
    axes.set_title(title(found.trace), parse_math=False)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
