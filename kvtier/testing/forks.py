"""Work in forks of this process, as many at a time as cores: what breaks, breaks alone."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from kvtier.testing.with_parent import end_with

Job = Callable[[], Any]
"""Returns what JSON can say."""

Tell = Callable[[int, int], None]
"""Called with how many jobs of how many are behind."""

_PIECE: Final = 1 << 16
_SILENCE: Final = 300.0
"""Seconds in which no job ends: they wait for something, and compute nothing."""


class Ended(NamedTuple):
    """What a job returned, or why it returned nothing."""

    result: Any
    error: str = ""

    @property
    def value(self) -> Any:
        """What it returned. Raises RuntimeError where it did not."""
        if self.error:
            raise RuntimeError(self.error)
        return self.result


def forked(
    jobs: Sequence[Job],
    tell: Tell = lambda _done, _count: None,
    *,
    seconds: int = 0,
    cores: int | None = None,
) -> list[Ended]:
    """Run each job in a fork of its own, and return how they ended, in their order. Blocks.

    cores: how many at a time; by default as many as there are.
    seconds: of CPU time, after which a job is ended; 0: never. Not of the clock: on a busy machine
    what is good would pass for what hangs. Raises RuntimeError where all of them wait for nothing,
    such as a lock that a thread held when its process forked: that says nothing of a job.
    """
    found: list[Ended] = [Ended(None)] * len(jobs)
    waiting, done, cores = deque(enumerate(jobs)), 0, cores or os.cpu_count() or 1
    running: dict[int, tuple[int, int, bytearray]] = {}
    with contextlib.ExitStack() as undo:
        undo.callback(_end, running)
        while waiting or running:
            while waiting and len(running) < cores:
                number, job = waiting.popleft()
                place, child = _begin(job, seconds)
                running[place] = (number, child, bytearray())
            ready = select.select(list(running), [], [], _SILENCE)[0]
            if not ready:
                raise RuntimeError(f"forks of this process did nothing for {_SILENCE:g} seconds")
            for place in ready:
                number, child, said = running[place]
                piece = os.read(place, _PIECE)
                said += piece
                if not piece:
                    del running[place]
                    os.close(place)
                    found[number] = _ended(os.waitpid(child, 0)[1], bytes(said))
                    done += 1
                    tell(done, len(jobs))
    return found


def _begin(job: Job, seconds: int) -> tuple[int, int]:
    """Fork; return where the child will tell its result, and the child."""
    place, there = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child:
        os.close(there)
        return place, child
    if not end_with(parent):
        os._exit(1)
    try:
        if seconds:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # whose default is to end the process
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what sanitizers have to say
        said = json.dumps({"result": job()})
    except BaseException:  # noqa: BLE001  (the parent hears of it)
        said = json.dumps({"error": traceback.format_exc()})
    with os.fdopen(there, "wb") as out:
        out.write(said.encode())
    os._exit(0)


def _end(running: dict[int, tuple[int, int, bytearray]]) -> None:
    """End what still runs: only where the parent gives up."""
    for place, (_, child, _) in running.items():
        os.close(place)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _ended(status: int, said: bytes) -> Ended:
    if status:
        return Ended(None, f"it ended by itself, with {os.waitstatus_to_exitcode(status)}")
    told = json.loads(said)
    return Ended(told.get("result"), told.get("error", ""))
