"""``kvtier bench``: what a cache brings, measured on a real model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvtier.bench.settings import ARMS, SMOLLM2, Settings, check_arms, check_model
from kvtier.bench.workloads import MultiTurn, NoReuse, SharedPrefix
from kvtier.cli.main import CommandGroup
from kvtier.errors import ConfigError
from kvtier.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from kvtier.bench.report import Report

__all__ = ["bench", "multi_turn", "no_reuse", "shared_prefix"]

_HERE: Final = "kvtier.cli.bench"
_COUNT: Final = click.IntRange(min=1)
_DEMO_PREFIXES: Final = 4


@click.group(
    cls=CommandGroup,
    lazy={
        "shared-prefix": f"{_HERE}:shared_prefix",
        "multi-turn": f"{_HERE}:multi_turn",
        "no-reuse": f"{_HERE}:no_reuse",
    },
    kind="workload",
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


def _common(arms: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options that all workloads share, and gather them."""
    options = [
        click.option("--arms", default=arms, show_default=True, help=f"Of: {','.join(ARMS)}."),
        click.option(
            "--model",
            default=SMOLLM2,
            show_default=True,
            help="smollm2, random (tiny, for tests), or a GGUF file of the Llama family.",
        ),
        click.option("--threads", type=_COUNT, default=1, show_default=True, help="Of torch."),
        click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts."),
        click.option(
            "--chunk-tokens", type=_COUNT, default=256, show_default=True, help="Of the cache."
        ),
        click.option("--dram", metavar="SIZE", help="Capacity of dram; by default, what it takes."),
        click.option("--disk", default="8GiB", show_default=True, help="Capacity of lmdb."),
        click.option(
            "--dir",
            "directory",
            type=click.Path(path_type=Path),
            help="Where the lmdb tier goes: a temporary directory is made in it.",
        ),
        click.option("--s3", metavar="URL", help="An existing bucket; by default, a server here."),
        click.option(
            "--s3-delay", default="0s", show_default=True, help="Added round trip, like 20ms."
        ),
        click.option("--json", "json_file", metavar="FILE", help="Write the report; - is stdout."),
        click.option("--output-details", is_flag=True, help="Every request in the JSON."),
        click.option("-v", "--verbose", is_flag=True, help="Show what the arms' processes log."),
    ]

    def add(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def gathered(**given: Any) -> int:
            dram = given.pop("dram")
            settings = Settings(
                arms=check_arms([name for name in given.pop("arms").split(",") if name]),
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

        for option in reversed(options):
            option(gathered)
        return gathered

    return add


@click.command("shared-prefix")
@click.option(
    *("--num-prefixes", "--prefix-repetition-num-prefixes", "--gsp-num-groups", "num_prefixes"),
    type=_COUNT,
    help="Different prefixes, besides one to warm up.  [default: 8]",
)
@click.option(
    *("--prefix-len", "--prefix-repetition-prefix-len", "--gsp-system-prompt-len", "prefix_len"),
    type=_COUNT,
    default=2048,
    show_default=True,
    help="Tokens of a prefix.",
)
@click.option(
    *("--suffix-len", "--prefix-repetition-suffix-len", "--gsp-question-len", "suffix_len"),
    type=_COUNT,
    default=32,
    show_default=True,
    help="Tokens of a question, at most.",
)
@click.option(
    *("--output-len", "--prefix-repetition-output-len", "--gsp-output-len", "output_len"),
    type=_COUNT,
    default=16,
    show_default=True,
    help="Tokens of an answer.",
)
@click.option(
    *("--prompts-per-prefix", "--gsp-prompts-per-group", "prompts_per_prefix"),
    type=_COUNT,
    default=1,
    show_default=True,
    help="Timed questions on each prefix.",
)
@click.option("--demo", is_flag=True, help=f"A short run: {_DEMO_PREFIXES} prefixes.")
@_common(",".join(ARMS))
def shared_prefix(
    settings: Settings,
    json_file: str | None,
    details: bool,  # noqa: FBT001  (an option)
    num_prefixes: int | None,
    demo: bool,  # noqa: FBT001  (an option)
    **shape: int,
) -> int:
    """Prompts that share long prefixes, each served again from every tier.

    One process computes each prefix once and fills the tiers. Then new processes serve another
    question on it: one has to compute all, the others find the prefix in the tier they are
    named after, and nowhere above.
    """
    count = num_prefixes or (_DEMO_PREFIXES if demo else 8)
    return _run(settings, SharedPrefix(num_prefixes=count, **shape), json_file, details)


@click.command("multi-turn")
@click.option(
    "--num-conversations", type=_COUNT, default=2, show_default=True, help="Besides one to warm up."
)
@click.option(
    "--turns", type=click.IntRange(min=2), default=3, show_default=True, help="Of a conversation."
)
@click.option(
    "--prefix-len", type=_COUNT, default=1024, show_default=True, help="Tokens of the first text."
)
@click.option(
    "--suffix-len",
    type=_COUNT,
    default=48,
    show_default=True,
    help="Tokens of a question, at most.",
)
@click.option(
    "--output-len", type=_COUNT, default=16, show_default=True, help="Tokens of an answer."
)
@_common(",".join(ARMS))
def multi_turn(
    settings: Settings,
    json_file: str | None,
    details: bool,  # noqa: FBT001  (an option)
    **shape: int,
) -> int:
    """Conversations that grow: each prompt is all that was said, and one more question.

    Times are those of the second and later turns.
    """
    return _run(settings, MultiTurn(**shape), json_file, details)


@click.command("no-reuse")
@click.option(
    "--num-prompts", type=_COUNT, default=8, show_default=True, help="Besides one to warm up."
)
@click.option(
    *("--input-len", "--random-input-len", "input_len"),
    type=_COUNT,
    default=1024,
    show_default=True,
    help="Tokens of a prompt.",
)
@click.option(
    *("--output-len", "--random-output-len", "output_len"),
    type=_COUNT,
    default=32,
    show_default=True,
    help="Tokens of an answer.",
)
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
    from kvtier.bench.run import run
    from kvtier.cli.progress import progress
    from kvtier.cli.table import show

    if json_file not in (None, "-"):
        _check_writable(Path(json_file))
    with progress() as tell:
        report = run(settings, shape, tell, details=details)
    if json_file is not None:
        _write(report, json_file)
    if json_file != "-":
        show(report)
    for problem in report.problems:
        click.echo(f"problem: {problem}", err=True)
    return 1 if report.problems else 0


def _check_writable(path: Path) -> None:
    """Find out before minutes of work whether the report can be written."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}); name another file") from error


def _write(report: Report, json_file: str) -> None:
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    else:
        Path(json_file).write_text(text, encoding="utf-8")
