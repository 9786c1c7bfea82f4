"""What a simulated world is like, and which of its ready callbacks runs next."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvtier.testing.simtask import SimTask

ORDERS: Final = ("random", "pct", "fifo")
PHASES: Final = ("before", "after")
Cancel = tuple[str, int, str]
"""A task's name, the number of one of its steps, and whether just before or just after it."""

Pick = Callable[[Sequence[asyncio.Handle]], int]
_CHANGE_RATE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Conditions:
    """Rates are probabilities, times are virtual seconds.

    order: ``random``; ``pct``, by seeded priorities; or ``fifo`` as asyncio's own loop.
    step_seconds: what one callback takes at most. stall_rate, stall_seconds: how often, and for
    how long at most, the loop's thread is held up until a timer has fired among callbacks that
    are ready.
    io_seconds: of a call in a pool, a third of it each in the queue, before its effect and after
    it; from slow_from on, slow_rate of the calls take slow_seconds before or after it.
    cancel_rate: for each step of a task whose name begins with cancel_prefix; each at most once.
    cancel_at: the one step at which one task is cancelled; before it, its result is there, and
    cancellation comes first.
    daemons: parts of the names of tasks that tick for ever: when for max_idle_seconds, longer
    than anybody sleeps, nothing but these ran, what else still waits is deadlocked.
    shuffle: another number, another order, timing and cancellation under the same seed.
    life: of a world that crashes, how often it did before; each life has streams of its own.
    """

    order: Literal["random", "pct", "fifo"] = "random"
    step_seconds: float = 5e-6
    stall_rate: float = 0.02
    stall_seconds: float = 0.05
    io_seconds: tuple[float, float] = (1e-5, 5e-3)
    slow_rate: float = 0.02
    slow_from: float = 0.0
    slow_seconds: tuple[float, float] = (0.02, 2.0)
    cancel_rate: float = 0.0
    cancel_prefix: str = "request"
    cancel_at: Cancel | None = None
    daemons: tuple[str, ...] = (".reap",)
    max_idle_seconds: float = 300.0
    max_steps: int = 200_000
    max_seconds: float = 36_000.0
    shuffle: int = 0
    life: int = 0


def picker(order: str, rng: random.Random) -> Pick:
    """Return what chooses the place of the next callback among those that are ready."""
    if order == "fifo":
        return _first
    if order == "pct":
        return _Priorities(rng)
    return lambda ready: rng.randrange(len(ready))


def _first(ready: Sequence[asyncio.Handle]) -> int:
    del ready
    return 0


class _Priorities:
    """Of all that is ready, the task of the highest priority, until chance puts it last.

    The algorithm is PCT's (Burckhardt et al., ASPLOS 2010), with a rate of changes instead of a
    fixed number, since nobody knows beforehand how long a run is. It starves some tasks for long,
    which a fair draw hardly ever does. What is no task has a new priority every time.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._priority: dict[int, float] = {}
        self._lowest = 0.0

    def __call__(self, ready: Sequence[asyncio.Handle]) -> int:
        best, chosen, index = float("-inf"), None, 0
        for place, handle in enumerate(ready):
            task = task_of(handle)
            priority = self._rng.random() if task is None else self._of(task)
            if priority > best:
                best, chosen, index = priority, task, place
        if chosen is not None and self._rng.random() < _CHANGE_RATE:
            self._lowest -= 1.0
            self._priority[chosen.serial] = self._lowest
        return index

    def _of(self, task: SimTask[Any]) -> float:
        priority = self._priority.get(task.serial)
        if priority is None:
            priority = self._priority[task.serial] = self._rng.random()
        return priority


def task_of(handle: asyncio.Handle) -> SimTask[Any] | None:
    """Return the task that a callback is a step of."""
    owner = getattr(getattr(handle, "_callback", None), "__self__", None)
    return owner if isinstance(owner, SimTask) else None
