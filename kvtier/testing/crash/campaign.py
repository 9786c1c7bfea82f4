"""Which crashes and damages there are, how many of each, and what they gave in sum."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from kvtier.testing.crash import damage, kills, power, tools
from kvtier.testing.crash.judge import Findings
from kvtier.testing.crash.tracing import CAN_FAIL, can_trace
from kvtier.tiers import exact

MODES: Final = ("batch", "each")
Tell = Callable[[str, int, int], None]


class Amounts(msgspec.Struct, frozen=True):
    """How many of each, for each mode. lots: into how many tasks a series is cut.

    full: of system calls, and of power losses, of a writer that finds its index full. tools: of
    system calls, of steps and of power losses, for each of TOOLS.
    """

    calls: int
    torn_calls: int
    steps: int
    recoveries: int
    failing: int
    power_losses: int
    lying_images: int
    full: int
    tools: int
    live: dict[str, int]
    at_rest: dict[str, int]
    lots: int


WHOLE: Final = Amounts(
    calls=300,
    torn_calls=200,
    steps=150,
    recoveries=50,
    failing=200,
    power_losses=400,
    lying_images=200,
    full=100,
    tools=40,
    live={"flips": 9_500, "truncations": 800, "swaps": 500},
    at_rest={"flips": 600, "truncations": 200, "older": 150},
    lots=10,
)
SHORT: Final = Amounts(
    calls=16,
    torn_calls=12,
    steps=12,
    recoveries=6,
    failing=6,
    power_losses=16,
    lying_images=10,
    full=6,
    tools=2,
    live={"flips": 200, "truncations": 40, "swaps": 40},
    at_rest={"flips": 24, "truncations": 8, "older": 8},
    lots=1,
)


class Task(msgspec.Struct, frozen=True):
    """A part of a series: of its cases, every `stride`-th from `offset` on."""

    series: str
    mode: str
    most: int
    offset: int
    stride: int


class Given(msgspec.Struct):
    """What a task gave."""

    task: Task
    counts: dict[str, int]
    notes: list[str]


@dataclass(slots=True)
class Totals:
    """What a campaign gave. counts: see the names there. notes: of what went wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    by_mode: dict[str, Counter[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    traced: bool = True

    def add(self, given: Given) -> None:
        """Add what a task gave."""
        self.counts.update(given.counts)
        self.by_mode.setdefault(given.task.mode, Counter()).update(given.counts)
        self.notes += [f"{given.task.series}: {note}" for note in given.notes]

    def summary(self) -> dict[str, object]:
        """Return the figures under the names that they are known by."""
        found = self.counts
        return {
            "kill_points": _kill_points(found),
            "acked": found["acked"],
            "wrong_bytes": found["wrong"],
            "process_deaths": found["deaths"],
            "acked_durable_lost": found["lost"],
            "unusable": len(self.notes),
            "flips": found["flips"],
            "truncations": found["truncations"],
            "swaps": found["swaps"],
            "older_copies": found["older"],
            "torn": found["torn"],
            "failed_calls": found["failed_calls"],
            "power_losses": found["power_losses"],
            "lying_syncs": found["lying_syncs"],
            "lying_images": found["lying_images"],
            "reads": found["hits"] + found["misses"],
            "hits": found["hits"],
            "control_wrong_bytes": found["control"],
            "traced": self.traced,
            "kill_points_by_mode": {
                mode: _kill_points(one) for mode, one in sorted(self.by_mode.items())
            },
        }


def _kill_points(counts: Counter[str]) -> int:
    return sum(counts[f"{kind}_points"] for kind in ("call", "step", "recovery", "tool"))


def run(amounts: Amounts, jobs: int, tell: Tell, folder: Path | None = None) -> Totals:
    """Do everything, in as many processes. folder: where, by default in memory if there is any.

    Raises Unavailable or AssertionError where a case was not what it is counted as.
    """
    totals = Totals(traced=can_trace())
    with tempfile.TemporaryDirectory(prefix="crash-", dir=folder or in_memory()) as name:
        bases = {mode: damage.bases(Path(name) / mode, mode) for mode in MODES}
        tasks = list(_tasks(amounts, traced=totals.traced))
        for done, given in enumerate(_spread(bases, tasks, jobs)):
            totals.add(given)
            tell(f"{given.task.series}, {given.task.mode}", done + 1, len(tasks))
        with without_checksums():
            control = damage.while_open(bases["each"][-1], "each", "flips", 200, 0)
        totals.counts["control"] = control.counts["wrong"]
    return totals


def in_memory() -> str | None:
    """Return a folder in memory: what a kill leaves does not depend on the device below."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  (a new folder in it)


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Take a guard away: a Tier no longer compares payloads with their checksums."""

    class Anything(bytes):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    was = vars(exact)["checksum"]
    vars(exact)["checksum"] = lambda _: Anything()
    try:
        yield
    finally:
        vars(exact)["checksum"] = was


def _tasks(amounts: Amounts, *, traced: bool) -> Iterator[Task]:
    series = {"steps": amounts.steps, "tools' steps": amounts.tools}
    if traced:
        series |= {
            "calls": amounts.calls,
            "torn calls": amounts.torn_calls,
            "recoveries": amounts.recoveries,
            "power losses": amounts.power_losses,
            "lying syncs": amounts.lying_images,
            "full index, calls": amounts.full,
            "full index, power losses": amounts.full,
            "tools' calls": amounts.tools,
            "tools' power losses": amounts.tools,
        }
        if CAN_FAIL:
            series["failing calls"] = amounts.failing
    else:  # kill at more steps instead
        series["steps"] += amounts.calls + amounts.torn_calls + amounts.recoveries
    series |= {f"live {kind}": count for kind, count in amounts.live.items()}
    series |= {f"resting {kind}": count for kind, count in amounts.at_rest.items()}
    for lot in range(amounts.lots):
        for name, most in series.items():
            for mode in MODES:
                yield Task(name, mode, most, lot, amounts.lots)


def _do(task: Task, bases: Sequence[Path]) -> Findings:
    base, mode = bases[-1], task.mode
    first, _, kind = task.series.partition(" ")
    count = (task.most + task.stride - 1 - task.offset) // task.stride
    if first == "live":
        return damage.while_open(base, mode, kind, count, task.offset)
    if first == "resting":
        return damage.at_rest(list(bases), mode, kind, count, task.offset)
    series: dict[str, Callable[[Path, str, int, int, int], Findings]] = {
        "calls": kills.at_calls,
        "torn calls": functools.partial(kills.at_calls, torn=True),
        "steps": kills.at_steps,
        "recoveries": kills.while_recovering,
        "failing calls": kills.failing_calls,
        "full index, calls": functools.partial(kills.at_calls, fills=True),
        "full index, power losses": functools.partial(power.power_losses, fills=True),
        "tools' calls": tools.at_calls,
        "tools' steps": tools.at_steps,
        "tools' power losses": tools.power_losses,
        "power losses": power.power_losses,
        "lying syncs": functools.partial(power.power_losses, lying=True),
    }
    return series[task.series](base, mode, task.most, task.offset, task.stride)


# ---- processes


def _spread(bases: dict[str, list[Path]], tasks: Sequence[Task], jobs: int) -> Iterator[Given]:
    """Do tasks in as many children, and yield what each gives. One that fails ends it all."""
    jobs = min(jobs, len(tasks))
    children: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        try:
            for number in range(jobs):
                reading, writing = os.pipe()
                child = os.fork()
                if child == 0:
                    _work(bases, tasks[number::jobs], writing)
                os.close(writing)
                children[reading] = child
                selector.register(reading, selectors.EVENT_READ, bytearray())
            yield from _gather(selector, len(tasks))
        finally:
            for reading, child in children.items():
                os.close(reading)
                os.kill(child, 9)  # it has ended, or its work is not wanted any more
                os.waitpid(child, 0)


def _gather(selector: selectors.BaseSelector, count: int) -> Iterator[Given]:
    left = count
    while left:
        for key, _ in selector.select():
            descriptor: int = key.fd
            data = os.read(descriptor, 1 << 16)
            if not data:
                selector.unregister(descriptor)
                assert selector.get_map(), "a process of the campaign ended before its work"
            key.data.extend(data)
            *lines, rest = key.data.split(b"\n")
            key.data[:] = rest
            for line in lines:
                left -= 1
                yield msgspec.json.decode(line, type=Given)


def _work(bases: dict[str, list[Path]], tasks: Sequence[Task], writing: int) -> None:
    """Do tasks in this child, say what they gave, and end."""
    try:
        with os.fdopen(writing, "wb") as pipe:
            for task in tasks:
                found = _do(task, bases[task.mode])
                pipe.write(msgspec.json.encode(Given(task, dict(found.counts), found.notes)))
                pipe.write(b"\n")
                pipe.flush()
    except Exception:  # noqa: BLE001  (the parent misses what it would have given)
        traceback.print_exc()
    finally:
        os._exit(0)
