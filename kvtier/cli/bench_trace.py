"""``kvtier bench trace``: a recorded trace, served with each further tier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import click

from kvtier.bench.settings import RANDOM, Settings
from kvtier.cli.bench_options import Common, Output, common, number, run_workload
from kvtier.cli.kinds import ABOVE_ZERO
from kvtier.cli.options import with_options
from kvtier.cli.traces import in_time, read, source_options
from kvtier.errors import ConfigError
from kvtier.units import parse_bytes

_PROMPTS: Final = 512
_MANY_PROMPTS: Final = 1000
_PREFILL: Final = 5000.0
_OUTPUT: Final = 2


@click.command("trace", short_help="A recorded trace, with each further tier.")
@click.argument("source", metavar="TRACE")
@source_options(warmup=0.0)
@in_time()
@with_options(
    click.option(
        "--scale",
        metavar="PART",
        help="Tokens that are served for one of the trace, like 1/8; by default, as many as make "
        "a block one of the engine's, of 16 tokens.",
    ),
    number(
        "--num-prompts",
        help=f"The first so many requests.  [default: {_PROMPTS}, of a clock {_MANY_PROMPTS:,}]",
    ),
    number(
        "--output-len",
        help=f"Tokens of an answer, at most.  [default: {_OUTPUT}, of a clock 1]",
    ),
    click.option(
        "--request-rate",
        type=ABOVE_ZERO,
        metavar="N",
        help="Requests a second, at the trace's own pace; by default, one after the other.",
    ),
    click.option(
        "--speed-up",
        type=ABOVE_ZERO,
        metavar="N",
        help="Or: let them arrive so much faster than they were recorded.",
    ),
    click.option(
        "--timing-model",
        is_flag=True,
        help="An engine that is a clock, for long traces: it computes nothing, tiers are real.",
    ),
    click.option(
        "--prefill",
        type=ABOVE_ZERO,
        metavar="TOKENS/S",
        help=f"Tokens of the trace that the clock computes in a second.  [default: {_PREFILL:g}]",
    ),
    click.option(
        "--hbm",
        metavar="SIZE",
        help="Capacity of the engine's own pool. By default it has room for an eighth of the "
        "trace's different blocks, dram for a quarter, lmdb for half.",
    ),
    click.option(
        "--bytes-per-token",
        metavar="SIZE",
        help="KV of a token of the model that the capacities are meant for, such as 320KiB; they "
        "are scaled to the model here.",
    ),
)
@common(Common("recompute,hbm,dram,lmdb", model=RANDOM, disk=None, chunked=False))
def trace(settings: Settings, output: Output, source: str, **options: Any) -> int:
    """Serve the requests of a trace: what its hit rates and times would be, tier by tier.

    A TRACE is what `kvtier replay` takes: a file of JSON lines of Mooncake, Bailian, Cache.record
    and `kvtier serve --record`, plain, .gz or .zst, or a 'workload:…' that is drawn. Equal hashes
    become equal tokens; answers are the engine's own. Each arm has the tiers
    of the one before it and one more, of a size that decides what is found: recompute (no cache),
    hbm (the engine's own prefix cache), dram, lmdb, s3. A chunk of the cache is a block of the
    trace.
    """
    from kvtier.bench.recorded import block_tokens, recorded
    from kvtier.cli.progress import progress
    from kvtier.planning.sources import sources

    _check(options)
    clock = options["timing_model"]
    named = sources([source])[0]
    block_size = named.block_tokens(options["block_size"])
    size = block_tokens(block_size, options["scale"])
    with progress() as tell:
        found = read(named, options, tell)
    hbm, per_token = (
        None if options[name] is None else parse_bytes(options[name])
        for name in ("hbm", "bytes_per_token")
    )
    shape = recorded(
        found,
        size=size,
        num_prompts=options["num_prompts"] or (_MANY_PROMPTS if clock else _PROMPTS),
        output_len=options["output_len"] or (1 if clock else _OUTPUT),
        warmup=options["warmup"],
        seconds_per_unit=found.seconds_per_unit,
        speed_up=options["speed_up"],
        request_rate=options["request_rate"],
        hbm=hbm,
        bytes_per_token=per_token,
    )
    prefill = (options["prefill"] or _PREFILL) * shape.scale
    settings = replace(
        settings, chunk_tokens=size, seconds_per_token=1 / prefill if clock else None
    )
    return run_workload(settings, shape, output)


def _check(options: dict[str, Any]) -> None:
    """Raise ConfigError for options that do not go together."""
    if options["request_rate"] is not None and options["speed_up"] is not None:
        raise ConfigError("--request-rate and --speed-up both say when requests come; name one")
    if options["prefill"] is not None and not options["timing_model"]:
        raise ConfigError("--prefill is the speed of the clock; add --timing-model")
