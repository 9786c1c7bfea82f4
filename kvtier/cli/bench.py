"""``kvtier bench``: what a cache brings, measured on a real model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvtier.bench.filesystem import current_directory
from kvtier.bench.settings import (
    ARMS,
    SMOLLM2,
    Settings,
    check_arms,
    check_engine,
    check_model,
)
from kvtier.bench.workloads import MultiTurn, NoReuse, SharedPrefix
from kvtier.cli.kinds import DIRECTORY, Count
from kvtier.cli.main import CommandGroup
from kvtier.cli.output import REPORT, write_report
from kvtier.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    pass

__all__ = ["bench", "multi_turn", "no_reuse", "shared_prefix"]

_HERE: Final = "kvtier.cli.bench"
_MOST_THREADS: Final = 1024
_LARGEST_SEED: Final = (1 << 63) - 1  # it goes to the arms as JSON
F = TypeVar("F", bound=Callable[..., Any])
_DEMO_PREFIXES: Final = 4


@click.group(
    cls=CommandGroup,
    lazy={
        "shared-prefix": f"{_HERE}:shared_prefix",
        "multi-turn": f"{_HERE}:multi_turn",
        "no-reuse": f"{_HERE}:no_reuse",
    },
    kind="workload",
    short_help="Serve prompts with the cache and without.",
    no_args_is_help=False,
    invoke_without_command=True,
)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Serve prompts with the cache and without, and compare.

    Each arm is a process of its own and gets the KV of a prefix from another place: recompute
    (no cache), hbm (the engine's own prefix cache), dram, lmdb (NVMe) or s3. Answers must be
    the same in all of them, token by token; if they are not, the exit status is 1.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _number(*names: str, least: int = 1, most: int | None = None, **more: Any) -> Callable[[F], F]:
    """Return an option that takes a whole number, of which the first name counts."""
    name = names[0].removeprefix("--").replace("-", "_")
    kind = Count(least, most)
    return click.option(*names, name, type=kind, metavar="N", show_default=True, **more)


def _shared_options(arms: str) -> list[Callable[[F], F]]:
    """Return the options of all workloads. arms: by default."""
    return [
        click.option(
            "--arms",
            default=arms,
            show_default=True,
            metavar="LIST",
            help=f"Where the KV comes from, of {','.join(ARMS)}.",
        ),
        click.option(
            "--model",
            default=SMOLLM2,
            show_default=True,
            metavar="NAME",
            help="smollm2, random (tiny, for tests), or a GGUF file of the Llama family.",
        ),
        _number(
            "--threads", most=_MOST_THREADS, default=1, help="Threads that torch computes with."
        ),
        click.option(
            "--seed",
            type=int,
            default=0,
            show_default=True,
            metavar="N",
            help="One seed gives one set of prompts.",
        ),
        _number("--chunk-tokens", default=256, help="Tokens of a chunk of the cache."),
        click.option(
            "--dram", metavar="SIZE", help="Capacity of the dram tier; by default, what it takes."
        ),
        click.option(
            "--disk",
            default="8GiB",
            show_default=True,
            metavar="SIZE",
            help="Capacity of the lmdb tier.",
        ),
        click.option(
            "--dir",
            "directory",
            type=DIRECTORY,
            help="Where the lmdb tier goes: a temporary directory is made in it.",
        ),
        click.option(
            "--s3",
            metavar="URL",
            help="A bucket that exists; by default, a server is started here.",
        ),
        click.option(
            "--s3-delay",
            default="0s",
            show_default=True,
            metavar="TIME",
            help="Round-trip time added to that server, like 20ms.",
        ),
        click.option(
            "--json",
            "json_file",
            type=REPORT,
            metavar="FILE",
            help="Write the report there; - is stdout.",
        ),
        click.option("--output-details", is_flag=True, help="Put every request into the JSON."),
        click.option("-v", "--verbose", is_flag=True, help="Show what the arms' processes log."),
    ]


def _common(arms: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options that all workloads share, and gather them."""

    def add(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def gathered(**given: Any) -> int:
            dram = given.pop("dram")
            settings = Settings(
                arms=check_arms(given.pop("arms").split(",")),
                model=check_model(given.pop("model")),
                dram=None if dram is None else parse_bytes(dram),
                disk=parse_bytes(given.pop("disk")),
                s3_delay=parse_seconds(given.pop("s3_delay")),
                **{
                    name: given.pop(name)
                    for name in ("threads", "seed", "chunk_tokens", "directory", "s3", "verbose")
                },
            )
            return command(settings, given.pop("json_file"), given.pop("output_details"), **given)

        for option in reversed(_shared_options(arms)):
            option(gathered)
        return gathered

    return add


@click.command("shared-prefix", short_help="Prompts that share long prefixes.")
@_number(
    *("--num-prefixes", "--prefix-repetition-num-prefixes", "--gsp-num-groups"),
    help="Different prefixes, besides one to warm up.  [default: 8]",
)
@_number(
    *("--prefix-len", "--prefix-repetition-prefix-len", "--gsp-system-prompt-len"),
    default=2048,
    help="Tokens of a prefix.",
)
@_number(
    *("--suffix-len", "--prefix-repetition-suffix-len", "--gsp-question-len"),
    default=32,
    help="Tokens of a question, at most.",
)
@_number(
    *("--output-len", "--prefix-repetition-output-len", "--gsp-output-len"),
    default=16,
    help="Tokens of an answer.",
)
@_number(
    *("--prompts-per-prefix", "--gsp-prompts-per-group"),
    default=1,
    help="Timed questions on each prefix.",
)
@_number(
    "--device-chaos",
    least=0,
    most=_LARGEST_SEED,
    help="Copy in an odd order that this seed chooses, checked for races; times mean nothing then.",
)
@click.option("--demo", is_flag=True, help=f"A short run: {_DEMO_PREFIXES} prefixes.")
@_common(",".join(ARMS))
def shared_prefix(
    settings: Settings,
    json_file: str | None,
    details: bool,  # noqa: FBT001  (an option)
    num_prefixes: int | None,
    device_chaos: int | None,
    demo: bool,  # noqa: FBT001  (an option)
    **shape: int,
) -> int:
    """Prompts that share long prefixes, each served again from every tier.

    One process computes each prefix once and fills the tiers. Then new processes serve another
    question on it: one has to compute all, the others find the prefix in the tier they are
    named after, and nowhere above.
    """
    count = num_prefixes or (_DEMO_PREFIXES if demo else 8)
    settings = replace(settings, device_chaos=device_chaos)
    return _run(settings, SharedPrefix(num_prefixes=count, **shape), json_file, details)


@click.command("multi-turn", short_help="Conversations that grow.")
@_number("--num-conversations", default=2, help="Conversations, besides one to warm up.")
@_number("--turns", least=2, default=3, help="Turns of a conversation.")
@_number("--prefix-len", default=1024, help="Tokens of the text that it begins with.")
@_number("--suffix-len", default=48, help="Tokens of a question, at most.")
@_number("--output-len", default=16, help="Tokens of an answer.")
@_common(",".join(ARMS))
def multi_turn(
    settings: Settings,
    json_file: str | None,
    details: bool,  # noqa: FBT001  (an option)
    **shape: int,
) -> int:
    """Conversations: each prompt is all that was said and one more question.

    Times are those of the second and later turns.
    """
    return _run(settings, MultiTurn(**shape), json_file, details)


@click.command("no-reuse", short_help="Prompts that share nothing.")
@_number("--num-prompts", default=8, help="Prompts, besides one to warm up.")
@_number("--input-len", "--random-input-len", default=1024, help="Tokens of a prompt.")
@_number("--output-len", "--random-output-len", default=32, help="Tokens of an answer.")
@_common("recompute,dram,lmdb")
def no_reuse(
    settings: Settings,
    json_file: str | None,
    details: bool,  # noqa: FBT001  (an option)
    **shape: int,
) -> int:
    """Prompts that share nothing: what a cache costs where it brings nothing."""
    return _run(settings, NoReuse(**shape), json_file, details)


def _run(
    settings: Settings,
    shape: SharedPrefix | MultiTurn | NoReuse,
    json_file: str | None,
    details: bool,  # noqa: FBT001  (an option)
) -> int:
    """Run, show and write the report; 1 where it has problems."""
    check_engine()
    current_directory()
    from kvtier.bench.run import run
    from kvtier.cli.progress import progress
    from kvtier.cli.table import show

    with progress() as tell:
        report = run(settings, shape, tell, details=details)
    if json_file != "-":
        show(report)
    if json_file is not None:
        import msgspec

        text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
        write_report(text, json_file)
    for problem in report.problems:
        click.echo(f"problem: {problem}", err=True)
    return 1 if report.problems else 0
