"""A benchmark's report as tables."""

from __future__ import annotations

import math
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.bench.report import ArmReport, Ratio, Report
from kvtier.units import format_bytes

__all__ = ["show"]

_WIDTH: Final = 80
_BAR: Final = 10  # characters of the slowest arm's bar
_EIGHTHS: Final = "▏▎▍▌▋▊▉█"


def show(report: Report) -> None:
    """Print the report on stdout: how fast, then from where, each within 80 columns."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH  # a file has none
    title = f"{report.workload}, {report.arms[0].requests} requests an arm"
    for table in (_times_table(report), _sources_table(report)):
        table.title, title = title, ""
        console.print(table)
    for line in _notes(report):
        console.print(line, highlight=False, soft_wrap=True)


def _table(*columns: str) -> Table:
    """Return a table with right-aligned columns after the first; one without a name is a bar."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title_justify="left")
    table.add_column("arm", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    return table


def _times_table(report: Report) -> Table:
    table = _table("TTFT p50", "p99", "", "sooner", "TPOT p50")
    table.add_column("answers")
    slowest = max(arm.ttft_ms.p50 for arm in report.arms)
    right = report.arms[0].tokens_sha256
    for arm in report.arms:
        table.add_row(
            arm.name,
            _ms(arm.ttft_ms.p50),
            _ms(arm.ttft_ms.p99),
            _bar(arm.ttft_ms.p50 / slowest),
            _times(arm.times_sooner_than_recompute),
            _ms(arm.tpot_ms.p50) if arm.tpot_ms else "",
            "✓ same" if arm.tokens_sha256 == right else "✗ other",
        )
    return table


def _sources_table(report: Report) -> Table:
    table = _table("tokens found", "recomputed")
    table.add_column("bytes counted by the system")
    for arm in report.arms:
        table.add_row(
            arm.name,
            ", ".join(f"{count:,} {tier}" for tier, count in arm.hit_tokens.items()) or "0",
            f"{arm.recomputed_tokens:,}",
            _counted(arm),
        )
    return table


def _notes(report: Report) -> list[str]:
    lines = [
        f"{arm.name}: TTFT {_spread(arm.ttft_over_recompute)} and throughput "
        f"{_spread(arm.throughput_over_recompute)} of recompute's"
        for arm in report.arms
        if arm.ttft_over_recompute and arm.throughput_over_recompute
    ]
    if report.prefill_over_plain_torch_spread:
        spread = _spread(report.prefill_over_plain_torch_spread)
        lines.append(f"The engine's prefill runs at {spread} of plain torch's speed.")
    if report.spoilt:
        met = ", ".join(f"{name} {count}" for name, count in report.spoilt.items())
        lines.append(f"Requests to the bucket, by what became of them: {met}.")
    threads = report.args["threads"]
    how = f"in {report.engine}, float32" if report.engine else "float32 with KV in bfloat16"
    here, bound = report.machine, "model and a CPU; it does not show the speed of a GPU."
    if here.gpu:
        bound = "model and a GPU that several processes share."
    lines.append(
        f"{report.model} on {here.gpu or here.cpu}, {threads} torch thread(s), {how}. "
        f"It shows that answers are exact and where the bytes come from, on a small {bound}"
    )
    return lines


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"  # noqa: PLR2004  (digits)


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}x"


def _spread(found: Ratio) -> str:
    return f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f}, {found.pairs} pairs)"


def _bar(share: float) -> str:
    eighths = max(1, math.ceil(share * _BAR * 8))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8 - 1] if eighths % 8 else "")


def _counted(arm: ArmReport) -> str:
    parts = []
    for tier, system, what in (
        ("lmdb", arm.disk_read_bytes, "disk"),
        ("s3", arm.s3_sent_bytes, "S3"),
    ):
        claimed = arm.claimed_bytes.get(tier, 0)
        if system or claimed:
            said = "not counted" if system is None else format_bytes(system)
            parts.append(f"{what}: {said}" + (f", {format_bytes(claimed)} claimed" * bool(claimed)))
    return "; ".join(parts) or "0 B"
