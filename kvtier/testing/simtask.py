"""Tasks and futures of a simulated loop, where they wait, and the errors that end a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, Self, TypeVar

T = TypeVar("T")


class SimError(AssertionError):
    """The simulated program did what it must not."""


class Deadlock(SimError):  # noqa: N818  (what it is called)
    """Something waits, and nothing that could wake it is under way."""


class Livelock(SimError):  # noqa: N818  (what it is called)
    """The budget of steps or of virtual time is spent."""


class Leak(SimError):  # noqa: N818  (what it is called)
    """A task, or an error that nobody looked at, was left behind."""


class SimTask(asyncio.Task[T]):
    """A task that is hashed by its number: TaskGroup and ``asyncio.wait`` iterate over sets.

    family: inherited from the task that started it, so that all of a Flow's can be told apart.
    ticks: it does so for ever, and nobody waits for its end.
    """

    serial: int
    ticks: bool
    family: object | None

    def __new__(cls, *_: Any, loop: Any, **__: Any) -> Self:
        """Number the task: it is hashed while it is being made."""
        task = super().__new__(cls)
        task.serial = loop.next_serial()
        return task

    def __hash__(self) -> int:
        return self.serial

    def give_up(self) -> None:
        """Close the coroutine, quietly: its run has ended."""
        self._log_destroy_pending = False
        self._log_traceback = False
        coroutine: Any = self.get_coro()
        if not self.done() and coroutine is not None:
            with contextlib.suppress(Exception):
                coroutine.close()


class SimFuture(asyncio.Future[T]):
    """A future that is hashed by its number."""

    serial: int

    def __new__(cls, *, loop: Any) -> Self:
        """Number the future."""
        future = super().__new__(cls)
        future.serial = loop.next_serial()
        return future

    def __hash__(self) -> int:
        return self.serial


def where(task: asyncio.Task[Any]) -> str:
    """Say where a task waits: its name, then each coroutine with the line it stands on."""
    frames = " > ".join(_frames(task.get_coro()))
    waits_for = getattr(task, "_fut_waiter", None)
    if isinstance(waits_for, asyncio.Task):
        on = waits_for.get_name()
    else:
        on = "nothing: it is ready" if waits_for is None else type(waits_for).__name__
    return f"{task.get_name()}: {frames} on {on}"


def _frames(awaited: Any) -> Iterator[str]:
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is None:
            return
        yield f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
