"""A simulated asyncio loop: production coroutines under virtual time, one seed a schedule.

The order of ready callbacks, the time that code and I/O take, stalls and cancellations all come
from the seed, so that a race is found by trying seeds and repeated by naming one. Nothing here
waits for real: an hour of a cache's life takes as long as its callbacks take to run.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import heapq
import random
import warnings
from asyncio import base_events, tasks
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar, TypeVarTuple

from kvtier.seams import Future
from kvtier.testing.simconditions import Conditions, picker, task_of
from kvtier.testing.simtask import (
    Deadlock,
    Leak,
    Livelock,
    SimError,
    SimFuture,
    SimTask,
    where,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_DIGEST_BYTES: Final = 16

COMPUTES: Final = object()
"""In place of an executor, for a call that is slow at times and never hangs."""


_DEFAULT: Final = Conditions()


class SimLoop(base_events.BaseEventLoop):
    """The loop. ``digest`` is equal for two runs exactly when they took the same course.

    on_step: called after every callback; what it raises ends the run. stalled: seconds for which
    the thread was held up so far. under_way: calls in pools that have begun and had no effect yet;
    calls_out: how many have not been delivered.
    """

    def __init__(
        self, seed: int, conditions: Conditions = _DEFAULT, *, keep_trace: bool = False
    ) -> None:
        super().__init__()
        self.seed = seed
        self.conditions = conditions
        self.steps = 0
        self.on_step: Callable[[], None] | None = None
        self.problems: list[str] = []
        self.trace: list[str] | None = [] if keep_trace else None
        self.cancelled: dict[str, int] = {}
        self.stalled = 0.0
        self.calls_out = 0
        self.under_way: dict[int, partial[Any]] = {}
        self._now = 0.0
        self._ready: list[asyncio.Handle] = []
        self._scheduled: list[asyncio.TimerHandle] = []
        self._stopping = False
        self._serial = 0
        self._calls = 0
        self._tasks: list[SimTask[Any]] = []
        self.task_steps: dict[str, int] = {}
        self._busy_at = 0.0
        self._failure: BaseException | None = None
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        # One stream for each concern: a change to one leaves the others' course alone.
        again = f" {conditions.shuffle}" if conditions.shuffle else ""
        self._pick = picker(conditions.order, self.rng(f"order{again}"))
        self._timing = self.rng(f"timing{again}")
        self._latency = self.rng(f"latency{again}")
        self._cancel = self.rng(f"cancel{again}")
        self.set_exception_handler(self._note_problem)

    # ---- determinism

    def rng(self, concern: str) -> random.Random:
        """Return the seeded stream of one concern."""
        life = f".{self.conditions.life}" if self.conditions.life else ""
        return random.Random(f"{self.seed}{life}/{concern}")  # text: no hash() enters it

    def next_serial(self) -> int:
        """Return the number of the next task or future."""
        self._serial += 1
        return self._serial

    def note(self, kind: str, what: str = "") -> None:
        """Enter an event into the digest, and into the trace where one is kept."""
        line = f"{self.steps} {self._now:.9f} {kind} {what}"
        self._digest.update(line.encode())
        if self.trace is not None:
            self.trace.append(line)

    @property
    def digest(self) -> str:
        """The course of the run so far, as a hexadecimal digest."""
        return self._digest.hexdigest()

    # ---- what asyncio asks of a loop

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> SimTask[T]:
        """Start a task. Without a name it gets one that is the same in every run."""
        label = name or f"{self._serial + 1}:{getattr(coro, '__qualname__', '?')}"
        task: SimTask[T] = SimTask(coro, loop=self, name=label, context=context)
        parent = tasks.current_task(self)
        task.family = parent.family if isinstance(parent, SimTask) else None
        task.ticks = any(part in task.get_name() for part in self.conditions.daemons)
        self._tasks.append(task)
        return task

    def create_future(self) -> SimFuture[Any]:
        """Return a new future."""
        return SimFuture(loop=self)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Call soon; a simulation has one thread."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(
        self, executor: object, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run a blocking call: queued, started, effect, delivered, each at a seeded time.

        Cancelled while it is queued, the call never happens; once it has started, it does.
        executor: COMPUTES for a call that cannot hang.
        """
        self._calls += 1
        self.calls_out += 1
        number, future = self._calls, self.create_future()
        queued, running, delivery = self._io_times(hangs=executor is not COMPUTES)

        def start() -> None:
            if future.cancelled():
                self.calls_out -= 1
                return
            self.under_way[number] = partial(func, *args)
            self.call_later(running, effect)

        def effect() -> None:
            self.note("effect", f"{number}:{getattr(func, '__qualname__', '?')}")
            del self.under_way[number]
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001  (handed to whoever waits)
                self.call_later(delivery, deliver, None, error)
            else:
                self.call_later(delivery, deliver, result, None)

        def deliver(result: T | None, error: Exception | None) -> None:
            self.calls_out -= 1
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.call_later(queued, start)
        return future

    def _io_times(self, *, hangs: bool) -> tuple[float, float, float]:
        """Return how long a call is queued, and runs before its effect, and after it."""
        now, uniform = self.conditions, self._latency.uniform
        slow = self._latency.random() < now.slow_rate and self._now >= now.slow_from
        slow &= hangs or not now.slow_from
        queued, before, after = (uniform(*now.io_seconds) / 3 for _ in range(3))
        if slow and self._latency.random() < 0.3:
            before = uniform(*now.slow_seconds)
        elif slow:
            after = uniform(*now.slow_seconds)  # the code of the call has begun by then
        return queued, before, after

    def calm(self) -> None:
        """Let no call be slow from now on, and hold the thread up no more."""
        self.conditions = replace(self.conditions, slow_rate=0.0, stall_rate=0.0)

    def block(self, future: Future[T], timeout: float | None) -> None:
        """Let everything else run until `future` is done: a thread blocks, the loop goes on.

        Raises TimeoutError after `timeout` virtual seconds.
        """
        if future.done():
            return
        task = tasks.current_task(self)
        deadline = None if timeout is None else self._now + max(timeout, 0.0)
        if deadline is not None:
            self.call_at(deadline, int)  # so that virtual time gets there
        if task is not None:
            tasks._leave_task(self, task)
        try:
            while not future.done():
                if deadline is not None and self._now >= deadline:
                    raise TimeoutError
                if self._stopping:  # the run has failed elsewhere, and nothing moves any more
                    raise SimError("the run ended while a call was blocked")
                self._run_once()
        finally:
            if task is not None:
                tasks._enter_task(self, task)

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: Any) -> None:
        pass

    def _note_problem(self, _: Any, context: dict[str, Any]) -> None:
        self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    # ---- the scheduler

    def _run_once(self) -> None:
        """Run one callback, or raise what ends the run."""
        if self._failure is not None:
            raise self._failure
        try:
            self._step()
        except BaseException as error:
            self._failure = error  # a blocked caller up the stack must not go on
            raise

    def _step(self) -> None:
        if not self._advance():
            return
        handle = self._ready.pop(self._pick(self._ready))
        task = task_of(handle)
        self.steps += 1
        if task is None:
            callback = getattr(handle, "_callback", None)
            self.note("call", getattr(callback, "__qualname__", type(callback).__name__))
        else:
            self._enter(task)
        handle._run()
        if task is not None:
            self._maybe_cancel(task, "after")
        if self.on_step is not None:
            self.on_step()

    def _advance(self) -> bool:
        """Move time on until something is ready; False when the loop is to stop instead."""
        to_come = self.conditions
        self._now += self._timing.random() * to_come.step_seconds
        self._collect_due()
        self._ready = [one for one in self._ready if not one._cancelled]
        stalled = self._timing.random() < to_come.stall_rate
        if self._scheduled and not self._stopping:
            when = self._scheduled[0].when()
            if not self._ready or (stalled and when - self._now < to_come.stall_seconds):
                self.stalled += max(0.0, when - self._now) if self._ready else 0.0
                self._now = max(self._now, when)
                self._collect_due()
        if self._ready:
            self._check_budget()
            return True
        if self._stopping:
            return False
        raise Deadlock("nothing is ready and no timer runs\n" + self.waiting())

    def _collect_due(self) -> None:
        timers = self._scheduled
        while timers and (timers[0].when() <= self._now or timers[0].cancelled()):
            handle = heapq.heappop(timers)
            handle._scheduled = False  # type: ignore[attr-defined]
            if not handle.cancelled():
                self._ready.append(handle)

    def _check_budget(self) -> None:
        limits = self.conditions
        if self.steps >= limits.max_steps or self._now > limits.max_seconds:
            raise Livelock(f"{self.steps} steps, {self._now:.3f} s\n{self.waiting()}")

    def _enter(self, task: SimTask[Any]) -> None:
        name = task.get_name()
        count = self.task_steps[name] = self.task_steps.get(name, 0) + 1
        self.note("step", f"{name}#{count}")
        if not task.ticks:
            self._busy_at = self._now
        elif self._now - self._busy_at > (idle := self.conditions.max_idle_seconds):
            raise Deadlock(f"only daemons ran for {idle:.0f} s\n{self.waiting()}")
        self._maybe_cancel(task, "before")

    def _maybe_cancel(self, task: SimTask[Any], phase: str) -> None:
        limits = self.conditions
        if not limits.cancel_rate and limits.cancel_at is None:
            return
        name = task.get_name()
        if task.done() or name in self.cancelled:
            return
        hit = limits.cancel_at == (name, self.task_steps[name], phase)
        if limits.cancel_rate and name.startswith(limits.cancel_prefix):
            hit = hit or self._cancel.random() < limits.cancel_rate
        if hit:
            self.cancelled[name] = self.steps
            self.note("cancel", name)
            task.cancel()

    # ---- the end

    def unfinished(self) -> list[SimTask[Any]]:
        """Return the tasks that have not ended, oldest first."""
        return [task for task in self._tasks if not task.done()]

    def waiting(self) -> str:
        """Say for each task that has not ended where it waits, one a line."""
        lines = [f"  {where(task)}" for task in self.unfinished()]
        return "\n".join(lines) or "  no task is left"

    def check_end(self) -> None:
        """Raise Leak for tasks that have not ended and for errors that nobody looked at."""
        if self.unfinished():
            raise Leak("tasks are left behind\n" + self.waiting())
        for task in self._tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.problems.append(f"{task.get_name()} ended by {error!r}")
        if self.problems:
            raise Leak("\n".join(["nobody looked at:", *self.problems]))

    def abandon(self) -> None:
        """Drop everything that is left, quietly, and close the loop."""
        self.on_step = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that had not begun
            self._ready.clear()
            self._scheduled.clear()
            for task in self._tasks:
                task.give_up()
            self._tasks.clear()
            self._ready.clear()
            self._scheduled.clear()
        self.close()


def simulate(
    main: Callable[[SimLoop], Coroutine[Any, Any, object]],
    seed: int,
    conditions: Conditions = _DEFAULT,
    *,
    keep_trace: bool = False,
) -> SimLoop:
    """Run ``main(loop)`` to its end on a fresh loop, and return the loop.

    Raises what main or ``on_step`` raises, the first of a group, and SimError; each names the
    seed.
    """
    loop = SimLoop(seed, conditions, keep_trace=keep_trace)
    collects = gc.isenabled()
    gc.disable()  # a finaliser at a moment of the collector's choice is no part of the seed
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            loop.run_until_complete(loop.create_task(main(loop), name="main"))
            loop.problems += [str(one.message) for one in caught if _never_awaited(one)]
            loop.check_end()
        return loop
    except BaseException as error:
        first = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        first.add_note(f"seed {seed}, step {loop.steps}, virtual time {loop.time():.6f} s")
        if first is error:
            raise
        raise first from None
    finally:
        loop.abandon()
        if collects:
            gc.enable()


def _never_awaited(warning: warnings.WarningMessage) -> bool:
    return "never awaited" in str(warning.message)
