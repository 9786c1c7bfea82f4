"""What the benchmark's commands have in common: their options, and running one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

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
from kvtier.cli.kinds import DIRECTORY, Count
from kvtier.cli.options import with_options
from kvtier.cli.output import PLOT, REPORT, write_report
from kvtier.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from kvtier.bench.run import Shape

_MOST_THREADS: Final = 1024
_MODELS: Final = {
    "kvtier": (SMOLLM2, "smollm2, random (tiny, for tests), or a GGUF file of the Llama family."),
    "vllm": (RANDOM, "random, or a model as vLLM takes it: a folder, or a name at its hub."),
}
F = TypeVar("F", bound=Callable[..., Any])


class Common(NamedTuple):
    """What differs between commands in the options that all of them have.

    arms, model, disk: by default; model None: the engine's. chunked: whether the size of chunks
    can be told; else it follows from the workload.
    """

    arms: str
    engine: str = "kvtier"
    model: str | None = None
    disk: str | None = "8GiB"
    chunked: bool = True


class Output(NamedTuple):
    """Where a report goes: a JSON file or - for stdout, a picture; with every request or not."""

    json_file: str | None
    plot: str | None
    details: bool


def number(*names: str, least: int = 1, most: int | None = None, **more: Any) -> Callable[[F], F]:
    """Return an option that takes a whole number, of which the first name counts."""
    name = names[0].removeprefix("--").replace("-", "_")
    kind = Count(least, most)
    return click.option(*names, name, type=kind, metavar="N", show_default=True, **more)


def _text(name: str, metavar: str, text: str, default: str | None = None) -> Callable[[F], F]:
    """Return an option that takes a text."""
    return click.option(name, default=default, show_default=True, metavar=metavar, help=text)


def _shared_options(told: Common) -> list[Callable[[F], F]]:
    """Return the options of all workloads."""
    model, models = _MODELS[told.engine]
    chunk = number("--chunk-tokens", default=256, help="Tokens of a chunk of the cache.")
    where = "Where the model computes: cpu, cuda, or a GPU like cuda:1."
    device = _text("--device", "NAME", where, "cpu")
    return [
        _text("--arms", "LIST", f"Where the KV comes from, of {','.join(ARMS)}.", told.arms),
        _text("--model", "NAME", models, told.model or model),
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
        *([chunk] if told.chunked else []),
        _text("--dram", "SIZE", "Capacity of the dram tier; by default, what it takes."),
        _text(
            *(
                "--disk",
                "SIZE",
                "Capacity of the lmdb tier" + "; by default, what it takes." * (not told.disk),
            ),
            told.disk,
        ),
        click.option(
            "--dir",
            "directory",
            type=DIRECTORY,
            help="Where the lmdb tier goes: a temporary directory is made in it.",
        ),
        _text("--s3", "URL", "A bucket that exists; by default, a server is started here."),
        _text("--s3-delay", "TIME", "Round-trip time added to that server, like 20ms.", "0s"),
        click.option(
            "--json",
            "json_file",
            type=REPORT,
            metavar="FILE",
            help="Write the report there; - is stdout.",
        ),
        click.option(
            "--plot",
            type=PLOT,
            metavar="FILE.png",
            help="Draw the times to first token, and where the tokens came from.",
        ),
        *([device] if told.engine == "kvtier" else []),
        click.option("--output-details", is_flag=True, help="Put every request into the JSON."),
        click.option("-v", "--verbose", is_flag=True, help="Show what the arms' processes log."),
    ]


def common(told: Common) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options that all workloads share, and gather them."""

    def add(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def gathered(**given: Any) -> int:
            dram, disk = given.pop("dram"), given.pop("disk")
            settings = Settings(
                arms=check_arms(given.pop("arms").split(",")),
                model=check_model(given.pop("model"), told.engine),
                engine=told.engine,
                device=check_device(given.pop("device", "cpu")),
                dram=None if dram is None else parse_bytes(dram),
                disk=None if disk is None else parse_bytes(disk),
                s3_delay=parse_seconds(given.pop("s3_delay")),
                chunk_tokens=given.pop("chunk_tokens", 0),
                **{
                    name: given.pop(name)
                    for name in ("threads", "seed", "directory", "s3", "verbose")
                },
            )
            output = Output(given.pop("json_file"), given.pop("plot"), given.pop("output_details"))
            return command(settings, output, **given)

        return with_options(*_shared_options(told))(gathered)

    return add


def run_workload(settings: Settings, shape: Shape, output: Output) -> int:
    """Run, show, draw and write the report; 1 where it has problems."""
    check_engine(settings.engine)
    current_directory()
    from kvtier.bench.run import run
    from kvtier.cli.progress import progress
    from kvtier.cli.table import show

    with progress() as tell:
        report = run(settings, shape, tell, details=output.details)
    if output.json_file != "-":
        show(report)
    if output.json_file is not None:
        write_report(report, output.json_file)
    if output.plot is not None:
        from kvtier.cli.bench_plot import draw_report

        draw_report(report, Path(output.plot))
    for problem in report.problems:
        click.echo(f"problem: {problem}", err=True)
    return 1 if report.problems else 0
