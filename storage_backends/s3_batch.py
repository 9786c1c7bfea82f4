"""Batches of requests on the store's threads: each with its own fate, none beyond the Deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvtier.clock import monotonic
from kvtier.deadline import current
from kvtier.errors import Unavailable
from kvtier.events import Causes, Reporter
from kvtier.seams import Future, IoPool
from kvtier.storage_backends.s3_errors import (
    AbsentError,
    LateError,
    cause_of,
    explain,
    refused,
    silence,
    status_of,
    weather,
)
from kvtier.tiers.store import Status

T = TypeVar("T")
A = TypeVar("A")

_LATE: Final = "the time that was given was over before it was begun"
_report = Reporter(monotonic)


class Batches:
    """Runs batches for one place. Thread-safe; each call blocks.

    threads: how many requests there are at once, besides one for each caller. causes: counts of
    what went wrong.
    """

    def __init__(self, place: str, threads: int, causes: Causes) -> None:
        self._place = place
        self._causes = causes
        self._pool = IoPool("s3", threads)

    def attempt(
        self, call: Callable[[A], T], items: Sequence[A], *, in_order: bool = False
    ) -> list[T | Exception]:
        """Run `call` on each item and return what came of it: a result or the error.

        Once the server has left a request unanswered, what was not tried yet is not tried: a
        batch waits for a dead server about once, not once a record. Nor is anything once the
        Deadline is over. in_order: one after the other.
        """
        silent: list[Exception] = []
        deadline = current()

        def attempt(item: A) -> T | Exception:
            if silent:
                return silent[0]
            if deadline.left(monotonic()) <= 0:
                return LateError(_LATE)
            try:
                return call(item)
            except weather() as error:
                if isinstance(error, silence()):
                    silent.append(error)
                return error

        if in_order or len(items) == 1:
            return [attempt(item) for item in items]
        return self._pool.each(attempt, items, LateError(_LATE))

    def submit(self, call: Callable[..., T], *args: object) -> Future[T]:
        """Run a call on a thread."""
        return self._pool.submit(call, *args)

    def errors(self, running: Sequence[Future[T]]) -> list[BaseException]:
        """Wait until calls have ended, and return their errors."""
        ended = self._pool.ended(running)
        errors = [LateError(_LATE) if each.cancelled() else each.exception() for each in ended]
        return [error for error in errors if error is not None]

    def settle(self, results: Sequence[object]) -> list[Status]:
        """Return the status of each result. Raises Unavailable if the medium refused them all."""
        errors = [result for result in results if isinstance(result, Exception)]
        for error in errors:
            if not isinstance(error, AbsentError):
                self._causes.note(cause_of(error))
        if errors and len(errors) == len(results) and all(map(refused, errors)):
            raise Unavailable(f"{self._place}: {explain(errors[0])}") from errors[0]
        for error in errors:
            if not isinstance(error, AbsentError):
                _report.warn(self._place, explain(error))
        return [status_of(result) for result in results]

    def close(self) -> None:
        """Let calls under way finish, and end the threads. Idempotent."""
        self._pool.close()
