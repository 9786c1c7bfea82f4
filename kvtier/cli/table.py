"""A benchmark's report as tables."""

from __future__ import annotations

import math
from typing import Final

from rich import box
from rich.table import Table

from kvtier.bench.report import ArmReport, Ratio, Report
from kvtier.cli.screen import print_table, screen
from kvtier.units import format_bytes

_KEPT_UP: Final = 0.9  # of what came; the last ones come late, and so end late
_BAR: Final = 10  # characters of the slowest arm's bar
_EIGHTHS: Final = "▏▎▍▌▋▊▉█"


def show(report: Report) -> None:
    """Print the report on stdout: how fast, then from where, each in 80 columns if it can be."""
    console = screen()
    title = f"{report.workload}, {report.arms[0].requests} requests an arm"
    times = _times_table(report, plain=console.options.ascii_only)
    for table in (times, _sources_table(report)):
        table.title, title = title, ""
        print_table(console, table)
    for line in _notes(report):
        console.print(line, soft_wrap=True)


def _table(*columns: str) -> Table:
    """Return a table with right-aligned columns after the first; one without a name is a bar."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title_justify="left")
    table.add_column("arm", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    return table


def _times_table(report: Report, *, plain: bool) -> Table:
    """Return how fast the arms were. plain: in ASCII."""
    yes, no = ("same", "other") if plain else ("✓ same", "✗ other")
    table = _table("TTFT p50", "p99", "", "sooner", "TPOT p50")
    table.add_column("answers")
    slowest = max(arm.ttft_ms.p50 for arm in report.arms)
    right = report.arms[0].tokens_sha256
    for arm in report.arms:
        table.add_row(
            arm.name,
            _ms(arm.ttft_ms.p50),
            _ms(arm.ttft_ms.p99),
            _bar(arm.ttft_ms.p50 / slowest, plain=plain),
            _times(arm.times_sooner_than_recompute),
            _ms(arm.tpot_ms.p50) if arm.tpot_ms else "",
            yes if arm.tokens_sha256 == right else no,
        )
    return table


def _sources_table(report: Report) -> Table:
    table = _table("hit rate", "tokens found", "computed")
    for name in ("read", "counted"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm in report.arms:
        table.add_row(
            arm.name,
            f"{arm.hit_rate:.1f}%",
            "\n".join(f"{count:,} {tier}" for tier, count in arm.hit_tokens.items()) or "0",
            f"{arm.recomputed_tokens:,}",
            *_read(arm),
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
        bad = ", ".join(f"{name} {n}" for name, n in report.spoilt.items() if name != "none")
        well = report.spoilt.get("none", 0)
        lines.append(f"Requests to the bucket: {well} went well; others met {bad or 'nothing'}.")
    lines += _of_documents(report) + _of_a_trace(report)
    threads = report.args["threads"]
    if report.args.get("seconds_per_token") is not None:
        return [*lines, _clock(report)]
    how = f"in {report.engine}, float32" if report.engine else "float32 with KV in bfloat16"
    here, bound = report.machine, "model and a CPU; it does not show the speed of a GPU."
    if here.gpu:
        bound = "model and a GPU that several processes share."
    lines.append(
        f"{report.model} on {here.gpu or here.cpu}, {threads} torch thread(s), {how}. "
        f"It shows that answers are exact and where the bytes come from, on a small {bound}"
    )
    return lines


def _of_documents(report: Report) -> list[str]:
    """Say how much sooner an arm answers on a document than it did while it first read it."""
    return [
        f"{arm.name}: {_ms(arm.cold_ttft_ms.p50)} at the first reading of a document, "
        f"{_ms(arm.ttft_ms.p50)} for the questions ({arm.cold_ttft_ms.p50 / arm.ttft_ms.p50:.3g}x)"
        for arm in report.arms
        if arm.cold_ttft_ms is not None
    ]


def _of_a_trace(report: Report) -> list[str]:
    if report.ceiling is None:
        return [f"Hit rates are of the {report.denominator}."]
    args, found = report.args, report.capacities
    served = ", ".join(
        f"{arm.name} {arm.requests_per_s:.3g} ({arm.prompt_tokens_per_s:,.0f})"
        for arm in report.arms
        if arm.requests_per_s is not None and arm.prompt_tokens_per_s is not None
    )
    room = ", ".join(f"{name} {format_bytes(size, 3)}" for name, size in found.items())
    lines = [
        f"Hit rates are of the {report.denominator}.",
        f"A cache without bounds would find {report.ceiling:.1f}%.",
        f"Requests (prompt tokens) a second: {served}.",
        f"A block of {args['block_size']} tokens became {args['block_tokens']}. Room: {room}.",
    ]
    rate = args.get("rate")
    if isinstance(rate, (int, float)) and (late := _late(report, rate)):
        lines.append(f"{rate:.3g} came a second, too many for {', '.join(late)}: they waited.")
    if report.cut_prompts:
        lines.append(f"Prompts that were cut to the model's context: {report.cut_prompts:,}.")
    return lines


def _late(report: Report, rate: float) -> list[str]:
    """Return the arms that served clearly fewer requests a second than came."""
    served = ((arm.name, arm.requests_per_s) for arm in report.arms)
    return [name for name, one in served if one is not None and one < _KEPT_UP * rate]


def _clock(report: Report) -> str:
    """Say what the times of an engine that is a clock are."""
    args = report.args
    speed = 1 / (float(str(args["seconds_per_token"])) * float(str(args["scale"])))
    return (
        f"The engine is a clock, of {speed:,.0f} tokens of the trace a second; tiers and their "
        f"times are real, of {report.machine.cpu} and KV of {report.bytes_per_token} bytes a token."
    )


def _ms(value: float) -> str:
    if value >= 100_000:  # noqa: PLR2004  (digits)
        return f"{value / 1e3:,.0f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"  # noqa: PLR2004  (digits)


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}x"


def _spread(found: Ratio) -> str:
    return f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f}, {found.pairs} pairs)"


def _bar(share: float, *, plain: bool) -> str:
    if plain:
        return "#" * math.ceil(share * _BAR)
    eighths = max(1, math.ceil(share * _BAR * 8))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8 - 1] if eighths % 8 else "")


def _read(arm: ArmReport) -> tuple[str, str]:
    """Return what an arm says that it read from each tier, and what the system counted."""
    read, counted = [], []
    for tier, system in (("lmdb", arm.disk_read_bytes), ("s3", arm.s3_sent_bytes)):
        claimed = arm.claimed_bytes.get(tier, 0)
        if system or claimed:
            read.append(f"{format_bytes(claimed, 3)} {tier}")
            counted.append("nobody" if system is None else format_bytes(system, 3))
    return "\n".join(read) or "0 B", "\n".join(counted) or "0 B"
