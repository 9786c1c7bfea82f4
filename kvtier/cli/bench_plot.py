"""A benchmark's report as a picture: how soon, how much was found, and what was read, by arm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.bench.report import ArmReport, Report, percentile
from kvtier.cli.output import not_written
from kvtier.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = {
    "recompute": "#8C8C8C",
    "hbm": "#0072B2",
    "dram": "#009E73",
    "lmdb": "#E69F00",
    "s3": "#CC79A7",
}
"""Of Okabe and Ito's palette, which people with any colour vision tell apart."""

_INK: Final = "#222222"
_PALE: Final = "#6B6B6B"
_WIDTH: Final = 12.0
_ROW: Final = 0.62  # inches of an arm
_DPI: Final = 150
_MOST_DOTS: Final = 64
_WIDE: Final = 8.0  # times apart from which on times want a logarithmic axis
_TIERS: Final = ("hbm", "dram", "lmdb", "s3")
_BELOW: Final = _TIERS[1:]


def draw_report(report: Report, path: Path) -> None:
    """Draw a report into a file. Raises ConfigError where it cannot be written."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    arms = report.arms
    read = any(any(_read(arm, report).values()) for arm in arms)
    shares = (5.6, 3.6, 2.4) if read else (5.6, 3.6)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06)
    figure = Figure((_WIDTH, 2.15 + _ROW * len(arms)), dpi=_DPI, layout=layout)
    panels = figure.subplots(1, len(shares), width_ratios=shares, sharey=True, squeeze=False)[0]
    _times(panels[0], arms)
    _sources(panels[1], arms, report.ceiling)
    if read:
        _bytes(panels[2], report)
    panels[0].set_yticks(range(len(arms)), [arm.name for arm in arms])
    panels[0].set_ylim(len(arms) - 0.4, -0.6)
    for axes in panels:
        _clean(axes)
    for label, arm in zip(panels[0].get_yticklabels(), arms, strict=True):
        label.set(color=_dark(arm.name), fontweight="bold", fontsize=11)
    for row, arm in enumerate(arms):
        size = report.capacities.get(arm.name)
        if size is not None:
            panels[0].text(
                *(-0.024, row + 0.3, format_bytes(size, 3)),
                transform=panels[0].get_yaxis_transform(),
                ha="right",
                va="center",
                fontsize=8.5,
                color=_PALE,
            )
    _words(figure, report)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a picture. Raises ConfigError where that cannot be done."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise not_written(path, error) from error


def finding(report: Report) -> str:
    """Return what the picture shows, in one line."""
    tiers = [arm for arm in report.arms if arm.name not in ("recompute", "hbm")]
    if report.problems:
        return f"This run has problems: {len(report.problems)}, of which the first is below"
    if report.ceiling is not None:
        found = ", ".join(
            f"{'' if arm.name == 'hbm' else '+ '}{arm.name} {arm.hit_rate:.1f}%"
            for arm in report.arms
            if arm.name != "recompute"
        )
        return f"Hit rate: {found or 'nothing kept'}; {report.ceiling:.1f}% is possible"
    ratios = {arm.name: arm.ttft_over_recompute.median for arm in tiers if arm.ttft_over_recompute}
    if ratios:
        worst = max(ratios, key=lambda name: ratios[name])
        return f"Where nothing is reused, {worst} takes {ratios[worst]:.3g} times recompute's TTFT"
    sooner = {
        arm.name: arm.times_sooner_than_recompute
        for arm in tiers
        if arm.times_sooner_than_recompute
    }
    if not sooner:
        return "Time to first token, by where the KV comes from"
    said = ", ".join(f"{times:.3g}x from {name}" for name, times in sooner.items())
    return f"The first token, beside computing it: {said} sooner"


# ---- the panels


def _times(axes: Axes, arms: Sequence[ArmReport]) -> None:
    """Draw each arm's times: all of them where they are few, quartiles and tails, the median."""
    times = {arm.name: sorted(arm.ttft_each_ms) for arm in arms}
    least, most = min(each[0] for each in times.values()), max(each[-1] for each in times.values())
    wide = most > _WIDE * least
    if wide:
        axes.set_xscale("log")
        axes.set_xlim(least / 1.25, most * 1.25)
    else:
        axes.set_xlim(0, most * 1.05)
        axes.locator_params(axis="x", nbins=6)
    beside = partial(axes.text, transform=axes.get_yaxis_transform(), va="center")
    for row, arm in enumerate(arms):
        each, colour = times[arm.name], COLOURS[arm.name]
        low, quarter, half, three, high = (percentile(each, part) for part in (5, 25, 50, 75, 95))
        if len(each) <= _MOST_DOTS:
            low, high = each[0], each[-1]
            axes.plot(each, [row + 0.24] * len(each), "o", color=colour, ms=3.5, alpha=0.55, mew=0)
        axes.plot((low, high), (row, row), color=colour, lw=2, solid_capstyle="butt", alpha=0.7)
        axes.plot((quarter, three), (row, row), color=colour, lw=9, solid_capstyle="butt")
        axes.plot(half, row, "o", color="white", mec=_INK, ms=7, mew=1.4, zorder=5)
        tail = percentile(each, 99)
        beside(1.02, row - 0.08, _time(half), fontsize=10.5, fontweight="bold", color=_INK)
        beside(1.02, row + 0.24, f"p99 {_time(tail)}", fontsize=8.5, color=_PALE)
        if arm.cold_ttft_ms is not None:
            axes.plot(arm.cold_ttft_ms.p50, row - 0.27, "D", color=colour, mfc="none", ms=5)
    axes.xaxis.set_major_formatter(lambda value, _: _time(value))
    axes.xaxis.set_minor_formatter(lambda *_: "")
    cold = "; ◇ at the first reading" if arms[0].cold_ttft_ms else ""
    span = "5 to 95%" if len(arms[0].ttft_each_ms) > _MOST_DOTS else "all"
    axes.set_xlabel(f"time to first token: ○ median, bar 25 to 75%, line {span}{cold}")


def _sources(axes: Axes, arms: Sequence[ArmReport], ceiling: float | None) -> None:
    """Draw where the prompt tokens came from, in percent; ceiling: what at most could be found."""
    seen = [tier for tier in _TIERS if any(arm.hit_rates.get(tier) for arm in arms)]
    left = [0.0] * len(arms)
    for tier in (*seen, "recompute"):
        widths = [
            arm.hit_rates.get(tier, 0.0) if tier != "recompute" else 100 - arm.hit_rate
            for arm in arms
        ]
        pale = tier == "recompute"
        axes.barh(
            range(len(arms)),
            widths,
            left=left,
            height=0.5,
            color="#E4E4E4" if pale else COLOURS[tier],
            label="computed" if pale else f"from {tier}",
        )
        left = [before + width for before, width in zip(left, widths, strict=True)]
    for row, arm in enumerate(arms):
        axes.text(102, row, f"{arm.hit_rate:.1f}% found", va="center", color=_INK, fontsize=9)
    if ceiling is not None:
        axes.axvline(ceiling, color=_INK, lw=1.2, ls=(0, (4, 3)))
        axes.text(ceiling, len(arms) - 0.44, " at most", va="bottom", color=_INK, fontsize=8.5)
    axes.set_xlim(0, 136)
    axes.set_xticks((0, 25, 50, 75, 100), ("0", "25", "50", "75", "100%"))
    axes.set_xlabel("prompt tokens, by where they came from")
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=len(seen) + 1,
        frameon=False,
        fontsize=8.5,
        handlelength=0.9,
        handletextpad=0.4,
        columnspacing=1.0,
        borderaxespad=0.1,
    )


def _bytes(axes: Axes, report: Report) -> None:
    """Draw the bytes that were read from each tier below HBM."""
    read = [_read(arm, report) for arm in report.arms]
    left = [0.0] * len(read)
    for tier in _BELOW:
        widths = [float(one.get(tier, 0)) for one in read]
        axes.barh(range(len(read)), widths, left=left, height=0.5, color=COLOURS[tier])
        left = [before + width for before, width in zip(left, widths, strict=True)]
    most = max(left)
    for row, total in enumerate(left):
        said = format_bytes(int(total), 3) if total else "none"
        colour = _INK if total else _PALE
        axes.text(total + most * 0.03, row, said, va="center", color=colour, fontsize=9)
    axes.set_xlim(0, most * 1.55)
    axes.set_xticks(())
    axes.set_xlabel("bytes read from the tiers")


def _read(arm: ArmReport, report: Report) -> dict[str, int]:
    """Return the bytes that came from each tier: of DRAM what was loaded, else what was fetched."""
    dram = arm.hit_tokens.get("dram", 0) * report.bytes_per_token
    return {"dram": dram, **{tier: arm.claimed_bytes.get(tier, 0) for tier in ("lmdb", "s3")}}


def _words(figure: Figure, report: Report) -> None:
    """Say above the picture what it shows, and below what it is of."""
    figure.suptitle(finding(report), x=0.012, ha="left", fontsize=14, fontweight="bold", color=_INK)
    count = len(report.arms[0].ttft_each_ms)
    threads = report.args["threads"]
    of = (
        f"{report.workload}: {count:,} timed requests an arm; {report.engine or 'kvtier'} with "
        f"{report.model} on {report.machine.cpu}, {threads} thread{'s' * (threads != 1)}; "
        f"hit rates are of the {report.denominator}"
    )
    if report.problems:
        of = f"problem: {report.problems[0]}\n{of}"
    figure.supxlabel(of, x=0.012, ha="left", fontsize=8.5, color=_PALE)


# ---- words and looks


def _time(milliseconds: float) -> str:
    if milliseconds >= 1000:  # noqa: PLR2004  (a second)
        seconds = milliseconds / 1000
        return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"  # noqa: PLR2004
    return f"{milliseconds:.3g} ms"


def _dark(name: str) -> str:
    """Return an arm's colour, dark enough to be read as text."""
    colour = COLOURS[name]
    parts = [int(colour[at : at + 2], 16) * 7 // 10 for at in (1, 3, 5)]
    return "#" + "".join(f"{part:02X}" for part in parts)


def _clean(axes: Any) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#BBBBBB")
    axes.tick_params(left=False, colors=_PALE, labelsize=9)
    axes.xaxis.label.set(color=_PALE, fontsize=9)
    axes.grid(visible=True, axis="x", color="#EEEEEE", lw=0.8)
    axes.set_axisbelow(True)
