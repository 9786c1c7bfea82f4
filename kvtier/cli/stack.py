"""``kvtier replay --tier …``: a trace through a stack of tiers, with times, wear and money."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvtier.cli.output import write_report
from kvtier.cli.traces import prices_of, read
from kvtier.errors import ConfigError
from kvtier.units import format_bytes, format_seconds, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from kvtier.planning.sources import Source
    from kvtier.planning.stack import Level, Stack

_YEAR_DAYS: Final = 365
_MOST_LEVELS: Final = 16
_MOST_LATENCY: Final = 3600.0
_FORM: Final = "NAME:SIZE@SPEED+LATENCY, such as lmdb:1TiB@5GB/s+100us"


def parse_level(text: str) -> Level:
    """Read one tier. Raises ConfigError that says what one looks like."""
    from kvtier.planning.stack import Level

    name, colon, rest = text.partition(":")
    size, at, speed = rest.partition("@")
    speed, _, latency = speed.partition("+")
    if not (name and colon and size and at and speed.endswith("/s")):
        raise ConfigError(f"a tier looks like {_FORM}, not {text!r}")
    seconds = parse_seconds(latency) if latency else 0.0
    if seconds > _MOST_LATENCY:
        raise ConfigError(
            f"a latency of {latency} is beyond {_MOST_LATENCY:.0f}s, the most there is"
        )
    return Level(
        name,
        None if size == "unbounded" else parse_bytes(size),
        float(parse_bytes(speed.removesuffix("/s"))),
        seconds,
    )


def replay_stack(
    traces: Sequence[Source],
    policies: Sequence[str],
    warmup: float,
    json_file: str | None,
    options: Mapping[str, Any],
) -> int:
    """Replay traces through tiers, under the first policy that is not the optimum."""
    from kvtier.cli.progress import progress
    from kvtier.planning.replay import OPTIMAL, make_policy, overlay_of
    from kvtier.planning.stack import Speeds, simulate_stack

    levels = _levels(options)
    names = [name for name in policies if name != OPTIMAL]
    if not names:
        raise ConfigError(f"--tier needs a policy; {OPTIMAL} is given as the bound")
    prices = prices_of(options)
    found: list[Stack] = []
    with progress() as tell:
        for source in traces:
            trace = read(source, options, tell)
            found += [
                simulate_stack(
                    trace,
                    levels,
                    (name, make_policy(name, trace)),
                    bytes_per_token=parse_bytes(options["bytes_per_token"]),
                    speeds=Speeds(1 / options["prefill"]),
                    prices=prices,
                    warmup=warmup,
                    seconds_per_unit=trace.seconds_per_unit,
                    always=options["always_load"],
                    at_times=options["at_times"],
                    overlay=overlay_of(trace, options["priorities"], options["ttl"]),
                    tell=tell,
                )
                for name in names
            ]
    if json_file != "-":
        for one in found:
            show_stack(one)
    if json_file is not None:
        write_report(found[0] if len(found) == 1 else found, json_file)
    return 0


def _levels(options: Mapping[str, Any]) -> list[Level]:
    """Return the tiers that were named. Raises ConfigError for what does not go with them."""
    levels = [parse_level(text) for text in options["tiers"]]
    if len(levels) > _MOST_LEVELS:
        raise ConfigError(f"{len(levels)} tiers; at most {_MOST_LEVELS} can be replayed")
    twice = {one.name for one in levels if [each.name for each in levels].count(one.name) > 1}
    if twice:
        raise ConfigError(f"two tiers are called {min(twice)}; give each a name of its own")
    if any(one.name == "dram" for one in levels[1:]):
        raise ConfigError("dram comes first: name it before the tiers below it")
    for other in ("capacity_blocks", "capacity", "plot", "sweep"):
        if options[other]:
            option = other.replace("_", "-")
            raise ConfigError(f"--tier says the capacities itself; leave --{option} out")
    if not options["servable"]:
        raise ConfigError("--tier evicts as the live cache does; leave --no-servable out")
    if options["bytes_per_token"] is None:
        raise ConfigError("--tier needs --bytes-per-token, such as 320KiB; `kvtier plan` says it")
    return levels


def _life(years: float) -> str:
    """Return how long a drive lasts; nothing where none wears."""
    return "" if not years else f"{years:,.1f} y" if years >= 1 else f"{years * _YEAR_DAYS:,.0f} d"


def _waiting(found: Stack) -> str:
    if found.at_times:
        return "requests at the trace's times, which one engine computes one after the other"
    return "one request at a time"


def show_stack(found: Stack) -> None:
    """Print a stack: a row a tier."""
    from rich import box
    from rich.table import Table

    from kvtier.cli.screen import print_table, screen

    console = screen()
    # Not as the table's title, which would be wrapped to the table's width.
    title = f"{found.trace}: {found.requests:,} requests, {found.policy}"
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("tier", no_wrap=True)
    for column in ("size", "hits", "so far (most)", "written/day", "drive", "month"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found.levels:
        table.add_row(
            one.name,
            "unbounded" if one.nbytes is None else format_bytes(one.nbytes),
            f"{one.hit_rate:.1f}%",
            f"{one.reached:.1f}% ({one.bound:.1f}%)",
            format_bytes(int(one.written_bytes_a_day)),
            _life(one.life_years),
            f"${one.dollars:,.0f}",
        )
    print_table(console, table)
    for name, times in (("with it", found.ttft), ("without", found.ttft_without)):
        console.print(
            f"TTFT {name}: mean {format_seconds(times.mean)}, p50 {format_seconds(times.p50)}, "
            f"p90 {format_seconds(times.p90)}, p99 {format_seconds(times.p99)}",
            highlight=False,
        )
    console.print("Without is an engine that computes all of it, and keeps nothing in GPU memory.")
    for one in found.levels:
        if not one.hit_tokens:
            console.print(f"{one.name} serves nothing here: this would be as fast without it.")
    span = format_seconds(found.hours * 3600) if found.hours < 1 else f"{found.hours:,.1f} h"
    if found.hours < 1:
        console.print(f"Days and months are {span} multiplied here: see a longer trace.")
    console.print(
        f"Hit rates are of prompt tokens, in the {span} behind the warm-up; times "
        f"are of {_waiting(found)}. {found.skipped_tokens:,} tokens were there, and faster to "
        f"compute. A month saves {found.gpu_hours_saved:,.0f} GPU hours, "
        f"${found.gpu_dollars_saved:,.0f}, and costs ${found.dollars:,.0f}.",
        highlight=False,
    )
