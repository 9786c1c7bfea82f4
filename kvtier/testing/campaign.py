"""Many schedules, over several processes; the result does not depend on how many."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import IO, Final, TypeVar

import msgspec

from kvtier.errors import ProtocolError
from kvtier.testing.harmless import found_by, harmless
from kvtier.testing.mutations import named
from kvtier.testing.simevents import EVENTS
from kvtier.testing.simschedule import KINDS, Outcome, Schedule, live
from kvtier.testing.simsweep import swept
from kvtier.testing.with_parent import with_parent

_BATCH: Final = 20
_KEPT_FAILURES: Final = 100
_REVIEWED_SCHEDULES: Final = 30
R = TypeVar("R", "Batch", "Found")
Tell = Callable[[int], None]
"""Called with how many schedules, or mutations, are behind."""


class Failure(msgspec.Struct, frozen=True):
    """A schedule that did not end well."""

    schedule: Schedule
    kind: str
    message: str


class Batch(msgspec.Struct, frozen=True):
    """What some schedules that follow each other gave. reached: schedules, by event."""

    schedules: int
    steps: int
    digest: str
    events: dict[str, int]
    reached: dict[str, int]
    failures: list[Failure]


class Found(msgspec.Struct, frozen=True):
    """Whether a guard was missed. found_after: schedules, None for not at all; how: it showed.

    Otherwise found_by: a test that fails without it; or harmless: why nothing does.
    """

    name: str
    guard: str
    found_after: int | None
    how: str
    seed: int | None
    replay: str
    found_by: str = ""
    harmless: str = ""


class Task(msgspec.Struct, frozen=True):
    """What one process does: every `stride`-th batch; given mutations, those instead.

    sweep: each seed is a batch of its own, of all the cancellations of one request.
    """

    schedule: Schedule
    schedules: int
    mutations: list[str] = []
    sweep: bool = False
    stride: int = 1
    offset: int = 0


@dataclass(slots=True)
class Totals:
    """What a campaign gave, added up. failures: the first hundred."""

    schedules: int = 0
    steps: int = 0
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(KINDS, 0)))
    events: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(EVENTS, 0)))
    reached: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(EVENTS, 0)))
    failures: list[Failure] = field(default_factory=list)
    digest: str = ""


def run(
    schedule: Schedule, schedules: int, jobs: int, tell: Tell, *, sweep: bool = False
) -> Totals:
    """Run a schedule under as many seeds, from its own on, and add up what they gave.

    sweep: run each seed once for every place at which one of its requests can be cancelled.
    """
    totals, digest, seeds = Totals(), hashlib.sha256(), 0
    task, width = Task(schedule, schedules, sweep=sweep), 1 if sweep else _BATCH
    for batch in _spread(task, -(-schedules // width), jobs, Batch):
        totals.schedules += batch.schedules
        totals.steps += batch.steps
        totals.counts.update(failure.kind for failure in batch.failures)
        totals.events.update(batch.events)
        totals.reached.update(batch.reached)
        room = _KEPT_FAILURES - len(totals.failures)
        totals.failures += batch.failures[:room]
        digest.update(batch.digest.encode())
        seeds = min(seeds + width, schedules)
        tell(seeds)
    totals.digest = digest.hexdigest()
    return totals


def hunt(
    schedule: Schedule, names: list[str], schedules: int, jobs: int, tell: Tell
) -> list[Found]:
    """Take each guard away in turn, and run seeds until one fails, `schedules` at most.

    At most 30 for a guard of which is known that something else finds it, or why nothing can.
    """
    found: list[Found] = []
    if not names:
        return found
    for one in _spread(Task(schedule, schedules, names), len(names), jobs, Found):
        found.append(one)
        tell(len(found))
    return found


def work(task: Task) -> Iterator[Batch | Found]:
    """Do a task, a result at a time."""
    if task.mutations:
        for name in task.mutations[task.offset :: task.stride]:
            yield _hunt(msgspec.structs.replace(task, mutations=[name]))
        return
    begin, end = task.schedule.seed, task.schedule.seed + task.schedules
    firsts = range(begin, end, 1 if task.sweep else _BATCH)
    for first in firsts[task.offset :: task.stride]:
        if task.sweep:
            yield _batch(swept(_with(task.schedule, first)))
        else:
            seeds = range(first, min(first + _BATCH, end))
            yield _batch(_with(task.schedule, seed) for seed in seeds)


def _batch(schedules: Iterable[Schedule]) -> Batch:
    count = steps = 0
    digest = hashlib.sha256()
    events: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    failures = []
    for schedule in schedules:
        outcome = live(schedule)
        count += 1
        steps += outcome.steps
        events.update(outcome.events)
        reached.update(name for name, times in outcome.events.items() if times)
        ended = f"{schedule.seed} {outcome.digest} {outcome.kind} {outcome.message}\n"
        digest.update(ended.encode())
        if outcome.kind:
            failures.append(Failure(schedule, outcome.kind, outcome.message))
    return Batch(count, steps, digest.hexdigest(), dict(events), dict(reached), failures)


def _hunt(task: Task) -> Found:
    (name,) = task.mutations
    guard, test, reason = named(name).guard, found_by().get(name, ""), harmless().get(name, "")
    most = min(task.schedules, _REVIEWED_SCHEDULES) if test or reason else task.schedules
    for count in range(1, most + 1):
        schedule = _with(task.schedule, task.schedule.seed + count - 1, name)
        outcome = live(schedule)
        if outcome.kind:
            how = f"{outcome.kind}: {_first_line(outcome)}"
            return Found(name, guard, count, how, schedule.seed, schedule.command())
    return Found(name, guard, None, "", None, "", test, reason)


def _first_line(outcome: Outcome) -> str:
    first, _, rest = outcome.message.partition("\n")
    return f"{first} {rest.partition(chr(10))[0].strip()}" if first.endswith(":") else first


def _with(schedule: Schedule, seed: int, mutation: str | None = None) -> Schedule:
    return replace(schedule, seed=seed, mutation=mutation)


# ---- processes


def _spread(task: Task, results: int, jobs: int, kind: type[R]) -> Iterator[R]:
    """Yield a task's results in their order, from as many processes.

    The processes take turns, so that which does what, and in which order it is read, is fixed.
    """
    stride = min(jobs, results)
    if stride <= 1:
        for result in work(task):
            if isinstance(result, kind):
                yield result
        return
    decoder = msgspec.json.Decoder(kind)
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(_worker(msgspec.structs.replace(task, stride=stride, offset=n)))
            for n in range(stride)
        ]
        for number in range(results):
            line = workers[number % stride].readline()
            if not line:
                raise ProtocolError("a process of the campaign ended before its work was done")
            yield decoder.decode(line)


@contextlib.contextmanager
def _worker(task: Task) -> Iterator[IO[bytes]]:
    """Start a process that does a task; yield what it prints, a result a line."""
    process = subprocess.Popen(  # noqa: S603  (our own command)
        with_parent([sys.executable, "-m", "kvtier.testing.simworker"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the campaign, which then ends its processes
    )
    with process:
        if process.stdin is None or process.stdout is None:
            raise ProtocolError("a process without pipes")
        try:
            process.stdin.write(msgspec.json.encode(task) + b"\n")
            process.stdin.close()
            yield process.stdout
        finally:
            process.kill()  # it has ended, or its work is not wanted any more
