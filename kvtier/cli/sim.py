"""``kvtier sim``: the cache's own code under many schedules, to find races and broken guards."""

from __future__ import annotations

import os
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import click

from kvtier.cli.output import REPORT, write_report
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.cli.simreport import SimReport
    from kvtier.testing.simconditions import Cancel
    from kvtier.testing.simschedule import Schedule

_COUNT: Final = click.IntRange(min=1)
_MUTATION_SCHEDULES: Final = 300
_WORTH_A_PROCESS: Final = 100  # schedules; a process takes half a second to start
_EXPLAINED: Final = 3


@click.command("sim", short_help="Look for races in the cache, by thousands of schedules.")
@click.option(
    "--schedules", type=_COUNT, default=1000, show_default=True, help="How many seeds to run."
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed."
)
@click.option(
    "--ops",
    type=_COUNT,
    help="Calls on the cache in a schedule; by default drawn from its seed.",
)
@click.option(
    "--mutate",
    metavar="all|named|guards|NAME",
    help=f"Also take a guard away, and see how soon it is missed: {_MUTATION_SCHEDULES} schedules "
    "at most. named: those described by hand; guards: every one in the catalog's source; NAME: "
    "one, or all of a pattern like 'lease.*'.",
)
@click.option("--jobs", type=_COUNT, help="Processes; by default one a core.")
@click.option("--only", metavar="N,N", help="Run these clients of a schedule alone.")
@click.option(
    "--without",
    metavar="WHAT,WHAT",
    help="Of faults, cancels, clears, hangs, crashes and disorder.",
)
@click.option(
    "--shuffle",
    type=click.IntRange(min=0),
    default=0,
    help="Another order of events in the same worlds.",
)
@click.option(
    "--sweep",
    type=click.IntRange(min=0),
    default=0,
    help="Of so many seeds, also cancel a client's requests, one at each of its steps in turn.",
)
@click.option(
    "--cancel",
    metavar="TASK:N:PHASE",
    help="Cancel one task before or after its Nth step, such as request-2.0:7:after.",
)
@click.option(
    "--json", "json_file", type=REPORT, metavar="FILE", help="Write the report; - is stdout."
)
def sim(
    schedules: int,
    mutate: str | None,
    jobs: int | None,
    json_file: str | None,
    sweep: int,
    **kept: Any,
) -> int:
    """Run the cache's own code in small, crowded worlds, a new one for each seed.

    Time is virtual, and the order of events, faults of tiers, cancellations and hung calls follow
    from the seed. All that the cache promises is checked at every step. A seed that fails is run
    again, shortened, and printed with the command that repeats it; the exit status is 1 then, and
    also when a guard was taken away, nothing failed, and no reason is known why that is harmless.
    The result does not depend on --jobs.
    """
    from kvtier.cli.simreport import show
    from kvtier.testing.mutations import chosen

    names = [] if mutate is None else chosen(mutate)
    schedule = _schedule(**kept)
    if schedule.only and schedules > 1:
        raise ConfigError("--only names clients of one seed; give --schedules 1 with it")
    schedule.scenario()  # raises what is wrong with it
    jobs = jobs or _cores(schedules, sweep, names)
    report = _run(schedule, schedules, sweep, names, jobs)
    if json_file is not None:
        write_report(report, json_file)
    if json_file != "-":
        show(report)
    return 0 if report.clean else 1


def _schedule(
    seed: int,
    ops: int | None,
    only: str | None,
    without: str | None,
    shuffle: int,
    cancel: str | None,
) -> Schedule:
    from kvtier.testing.simschedule import Schedule

    try:
        numbers = tuple(int(number) for number in (only or "").split(",") if number)
    except ValueError as error:
        raise ConfigError(f"--only takes numbers of clients, like 0,3, not {only!r}") from error
    troubles = tuple(what for what in (without or "").split(",") if what)
    return Schedule(seed, ops, numbers, troubles, shuffle, _cancel(cancel))


def _cancel(text: str | None) -> Cancel | None:
    from kvtier.testing.simconditions import PHASES

    if text is None:
        return None
    match text.split(":"):
        case [task, step, phase] if task and step.isdecimal() and phase in PHASES:
            return task, int(step), phase
    raise ConfigError(f"--cancel takes a task, a step and a phase, like a:7:after, not {text!r}")


def _cores(schedules: int, sweep: int, names: list[str]) -> int:
    """Return how many processes are worth their start."""
    worth = max(len(names), sweep, -(-schedules // _WORTH_A_PROCESS))
    return min(len(os.sched_getaffinity(0)), worth)


def _run(schedule: Schedule, schedules: int, sweep: int, names: list[str], jobs: int) -> SimReport:
    """Run the code as it is, then without each guard, then explain what failed."""
    from kvtier.cli.progress import progress
    from kvtier.cli.simreport import SimReport
    from kvtier.testing import campaign

    with progress() as tell:
        before = perf_counter()
        text = f"{schedules:,} schedules"
        tell(text, 0, schedules)
        totals = campaign.run(schedule, schedules, jobs, lambda done: tell(text, done, schedules))
        seconds = perf_counter() - before
        swept = campaign.run(
            schedule, sweep, jobs, lambda done: tell("seeds swept", done, sweep), sweep=True
        )
        most, count = min(schedules, _MUTATION_SCHEDULES), len(names)
        found = campaign.hunt(
            schedule, names, most, jobs, lambda done: tell("guards taken away", done, count)
        )
        report = SimReport.of(schedule, totals, swept, found, seconds=seconds, jobs=jobs)
        unexplained = report.failures[:_EXPLAINED] + report.mutations * (count == 1)
        for number, one in enumerate(unexplained):
            tell("shortening what failed", number, len(unexplained))
            one.explain(schedule)
        return report
