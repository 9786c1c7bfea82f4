"""What ``kvtier sim`` found: as JSON, and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from kvtier.testing.campaign import Found, Totals
from kvtier.testing.harmless import stale
from kvtier.testing.simevents import EVENTS
from kvtier.testing.simhistory import history, shorten
from kvtier.testing.simschedule import Schedule, live

_HISTORY_LINES: Final = 120
_FOUND, _BY_TEST, _HARMLESS, _MISSED = range(4)
_FILE_COLUMNS: Final = 150  # a file has no width; rich would take 80 and cut the columns


class Explained(msgspec.Struct):
    """A failure with its shortest history. replay: the command that repeats it."""

    seed: int | None
    replay: str
    history: list[str]

    def shorten(self, schedule: Schedule) -> None:
        """Run it again, shorter and shorter, and keep what happened in the last that failed."""
        shortest = shorten(schedule, live(schedule))
        outcome, lines = history(shortest)
        self.replay = shortest.command()
        left_out = len(lines) - _HISTORY_LINES
        if left_out > 0:
            lines = [f"({left_out} earlier lines are left out)", *lines[-_HISTORY_LINES:]]
        self.history = [*lines, f"{outcome.kind}: {outcome.message}"]


class FailureReport(Explained):
    """A schedule under which the code as it is went wrong."""

    kind: str
    message: str
    schedule: Schedule

    def explain(self, schedule: Schedule) -> None:
        """Add the history. schedule: what was asked for, of which this is one."""
        del schedule
        self.shorten(self.schedule)


class MutationReport(Explained):
    """A guard that was taken away. found_after: schedules; None when nothing failed.

    Then found_by: the test that fails without it, or harmless: the reason why nothing can.
    """

    name: str
    guard: str
    found_after: int | None
    how: str
    found_by: str = ""
    harmless: str = ""

    @property
    def missed(self) -> bool:
        """Say whether nothing found it and nobody said why."""
        return self.found_after is None and not self.found_by and not self.harmless

    def explain(self, schedule: Schedule) -> None:
        """Add the history. schedule: what was asked for."""
        if self.seed is not None:
            self.shorten(replace(schedule, seed=self.seed, mutation=self.name))


class SimReport(msgspec.Struct):
    """Everything that was found. events: how often each happened; reached: in how many schedules.

    violations, deadlocks, leaks: schedules that failed so, of the code as it is. swept: schedules
    with one aimed cancellation each, which are not among the others. digest: equal for
    two runs exactly when every schedule took the same course. stale: guards that are not in the
    source any more, although there is a reason why they are harmless, or a test that finds them.
    """

    violations: int
    deadlocks: int
    leaks: int
    schedules: int
    swept: int
    steps: int
    seconds: float
    schedules_per_s: float
    steps_per_s: float
    digest: str
    args: dict[str, Any]
    events: dict[str, int]
    reached: dict[str, int]
    failures: list[FailureReport]
    mutations: list[MutationReport]
    stale: list[str]

    @property
    def clean(self) -> bool:
        """Say whether the code held, and every guard that was taken away was accounted for."""
        held = not (self.violations or self.deadlocks or self.leaks)
        return held and not self.stale and not any(one.missed for one in self.mutations)

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        totals: Totals,
        swept: Totals,
        found: Sequence[Found],
        *,
        seconds: float,
        jobs: int,
    ) -> SimReport:
        """Put a report together. seconds: that the schedules took, without those swept."""
        failed = totals.counts + swept.counts
        return cls(
            violations=failed["violation"],
            deadlocks=failed["deadlock"],
            leaks=failed["leak"],
            schedules=totals.schedules,
            swept=swept.schedules,
            steps=totals.steps,
            seconds=round(seconds, 3),
            schedules_per_s=round(totals.schedules / seconds, 3),
            steps_per_s=round(totals.steps / seconds, 3),
            digest=totals.digest,
            args={**msgspec.to_builtins(schedule), "jobs": jobs},
            events=dict(totals.events),
            reached=dict(totals.reached),
            failures=[
                FailureReport(
                    kind=one.kind,
                    message=one.message,
                    seed=one.schedule.seed,
                    replay=one.schedule.command(),
                    history=[],
                    schedule=one.schedule,
                )
                for one in (*totals.failures, *swept.failures)
            ],
            mutations=[MutationReport(**msgspec.structs.asdict(one), history=[]) for one in found],
            stale=stale() if found else [],
        )


def show(report: SimReport) -> None:
    """Print the report on stdout."""
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    table = Table(title=f"{report.schedules:,} schedules from seed {report.args['seed']}")
    for name in ("what was reached", "times", "schedules"):
        table.add_column(name, justify="left" if name.startswith("what") else "right")
    for event, text in EVENTS.items():
        count, schedules = report.events[event], report.reached[event]
        style = None if count else "yellow"
        table.add_row(text, f"{count:,}", f"{schedules:,}", style=style)
    console.print(table)
    if report.mutations:
        console.print(_mutations(report.mutations))
    for failed in (*report.failures, *report.mutations):
        for line in failed.history:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if failed.history or isinstance(failed, FailureReport):
            console.print(f"again: {failed.replay}", highlight=False, markup=False, soft_wrap=True)
    for line in _sums(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _mutations(mutations: Sequence[MutationReport]) -> Table:
    """Return a table of what was found, then of what is harmless, then of what was missed."""
    table = Table(title="guards taken away")
    table.add_column("guard", no_wrap=True, min_width=max(len(one.name) for one in mutations))
    table.add_column("found after", justify="right", no_wrap=True, min_width=11)
    table.add_column("how", no_wrap=True, overflow="ellipsis")
    rows = [(_after(one), one) for one in mutations]
    for (group, after), one in sorted(rows, key=lambda row: row[0][0]):
        how = one.how or one.found_by or one.harmless or one.guard
        style = "red" if group == _MISSED else "dim" if group == _HARMLESS else None
        table.add_row(one.name, after, how, style=style)
    return table


def _after(one: MutationReport) -> tuple[int, str]:
    """Return the group of a guard, and when it was found."""
    if one.found_after is not None:
        return _FOUND, f"{one.found_after:,}"
    if one.missed:
        return _MISSED, "NEVER"
    return (_BY_TEST, "a test") if one.found_by else (_HARMLESS, "harmless")


def _sums(report: SimReport) -> list[str]:
    swept = f" and {report.swept:,} cancellations" if report.swept else ""
    lines = [
        (
            f"{report.violations} violations, {report.deadlocks} deadlocks, {report.leaks} leaks "
            f"in {report.schedules:,} schedules{swept}; "
            f"{report.schedules_per_s:,.0f} schedules and {report.steps_per_s:,.0f} steps a second"
        ),
        f"digest {report.digest}",
    ]
    if report.mutations:
        count = Counter(_after(one)[0] for one in report.mutations)
        lines.append(
            f"{count[_FOUND]} of {len(report.mutations)} guards were missed when taken away, "
            f"{count[_BY_TEST]} more by a test, {count[_HARMLESS]} are harmless, "
            f"{count[_MISSED]} nobody missed"
        )
    lines += [f"not in the source any more: {name}" for name in report.stale]
    return lines
