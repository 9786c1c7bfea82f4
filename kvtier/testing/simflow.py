"""The Flow of a simulation: the core's coroutines and blocking calls on a SimLoop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from kvtier.errors import MisuseError
from kvtier.identity.record import checksum
from kvtier.seams import Future, IoPool
from kvtier.testing.simloop import COMPUTES, SimLoop
from kvtier.testing.simtask import SimTask

T = TypeVar("T")
_CLOSE_SECONDS: Final = 10.0


class _Result(Future[T]):
    """A future whose ``result`` lets virtual time pass instead of blocking the only thread."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__()
        self._loop = loop

    def result(self, timeout: float | None = None) -> T:
        """Return the result, or raise TimeoutError after `timeout` virtual seconds."""
        self._loop.block(self, timeout)
        return super().result(0)


class SimFlow:
    """See ``kvtier.seams.Flow``. What a spawned coroutine raises is a problem of the run.

    The core's coroutines return what went wrong below them, so an exception is a defect, and
    most callers of ``spawn`` would never look at it.
    """

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._spawned = 0
        self._closed = False

    def here(self) -> bool:
        """Say no: there is one thread for all, and what waits there lets the others run."""
        return False

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine at a seeded moment among what is ready."""
        if self._closed:
            work.close()
            raise MisuseError("the flow is closed")
        self._spawned += 1
        name = f"flow{self._spawned}:{getattr(work, '__qualname__', '?')}"
        result: _Result[T] = _Result(self._loop)

        def start() -> None:
            if self._closed or result.cancelled():
                result.cancel()
                work.close()
                return
            task = self._loop.create_task(work, name=name)
            task.family = self
            task.add_done_callback(finish)
            result.add_done_callback(lambda _: task.cancel() if result.cancelled() else None)

        def finish(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                result.cancel()
                return
            error = task.exception()
            if error is not None:
                self._loop.problems.append(f"{name} ended by {error!r}")
            if not result.set_running_or_notify_cancel():
                return
            if error is None:
                result.set_result(task.result())
            else:
                result.set_exception(error)

        self._loop.call_soon(start)
        return result

    async def io(self, pool: IoPool, call: Callable[..., T], *args: object) -> T:
        """Run a blocking call at seeded times; the pool's threads stay unused."""
        del pool
        sure = COMPUTES if call is checksum else None
        result: T = await self._loop.run_in_executor(sure, call, *args)
        return result

    def close(self) -> None:
        """Cancel what still runs, and let it end within 10 virtual seconds."""
        self._closed = True
        left = [task for task in self._loop.unfinished() if task.family is self]
        for task in left:
            task.cancel()
        ended: Future[None] = Future()
        watch = self._loop.create_task(_watch(left, ended), name="flow-close")
        with contextlib.suppress(TimeoutError):
            self._loop.block(ended, _CLOSE_SECONDS)
        watch.cancel()


async def _watch(left: list[SimTask[Any]], ended: Future[None]) -> None:
    if left:
        await asyncio.wait(left)
    ended.set_result(None)
