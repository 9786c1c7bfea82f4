"""What the benchmark's commands have in common: their options, and running one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from kvtier.bench.filesystem import current_directory
from kvtier.bench.settings import (
    ARMS,
    RANDOM,
    SMOLLM2,
    Settings,
    check_arms,
    check_device,
    check_engine,
    check_model,
)
from kvtier.bench.workloads import MultiTurn, NoReuse, SharedPrefix
from kvtier.cli.kinds import DIRECTORY, Count
from kvtier.cli.output import REPORT, write_report
from kvtier.units import parse_bytes, parse_seconds

__all__ = [
    "MULTI_TURN",
    "NO_REUSE",
    "SHARED_PREFIX",
    "common",
    "number",
    "run_workload",
    "with_options",
]

_MOST_THREADS: Final = 1024
_MODELS: Final = {
    "kvtier": (SMOLLM2, "smollm2, random (tiny, for tests), or a GGUF file of the Llama family."),
    "vllm": (RANDOM, "random, or a model as vLLM takes it: a folder, or a name at its hub."),
}
F = TypeVar("F", bound=Callable[..., Any])


def number(*names: str, least: int = 1, most: int | None = None, **more: Any) -> Callable[[F], F]:
    """Return an option that takes a whole number, of which the first name counts."""
    name = names[0].removeprefix("--").replace("-", "_")
    kind = Count(least, most)
    return click.option(*names, name, type=kind, metavar="N", show_default=True, **more)


def with_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Give a command options, in their order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


SHARED_PREFIX: Final = (
    number(
        *("--num-prefixes", "--prefix-repetition-num-prefixes", "--gsp-num-groups"),
        help="Different prefixes, besides one to warm up.  [default: 8]",
    ),
    number(
        *("--prefix-len", "--prefix-repetition-prefix-len", "--gsp-system-prompt-len"),
        default=2048,
        help="Tokens of a prefix.",
    ),
    number(
        *("--suffix-len", "--prefix-repetition-suffix-len", "--gsp-question-len"),
        default=32,
        help="Tokens of a question, at most.",
    ),
    number(
        *("--output-len", "--prefix-repetition-output-len", "--gsp-output-len"),
        default=16,
        help="Tokens of an answer.",
    ),
    number(
        *("--prompts-per-prefix", "--gsp-prompts-per-group"),
        default=1,
        help="Timed questions on each prefix.",
    ),
)
"""Its sizes; num_prefixes is None where it is not given."""

MULTI_TURN: Final = (
    number("--num-conversations", default=2, help="Conversations, besides one to warm up."),
    number("--turns", least=2, default=3, help="Turns of a conversation."),
    number("--prefix-len", default=1024, help="Tokens of the text that it begins with."),
    number("--suffix-len", default=48, help="Tokens of a question, at most."),
    number("--output-len", default=16, help="Tokens of an answer."),
)

NO_REUSE: Final = (
    number("--num-prompts", default=8, help="Prompts, besides one to warm up."),
    number("--input-len", "--random-input-len", default=1024, help="Tokens of a prompt."),
    number("--output-len", "--random-output-len", default=32, help="Tokens of an answer."),
)


_DEVICE: Final = (
    click.option(
        "--device",
        default="cpu",
        show_default=True,
        metavar="NAME",
        help="Where the model computes: cpu, cuda, or a GPU like cuda:1.",
    ),
)


def _shared_options(arms: str, engine: str) -> list[Callable[[F], F]]:
    """Return the options of all workloads. arms: by default."""
    model, models = _MODELS[engine]
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
            default=model,
            show_default=True,
            metavar="NAME",
            help=models,
        ),
        number(
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
        number("--chunk-tokens", default=256, help="Tokens of a chunk of the cache."),
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
        *(_DEVICE if engine == "kvtier" else ()),
        click.option("--output-details", is_flag=True, help="Put every request into the JSON."),
        click.option("-v", "--verbose", is_flag=True, help="Show what the arms' processes log."),
    ]


def common(arms: str, engine: str = "kvtier") -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options that all workloads share, and gather them."""

    def add(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def gathered(**given: Any) -> int:
            dram = given.pop("dram")
            settings = Settings(
                arms=check_arms(given.pop("arms").split(",")),
                model=check_model(given.pop("model"), engine),
                engine=engine,
                device=check_device(given.pop("device", "cpu")),
                dram=None if dram is None else parse_bytes(dram),
                disk=parse_bytes(given.pop("disk")),
                s3_delay=parse_seconds(given.pop("s3_delay")),
                **{
                    name: given.pop(name)
                    for name in ("threads", "seed", "chunk_tokens", "directory", "s3", "verbose")
                },
            )
            return command(settings, given.pop("json_file"), given.pop("output_details"), **given)

        for option in reversed(_shared_options(arms, engine)):
            option(gathered)
        return gathered

    return add


def run_workload(
    settings: Settings,
    shape: SharedPrefix | MultiTurn | NoReuse,
    json_file: str | None,
    details: bool,  # noqa: FBT001  (an option)
) -> int:
    """Run, show and write the report; 1 where it has problems."""
    check_engine(settings.engine)
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
