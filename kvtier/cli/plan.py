"""``kvtier plan``: how much GPU memory is left for KV, and what a cache below it would bring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from kvtier.cli.output import REPORT, write_report
from kvtier.cli.traces import in_money, in_time, prices_of, read, source_options
from kvtier.errors import ConfigError, unknown
from kvtier.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from kvtier.planning.curve import Curve
    from kvtier.planning.sizing import Budget
    from kvtier.planning.sources import Source
    from kvtier.planning.stack import Stack

_GB: Final = 10**9
_EXAMPLES: Final = """\b
Examples:
  kvtier plan llama-3-70b --gpu-memory 80GB --weights fp4
  kvtier plan llama-3-8b --gpu-memory 80GB --trace requests.jsonl
  kvtier plan llama-3-8b --gpu-memory 80GB --workload 'agent?rate=2'
  kvtier plan layers=32,hidden=4096,heads=32,kv_heads=8,head_size=128,\\
    intermediate=14336,vocabulary=32000 --gpu-memory 48GB
"""


@click.command("plan", short_help="Say what GPU memory is left for KV.", epilog=_EXAMPLES)
@click.argument("model")
@click.option("--gpu-memory", metavar="SIZE", required=True, help="Of one GPU, such as 80GB.")
@click.option(
    "--gpus",
    type=click.IntRange(1, 65_536),
    default=1,
    show_default=True,
    help="How many, which share each layer.",
)
@click.option(
    "--pipeline",
    type=click.IntRange(1, 65_536),
    default=1,
    show_default=True,
    help="Stages of layers that --gpus are divided into.",
)
@click.option("--weights", metavar="TYPE", default="bf16", show_default=True, help="fp32 to fp4.")
@click.option("--kv", metavar="TYPE", default="fp16", show_default=True, help="fp32 to fp4.")
@click.option("--activations", metavar="SIZE", help="A GPU; estimated unless given.")
@click.option("--overhead", metavar="SIZE", help="A GPU: context, graphs; estimated unless given.")
@click.option("--trace", metavar="FILE", help="Requests that were recorded; as of `kvtier replay`.")
@click.option(
    "--workload",
    metavar="KIND?NAME=VALUE",
    help="Or requests that are drawn, such as 'rag?documents=500&rate=4'; see --help-workloads.",
)
@source_options(warmup=0.5)
@in_money("for --trace and --workload")
@in_time()
@click.option(
    "--json", "json_file", type=REPORT, metavar="FILE", help="Write the report; - is stdout."
)
def plan(model: str, json_file: str | None, **options: Any) -> int:
    """Say how GPU memory divides between weights and KV, and what a larger cache would bring.

    MODEL is a name of the table (a wrong one names the nearest), a config.json, or the sizes that
    it has: layers, hidden, heads, kv_heads, head_size, intermediate, vocabulary, and where need be
    parameters and latent, as in the last example.

    With --trace or --workload, the hit rate of a cache of each size is replayed, beside the
    optimum, with the size from which on doubling it gains less than one point; then the requests
    are replayed through DRAM and a disk of that size, for times and money.

    The exit status is 1 when the model does not fit.
    """
    from kvtier.cli.progress import progress
    from kvtier.planning.advice import advised
    from kvtier.planning.curve import curve
    from kvtier.planning.models import model_size
    from kvtier.planning.sizing import budget

    source, prices = _source(options), prices_of(options)
    found = budget(model_size(model), _setting(options))
    drawn: Curve | None = None
    tiers: Stack | None = None
    if source is not None:
        with progress() as tell:
            trace = read(source, options, tell)
            warmup = options["warmup"]
            drawn = curve(trace, found.bytes_per_token, found.tokens, warmup=warmup, tell=tell)
            tiers = advised(
                trace,
                drawn,
                found.bytes_per_token,
                prefill=options["prefill"],
                prices=prices,
                at_times=options["at_times"],
                tell=tell,
            )
    if json_file != "-":
        _show(found, drawn, tiers)
    if json_file is not None:
        write_report({"budget": found, "curve": drawn, "tiers": tiers}, json_file)
    return 0 if found.fits else 1


def _source(options: dict[str, Any]) -> Source | None:
    """Return where requests come from, if that was said. Raises ConfigError."""
    from kvtier.planning.sources import sources
    from kvtier.planning.workloads import parse_workload

    trace, workload = options["trace"], options["workload"]
    if workload is not None:
        if trace is not None:
            raise ConfigError("--trace and --workload both say what is asked; name one")
        return parse_workload(workload)
    if trace is not None:
        return sources([trace])[0]
    for name in ("at_times", "block_size", "prices", "skip_bad"):
        if options[name]:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is of requests: name --trace or --workload, too")
    return None


def _setting(options: dict[str, Any]) -> Any:
    from kvtier.planning.sizing import PRECISIONS, Setting

    for name in ("weights", "kv"):
        if options[name] not in PRECISIONS:
            raise unknown(f"precision of --{name}", options[name], PRECISIONS)
    given = {
        name: parse_bytes(options[name])
        for name in ("activations", "overhead")
        if options[name] is not None
    }
    return Setting(
        gpu_memory=parse_bytes(options["gpu_memory"]),
        gpus=options["gpus"],
        pipeline=options["pipeline"],
        weights=options["weights"],
        kv=options["kv"],
        **given,
    )


def _show(found: Budget, drawn: Curve | None, tiers: Stack | None) -> None:
    from kvtier.cli.screen import screen
    from kvtier.cli.stack import show_stack

    console = screen()
    rows = (
        ("GPU memory", found.gpu_memory, f"{found.gpus} x" if found.gpus > 1 else ""),
        ("- weights", -found.weights, ""),
        ("- activations", -found.activations, ""),
        ("- overhead", -found.overhead, "driver, graphs, collectives, fragments"),
        ("= KV", max(found.kv, 0), "" if found.fits else _missing(found)),
    )
    console.print(f"{found.model}", style="bold")
    for name, value, note in rows:
        console.print(f"  {name:14} {value / _GB:9.1f} GB  {note}".rstrip())
    console.print(f"  KV of a token  {format_bytes(found.bytes_per_token)} = {found.formula}")
    if found.copies > 1:
        console.print(
            f"  in GPU memory  {found.copies:.3g} times that: GPUs cannot divide all of it"
        )
    if found.fits:
        console.print(f"  at most        {found.tokens:,} tokens of KV at a time in GPU memory")
    if drawn is not None:
        _show_curve(console, drawn)
    if tiers is not None:
        console.print("The tiers to begin with:")
        show_stack(tiers)
    if drawn is not None and drawn.at_a_time:
        console.print(
            f"GPU memory alone finds {drawn.hbm.hit_rate:.1f}%, where it is all for the cache: "
            "what tiers save beside that is less."
        )


def _missing(found: Budget) -> str:
    missing = found.bytes_per_token * found.copies - found.kv
    return f"the model does not fit: {missing / _GB:.1f} GB are missing"


def _show_curve(console: Console, drawn: Curve) -> None:
    from rich import box
    from rich.table import Table

    from kvtier.cli.screen import print_table

    # Not as the table's title, which would be wrapped to the table's width.
    title = f"{drawn.trace}: hit rate, % of prompt tokens"
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("cache of", justify="right")
    for name in ("LRU", "optimum"):
        table.add_column(name, justify="right")
    table.add_column("")
    rows = [("GPU memory alone", drawn.hbm), *((format_bytes(p.nbytes), p) for p in drawn.points)]
    for name, point in rows:
        knee = point is not drawn.hbm and point.nbytes == drawn.knee
        note = "the knee" if knee else ""
        table.add_row(name, f"{point.hit_rate:.1f}", f"{point.optimum:.1f}", note)
    table.add_row("no bound", f"{drawn.ceiling:.1f}", f"{drawn.ceiling:.1f}", "")
    print_table(console, table)
    counted = f"the last {100 * (1 - drawn.warmup):g}%" if drawn.warmup else "all"
    console.print(f"of {counted} of {drawn.requests:,} requests; all tiers together as one cache.")
    console.print("Doubling a cache that is as large as the knee gains less than 1 point.")
    if drawn.at_a_time:
        console.print(
            f"GPU memory has room for {drawn.at_a_time:,} requests at a time, of "
            f"{drawn.request_tokens:,.0f} tokens each, prompt and answer, in the mean."
        )
