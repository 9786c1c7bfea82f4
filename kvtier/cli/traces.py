"""What the commands on traces have in common: their options, and reading one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvtier.cli.kinds import ABOVE_ZERO, PART
from kvtier.cli.options import with_options

if TYPE_CHECKING:
    from kvtier.planning.prices import Prices
    from kvtier.planning.sources import Source
    from kvtier.planning.trace import Trace

F = TypeVar("F", bound=Callable[..., Any])


def _show_workloads(context: click.Context, _: click.Parameter, wanted: bool) -> None:  # noqa: FBT001
    """Print the kinds of workload, with their parameters."""
    from kvtier.planning.workloads import KINDS, PREFIX, shown_parameters

    if not wanted:
        return
    click.echo(
        f"'{PREFIX}KIND?name=value&name=value' stands for a trace, in quotes. KIND is one of:"
    )
    for name, kind in KINDS.items():
        click.echo(f"\n{name}: {kind.text}")
        click.echo(shown_parameters(kind.own))
    click.echo("\nAnd of each kind:")
    click.echo(shown_parameters(None))
    context.exit()


def _print_prices(context: click.Context, _: click.Parameter, wanted: bool) -> None:  # noqa: FBT001
    """Print the prices as a TOML file that can be edited."""
    import msgspec

    from kvtier.planning.prices import Prices

    if wanted:
        click.echo(
            "\n".join(f"{key} = {value}" for key, value in msgspec.structs.asdict(Prices()).items())
        )
        context.exit()


def _shown(name: str, what: Callable[..., None], text: str) -> Callable[[F], F]:
    """Return an option that only shows something."""
    return click.option(
        name, is_flag=True, is_eager=True, callback=what, expose_value=False, help=text
    )


_SOURCE: Final = (
    click.option(
        "--block-size",
        type=click.IntRange(min=1),
        help="Tokens of a block: what a file's hashes are of.  [default: as recorded, 512 of other "
        "files, 256 of a workload]",
    ),
    click.option("--skip-bad", is_flag=True, help="Count bad lines instead of refusing the file."),
    _shown("--help-workloads", _show_workloads, "Show the workloads that can be described."),
)


def source_options(warmup: float) -> Callable[[F], F]:
    """Give a command the options of what it reads. warmup: the default of that one."""
    part = click.option(
        "--warmup",
        type=PART,
        default=warmup,
        show_default=True,
        help="Fraction of the requests that only fills the cache.",
    )
    return with_options(*_SOURCE, part)


def in_time(used: str = "") -> Callable[[F], F]:
    """Give a command the option of timestamps. used: for what, if not always."""
    return with_options(
        click.option(
            "--time-unit",
            type=click.Choice(["ms", "s"]),
            default="ms",
            show_default=True,
            help=f"Of a file's timestamps{used}: Mooncake's are ms, Bailian's s; recordings and "
            "workloads say it themselves.",
        )
    )


def in_money(used: str) -> Callable[[F], F]:
    """Give a command the options of times to first token and of money. used: for what."""
    return with_options(
        click.option(
            "--prefill",
            type=ABOVE_ZERO,
            default=5000.0,
            show_default=True,
            metavar="TOKENS/S",
            help=f"What the engine computes in a second; {used}.",
        ),
        click.option(
            "--at-times",
            is_flag=True,
            help=f"Let requests come at their times and wait for each other; {used}.",
        ),
        click.option(
            "--prices",
            type=click.Path(path_type=Path),
            metavar="FILE.toml",
            help=f"What a month costs; {used}. --help-prices shows the keys.",
        ),
        _shown("--help-prices", _print_prices, "Show the prices that are assumed."),
    )


def prices_of(options: Mapping[str, Any]) -> Prices:
    """Return the prices that ``in_money`` took. Raises ConfigError."""
    from kvtier.planning.prices import Prices, read_prices

    return read_prices(options["prices"]) if options["prices"] else Prices()


def read(
    source: Source, options: Mapping[str, Any], tell: Callable[[str, int, int], None]
) -> Trace:
    """Read what ``source_options`` and ``in_time`` say, and tell on stderr what was left out.

    Raises ConfigError.
    """
    from kvtier.planning.files import TraceFiles
    from kvtier.planning.sources import read_source

    step = f"reading {source.name}"
    trace = read_source(
        source,
        options["block_size"],
        skip_bad=options["skip_bad"],
        time_unit=options["time_unit"],
        tell=lambda done, count: tell(step, done, count),
    )
    if isinstance(source, TraceFiles) and len(source.paths) > 1:
        click.echo(f"{trace.name}: of {len(source.paths)} files", err=True)
    if trace.skipped:
        click.echo(f"{trace.name}: {trace.skipped:,} bad lines were left out", err=True)
    for note in trace.notes:
        click.echo(note, err=True)
    return trace
