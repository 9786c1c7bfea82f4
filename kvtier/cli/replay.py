"""``kvtier replay``: what hit rate a cache of some size would have had, on a recorded trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvtier.cli.kinds import PRIORITY, TTL
from kvtier.cli.output import PLOT, REPORT, write_report
from kvtier.cli.stack import replay_stack
from kvtier.cli.traces import in_money, in_time, read, source_options
from kvtier.errors import ConfigError
from kvtier.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from kvtier.planning.replay import Replay

_MOST_POINTS: Final = 64
_EXAMPLES: Final = """\b
Examples:
  kvtier replay requests.jsonl --sweep --policy all --plot FILE.png
  kvtier replay trace.jsonl.zst --capacity-blocks 1000,10000 --warmup 0.5
  kvtier replay 'workload:rag?documents=500&rate=2' --model llama-3-8b \\
    --tier dram:8GiB@25GB/s --tier lmdb:100GiB@5GB/s+100us --at-times
"""


@click.command("replay", short_help="Replay requests under several policies.", epilog=_EXAMPLES)
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@source_options(warmup=0.0)
@click.option(
    "--policy",
    metavar="NAME,NAME|all",
    default="lru,optimal",
    show_default=True,
    help="Policies to try.",
)
@click.option("--capacity-blocks", metavar="N,N", help="Capacities to try, in blocks.")
@click.option("--capacity", metavar="SIZE,SIZE", help="The same in bytes, such as 8GiB,64GiB.")
@click.option("--sweep", is_flag=True, help="Try capacities from 1/64 of the blocks to all.")
@click.option(
    "--bytes-per-token",
    metavar="SIZE",
    help="KV of one token, such as 320KiB; for --capacity and --tier.",
)
@click.option(
    "--model",
    metavar="MODEL",
    help="Take the KV of one token from a model, named as `kvtier plan` takes it.",
)
@click.option("--kv", metavar="TYPE", help="fp32 to fp4; for --model.  [default: fp16]")
@click.option(
    "--ttl",
    type=TTL,
    metavar="TIME",
    help="What was not used for so long leaves, such as 1h; as ?ttl= of a live tier.",
)
@click.option(
    "--priority",
    "priorities",
    multiple=True,
    type=PRIORITY,
    metavar="START:STOP=LEVEL",
    help="Keep these tokens of every prompt longer, such as 0:2048=10, as a Retention does.",
)
@click.option(
    "--servable/--no-servable",
    default=True,
    help="Evict no block that another hangs under, as the live cache does; other simulators do.",
)
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    metavar="NAME:SIZE@SPEED+LATENCY",
    help="Tiers, DRAM first, instead of capacities: dram:64GiB@25GB/s, "
    "lmdb:1TiB@5GB/s+100us, s3:unbounded@1GB/s+20ms.",
)
@click.option(
    "--always-load", is_flag=True, help="Load what computing is faster than, too; for --tier."
)
@in_money("for --tier")
@in_time(", for --tier and --ttl")
@click.option("--plot", type=PLOT, metavar="FILE.png", help="Draw the hit rate over the capacity.")
@click.option(
    "--json", "json_file", type=REPORT, metavar="FILE", help="Write the report; - is stdout."
)
def replay(
    traces: tuple[str, ...], policy: str, warmup: float, json_file: str | None, **options: Any
) -> int:
    """Replay requests through one tier of a cache, under several policies; or through tiers.

    A TRACE is a file of Mooncake's or Bailian's JSON lines, plain, .gz or .zst; or what `kvtier
    serve --record` and Cache.record wrote, where FILE stands for FILE.1 and so on, too; or a
    workload that is drawn, such as 'workload:multi-turn?requests=2000&rate=4&seed=1', see
    --help-workloads.

    Name capacities with --capacity-blocks, --capacity or --sweep, and get the hit rate of each
    policy at each. A request hits the leading run of its blocks that are there. The policies are
    those of the live cache, and some that it is compared with; optimal knows the future, and no
    policy can exceed it; the ceiling is a tier without bounds.

    Or name the tiers of a stack with --tier, and get hits by tier beside what no policy could
    exceed, bytes, times to first token, the life of drives, and money.
    """
    from kvtier.cli.plot import draw
    from kvtier.cli.progress import progress
    from kvtier.planning.replay import chosen, overlay_of
    from kvtier.planning.replay import replay as run
    from kvtier.planning.sources import sources

    names = chosen(policy)
    found = sources(traces)
    _take_model(options)
    plot = options["plot"]
    if options["tiers"]:
        return replay_stack(found, names, warmup, json_file, options)
    for name in ("prices", "always_load", "at_times"):
        if options[name]:
            raise ConfigError(f"--{name.replace('_', '-')} is of tiers: name them with --tier")
    each = [_sizes(options, source.block_tokens(options["block_size"])) for source in found]
    if not each[0] and not options["sweep"]:
        raise ConfigError(
            "name capacities: --capacity-blocks 1000,10000, --capacity, --sweep, or a --tier"
        )
    replays: list[Replay] = []
    with progress() as tell:
        for source, sizes in zip(found, each, strict=True):
            trace = read(source, options, tell)
            swept = _swept(trace.unique) if options["sweep"] else []
            points = sorted({*sizes, *swept})
            replays.append(
                run(
                    trace,
                    names,
                    points,
                    warmup=warmup,
                    servable=options["servable"],
                    overlay=overlay_of(trace, options["priorities"], options["ttl"]),
                    tell=tell,
                )
            )
    if plot is not None:
        draw(replays, Path(plot))
    if json_file != "-":
        for one in replays:
            _show(one, _block_bytes(options["bytes_per_token"], one.block_tokens))
    if json_file is not None:
        write_report(replays[0] if len(replays) == 1 else replays, json_file)
    return 0


def _swept(blocks: int) -> list[int]:
    """Return capacities from 1/64 of the blocks to all of them."""
    return [max(blocks >> shift, 1) for shift in range(6, -1, -1)]


def _sizes(options: dict[str, Any], block_tokens: int) -> list[int]:
    """Return the capacities that were named, in blocks of so many tokens."""
    capacity, block = options["capacity"], _block_bytes(options["bytes_per_token"], block_tokens)
    found: list[int] = []
    for text in _split(options["capacity_blocks"]):
        if not text.isdecimal() or not 0 < int(text) < 1 << 31:
            raise ConfigError(f"--capacity-blocks takes numbers like 1000,10000, not {text!r}")
        found.append(int(text))
    if capacity is not None:
        if block is None:
            raise ConfigError("--capacity in bytes needs --bytes-per-token, such as 320KiB")
        for text in _split(capacity):
            count = parse_bytes(text) // block
            if not count:
                raise ConfigError(f"a capacity of {text} is below one block of {block} bytes")
            found.append(count)
    if len(found) > _MOST_POINTS:
        raise ConfigError(f"{len(found)} capacities; at most {_MOST_POINTS} at a time")
    return found


def _take_model(options: dict[str, Any]) -> None:
    """Take the bytes of a token from a model, if one is named."""
    from kvtier.planning.models import model_size
    from kvtier.planning.sizing import token_bytes

    if options["model"] is None:
        if options["kv"] is not None:
            raise ConfigError("--kv is the precision of a --model; name one, or leave --kv out")
        return
    if options["bytes_per_token"] is not None:
        raise ConfigError("--model says the bytes of a token; leave --bytes-per-token out")
    options["bytes_per_token"] = (
        f"{token_bytes(model_size(options['model']), options['kv'] or 'fp16')}B"
    )


def _block_bytes(per_token: str | None, block_size: int) -> int | None:
    return parse_bytes(per_token) * block_size if per_token is not None else None


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _show(found: Replay, block_bytes: int | None) -> None:
    """Print a replay: a row a policy and a column a capacity, or turned where only that fits."""
    from kvtier.cli.screen import best_of, print_table, screen

    console = screen()
    # Not as the table's title, which would be wrapped to the table's width.
    unit = "blocks" if block_bytes is None else "bytes"
    title = f"{found.trace}: hit rate, % of prompt tokens, by capacity in {unit}"
    console.print(title, markup=False, soft_wrap=True)
    rates = {(one.policy, one.capacity_blocks): one.hit_rate_tokens for one in found.results}
    policies = list(dict.fromkeys(policy for policy, _ in rates))
    points = sorted({point for _, point in rates})
    most = found.ceiling.hit_rate_tokens
    sizes = [
        f"{one:,}" if block_bytes is None else format_bytes(one * block_bytes) for one in points
    ]
    rows = [[f"{rates[policy, one]:.1f}" for one in points] for policy in policies]
    rows.append([f"{most:.1f}"] * len(points))
    names = [*policies, "ceiling"]
    upright = _table("policy", sizes, names, rows)
    turned = _table(unit, names, sizes, list(zip(*rows, strict=True)))
    print_table(console, best_of(console, upright, turned))
    both = " with those of the answers" if found.answer_blocks else ""
    console.print(
        f"{found.requests:,} requests, {found.blocks:,} blocks of {found.block_tokens} tokens, "
        f"{found.unique_blocks:,} different{both}; of {found.denominator}",
    )


def _table(
    first: str, columns: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[str]]
) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in zip(names, rows, strict=True):
        table.add_row(name, *row)
    return table
