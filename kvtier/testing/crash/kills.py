"""``kill -9`` of a writer at each system call that changes a file, and at each named step."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.errors import Unavailable
from kvtier.storage_backends.slab import FileIO
from kvtier.testing.crash import workload
from kvtier.testing.crash.judge import Findings, Verdict, judge, weigh
from kvtier.testing.crash.steps import PieceIO, Steps, stepping
from kvtier.testing.crash.tracing import KILL, Call, fork_and_wait, trace

_TURNS: Final = 30
_TORN_TURNS: Final = 12
_ERRORS: Final = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EMFILE, errno.EINTR)


class Point(NamedTuple):
    """A system call of a writer. torn: it is not the first piece of the payload it belongs to."""

    name: str
    file: str
    torn: bool


def copied(base: Path, folder: Path) -> Path:
    """Copy a store and its notes; return the copy's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    shutil.copy(workload.log_of(base), workload.log_of(folder))
    return folder


def spread(count: int, most: int, offset: int, stride: int) -> Iterator[int]:
    """Yield up to `most` of the numbers from 1 to `count`, evenly; of these one process's share."""
    chosen = range(count) if count <= most else (n * count // most for n in range(most))
    for place, number in enumerate(chosen):
        if place % stride == offset:
            yield number + 1


def points(work: Callable[[], None]) -> list[Point]:
    """Let a writer come to its end, and return its calls. Raises Unavailable if it does not."""
    found: list[Point] = []
    last = ("", -1)

    def visit(call: Call) -> None:
        nonlocal last
        if call.result is not None or not call.changes:
            return
        file = Path(call.path()).name if call.name not in ("open", "openat") else ""
        place = ("", -1)
        if call.name.startswith("pwrite") and file.endswith(".seg"):
            place = (file, call.arguments[3] // int(file[:-4].rpartition("-")[2]))
        found.append(Point(call.name, file, place == last and place[1] >= 0))
        last = place

    if status := trace(work, visit):
        raise Unavailable(f"the writer ended with {status} though nobody killed it")
    return found


def kill_at(work: Callable[[], None], at: int) -> None:
    """Kill a writer before its call number `at`. Raises Unavailable if it never comes to that."""
    seen = 0

    def visit(call: Call) -> int | None:
        nonlocal seen
        seen += call.result is None and call.changes
        return KILL if seen == at else None

    status = trace(work, visit)
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        raise Unavailable(f"the writer was to be killed at call {at} and ended with {status}")


def at_calls(
    base: Path,
    durability: str,
    most: int,
    offset: int,
    stride: int,
    *,
    torn: bool = False,
    fills: bool = False,
) -> Findings:
    """Kill a writer at up to `most` of its system calls, and judge what each leaves.

    torn: it writes each payload in 16 pieces, in any order. fills: see workload.work.
    """
    findings = Findings()
    folder = base.with_name(f"case-{os.getpid()}")

    def work() -> None:
        io = PieceIO(5) if torn else FileIO()
        turns = _TORN_TURNS if torn else _TURNS
        workload.work(folder, durability, turns, 1, io, fills=fills)

    copied(base, folder)
    calls = points(work)
    for at in spread(len(calls), most, offset, stride):
        copied(base, folder)
        kill_at(work, at)
        findings.counts["torn"] += calls[at - 1].torn
        findings.counts["call_points"] += 1
        _judge(findings, base, folder, durability, f"{durability}, call {at} ({calls[at - 1]})")
    return findings


def at_steps(base: Path, durability: str, most: int, offset: int, stride: int) -> Findings:
    """Let a writer kill itself at up to `most` of its named steps, and judge what each leaves."""
    findings = Findings()
    folder = base.with_name(f"case-{os.getpid()}")

    def work(at: int) -> None:
        with stepping(Steps(at)):
            workload.work(folder, durability, _TURNS, 2)

    for at in spread(_steps_of(base, folder, durability), most, offset, stride):
        copied(base, folder)
        end_at(functools.partial(work, at), at)
        findings.counts["step_points"] += 1
        _judge(findings, base, folder, durability, f"{durability}, step {at}")
    return findings


def end_at(work: Callable[[], None], at: int) -> None:
    """Let somebody kill itself at its step number `at`. Raises Unavailable if it does not."""
    status = fork_and_wait(work)
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        raise Unavailable(f"the writer was to end at step {at} and ended with {status}")


def _steps_of(base: Path, folder: Path, durability: str) -> int:
    """Return how many steps the writer takes."""
    copied(base, folder)
    steps = Steps(0)
    with stepping(steps):
        workload.work(folder, durability, _TURNS, 2)
    return steps.taken


def while_recovering(base: Path, durability: str, most: int, offset: int, stride: int) -> Findings:
    """Kill a writer half-way, then kill whoever opens what it left at each call; judge that."""
    findings = Findings()
    crashed = base.with_name(f"crashed-{os.getpid()}")
    folder = base.with_name(f"case-{os.getpid()}")
    copied(base, crashed)

    def write() -> None:
        workload.work(crashed, durability, _TURNS, 3)

    calls = len(points(write))
    copied(base, crashed)
    kill_at(write, calls * 2 // 3)

    def reopen() -> None:
        workload.open_store(folder, durability).close()

    copied(crashed, folder)
    for at in spread(len(points(reopen)), most, offset, stride):
        copied(crashed, folder)
        kill_at(reopen, at)
        findings.counts["recovery_points"] += 1
        _judge(findings, base, folder, durability, f"{durability}, call {at} of the recovery")
    shutil.rmtree(crashed)
    return findings


def failing_calls(base: Path, durability: str, most: int, offset: int, stride: int) -> Findings:
    """Let one of a writer's calls fail, or several in a row; judge what it goes on to leave.

    It must go on, work again when calls no longer fail, and lose nothing that is durable.
    """
    findings = Findings()
    folder = base.with_name(f"case-{os.getpid()}")

    def work() -> None:
        workload.work_on_a_bad_disk(folder, durability, _TURNS, 5)

    copied(base, folder)
    counting = _Failing(folder, 0, 0, 0)
    if status := trace(work, counting.visit):
        raise Unavailable(f"the writer ended with {status} though nothing failed")
    for at in spread(counting.seen, most, offset, stride):
        copied(base, folder)
        failing = _Failing(folder, at, _ERRORS[at % len(_ERRORS)], 1 if at % 3 else 12)
        status = trace(work, failing.visit)
        case = f"{durability}, {failing.said} at call {at}"
        findings.counts["failed_calls"] += failing.failed
        if status:
            died = Verdict(deaths=1, notes=[f"the writer ended with {status}"])
            findings.add(case, died)
        _judge(findings, base, folder, durability, case)
    return findings


class _Failing:
    """Lets calls on one folder fail: from the `at`-th on as many as `times`, until it is healed."""

    def __init__(self, folder: Path, at: int, code: int, times: int) -> None:
        self._folder, self._log = str(folder), str(workload.log_of(folder))
        self._at, self._code, self._times = at, code, times
        self._healed = False
        self.seen = self.failed = 0
        self.said = "nothing"

    def visit(self, call: Call) -> int | None:
        """See Visitor."""
        if call.result is not None or not call.changes:
            return None
        place = _place(call)
        if place == self._log and call.memory(call.arguments[1], 2) == workload.HEALED:
            self._healed = True
        if self._healed or not place.startswith(f"{self._folder}/"):
            return None
        self.seen += 1
        if not self._at or not self._at <= self.seen < self._at + self._times:
            return None
        self.failed += 1
        if self.failed == 1:
            name = errno.errorcode[self._code]
            self.said = f"{name} {self._times} times from {call.name} of {Path(place).name} on"
        return self._code


def _place(call: Call) -> str:
    """Return the path that a call is about."""
    if call.name in ("unlink", "rename", "open", "truncate", "mkdir", "creat"):
        return call.text(0)
    if call.name in ("openat", "unlinkat", "renameat", "renameat2", "mkdirat"):
        return call.text(1)
    return call.path()


def acked_before(base: Path, durability: str) -> int:
    """Return how many acknowledged changes a base has; they are not the killed writer's."""
    return workload.told(workload.log_of(base).read_text(), durability).acked


def _judge(findings: Findings, base: Path, folder: Path, durability: str, case: str) -> None:
    at_once = Verdict()
    weigh(folder, workload.CAPACITY, at_once)
    findings.add(case, at_once)
    promised = workload.told(workload.log_of(folder).read_text(), durability)
    findings.counts["acked"] += promised.acked - acked_before(base, durability)
    findings.add(case, judge(folder, durability, promised))
