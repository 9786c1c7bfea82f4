"""Which crashes and damages there are, how many of each, and what they gave in sum."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from kvtier.testing.crash import damage, kills, power, tools
from kvtier.testing.crash.judge import Findings
from kvtier.testing.crash.tracing import CAN_FAIL, can_trace
from kvtier.testing.forks import forked
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


@dataclass(slots=True)
class Totals:
    """What a campaign gave. counts: see the names there. notes: of what went wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    by_mode: dict[str, Counter[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    traced: bool = True

    def add(self, task: Task, counts: dict[str, int], notes: Sequence[str]) -> None:
        """Add what a task gave."""
        self.counts.update(counts)
        self.by_mode.setdefault(task.mode, Counter()).update(counts)
        self.notes += [f"{task.series}: {note}" for note in notes]

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

    Raises RuntimeError where a case was not what it is counted as.
    """
    totals = Totals(traced=can_trace())
    with tempfile.TemporaryDirectory(prefix="crash-", dir=folder or in_memory()) as name:
        bases = {mode: damage.bases(Path(name) / mode, mode) for mode in MODES}
        tasks = list(_tasks(amounts, traced=totals.traced))
        ended = forked(
            [functools.partial(_given, task, bases[task.mode]) for task in tasks],
            functools.partial(tell, "crashes"),
            cores=jobs,
        )
        for task, one in zip(tasks, ended, strict=True):
            totals.add(task, *one.value)
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


def _given(task: Task, bases: Sequence[Path]) -> tuple[dict[str, int], list[str]]:
    """Do a task, and leave nothing of its cases."""
    found = _do(task, bases)
    for left in bases[-1].parent.glob(f"*-{os.getpid()}"):
        shutil.rmtree(left)
    return dict(found.counts), found.notes


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
