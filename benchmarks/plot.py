"""Draw a benchmark's figures as a picture: a row a figure, a panel a unit. Needs kvtier[plot].

    python benchmarks/plot.py REPORT.json PICTURE.png 'TITLE=PATTERN[@LINE]'...

Scripts here have ``--json`` and ``--plot`` by ``option`` and ``kept``. From a shell it draws a
report that was kept:
``python benchmarks/plot.py benchmarks/results/tiers-cpu.json a.png 'GB/s=gb_per_s.*'``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.cli.bench_plot import save
from kvtier.cli.output import check_plot
from kvtier.errors import ConfigError

INK, PALE, BAR, LIMIT = "#222222", "#6B6B6B", "#0072B2", "#D55E00"
CENTRES = ("median", "p50", "mean")
ENDS = (("min", "max"), ("low", "high"), ("p10", "p90"), ("p25", "p75"), ("least", "most"))
WIDTH, ROW, ABOVE = 9.0, 0.27, 0.85  # inches
WIDE = 30.0  # times apart from which on figures want a logarithmic axis
MOST = 40  # rows of a panel


class Row(NamedTuple):
    """One figure: in the middle, and from where to where it was seen."""

    name: str
    middle: float
    low: float
    high: float


def option(arguments: argparse.ArgumentParser) -> None:
    """Add ``--json`` and ``--plot``."""
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    arguments.add_argument(
        "--plot", type=file, metavar="FILE.png", help="draw it; needs kvtier[plot]"
    )


def file(text: str) -> Path:
    """Return where a picture goes: found out before minutes of work."""
    try:
        check_plot(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def kept(report: Any, asked: argparse.Namespace, panels: Mapping[str, str]) -> None:
    """Write and draw a report where that was asked for. panels: see ``draw``."""
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(report, asked.plot, panels)


def draw(report: Any, path: Path | None, panels: Mapping[str, str]) -> None:
    """Draw what a report has, a panel for each title; nothing where there is no path.

    panels: for each title a pattern of the dotted names of figures, such as ``get.*.gb_per_s`` or
    ``arms.*.{p50,p99}``, with ``@1.5`` behind it for a line there. A figure is a number,
    a list of what was measured, or an object with ``median`` or ``p50``.
    """
    if path is None:
        return
    from matplotlib.figure import Figure

    figures = list(rows("", report))
    drawn = {title: matching(figures, pattern) for title, pattern in panels.items()}
    drawn = {title: one for title, one in drawn.items() if one[0]}
    if not drawn:
        raise SystemExit("nothing of that is in the report; --plot draws nothing")
    heights = [ABOVE + ROW * len(found) for found, _ in drawn.values()]
    picture = Figure((WIDTH, sum(heights)), dpi=130, layout="constrained")
    axes = picture.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)[:, 0]
    for one, (title, (found, limit)) in zip(axes, drawn.items(), strict=True):
        panel(one, title, found, limit)
    axes[-1].set_xlabel("dot: the median; bar: how far it was spread", color=PALE, fontsize=8.5)
    save(picture, path)


def rows(name: str, value: Any) -> Iterator[Row]:
    """Yield the figures of a report, by their dotted names."""
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        yield Row(name, value, value, value)
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(one, (int, float)) for one in value):
            yield Row(name, statistics.median(value), min(value), max(value))
    elif isinstance(value, Mapping):
        centre = next((one for one in CENTRES if isinstance(value.get(one), (int, float))), "")
        ends = next((pair for pair in ENDS if pair[0] in value and pair[1] in value), ("", ""))
        if centre:
            middle = value[centre]
            yield Row(name, middle, value.get(ends[0], middle), value.get(ends[1], middle))
        for key, inner in value.items():
            if not (centre and key in {*CENTRES, *ends}):
                yield from rows(f"{name}.{key}" if name else str(key), inner)


def matching(figures: list[Row], pattern: str) -> tuple[list[Row], float | None]:
    """Return the rows of a pattern, called by what is open in it, and where a line is."""
    pattern, _, limit = pattern.partition("@")
    shape = re.escape(pattern).replace(r"\*", "(.+)")
    shape = re.sub(r"\\{(.+?)\\}", lambda found: f"({found[1].replace(',', '|')})", shape)
    found = [(re.fullmatch(shape, row.name), row) for row in figures]
    named = [
        row._replace(name=called(".".join(match.groups() or (row.name,))))
        for match, row in found
        if match
    ]
    return named[:MOST], float(limit) if limit else None


def called(name: str) -> str:
    """Return what a dotted name is called beside a row."""
    return " · ".join(part.replace("_", " ").strip() for part in name.split("."))


def panel(axes: Any, title: str, found: list[Row], limit: float | None) -> None:
    """Draw rows: a dot in the middle, a line from end to end, the number beside."""
    least, most = min(row.low for row in found), max(row.high for row in found)
    if limit is not None:
        least, most = min(least, limit), max(most, limit)
        axes.axvline(limit, color=LIMIT, lw=1.2, ls=(0, (4, 3)))
        title += f"  (line: {limit:g})"
    if least > 0 and most > WIDE * least:
        axes.set_xscale("log")
        axes.set_xlim(least / 1.3, most * 1.3)
    else:
        axes.set_xlim(min(least * 1.05, 0), most * 1.05 or 1)
    for at, row in enumerate(found):
        axes.plot((row.low, row.high), (at, at), color=BAR, lw=4, alpha=0.35, solid_capstyle="butt")
        axes.plot(row.middle, at, "o", color=BAR, ms=6)
        axes.text(
            *(1.01, at, f"{row.middle:,.3g}" if row.middle < 1000 else f"{row.middle:,.0f}"),
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=9,
            color=INK,
        )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_yticks(range(len(found)), [row.name for row in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False, colors=PALE, labelsize=9)
    axes.grid(visible=True, axis="x", color="#EEEEEE", lw=0.8)
    axes.set_axisbelow(True)


def main() -> None:
    """Draw a report that was kept."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("report", type=Path)
    arguments.add_argument("picture", type=file)
    arguments.add_argument("panels", nargs="+", metavar="TITLE=PATTERN[@LINE]")
    options = arguments.parse_args()
    panels = dict(text.rpartition("=")[::2] for text in options.panels)
    draw(json.loads(options.report.read_text()), options.picture, panels)


if __name__ == "__main__":
    main()
