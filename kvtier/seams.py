"""Threads, loops and chance, in one place: what waits in the core runs through here.

The core hands coroutines to a Flow and blocking calls to an IoPool. A simulated Flow under
virtual time takes the place of both in tests, and the core's code does not change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Any, Protocol, TypeVar

from kvtier.deadline import current, under
from kvtier.errors import MisuseError

__all__ = ["CancelledError", "Flow", "Future", "IoPool", "ThreadFlow", "drawn"]

T = TypeVar("T")
A = TypeVar("A")
L = TypeVar("L")
_log = logging.getLogger("kvtier")


def drawn(count: int) -> bytes:
    """Return so many bytes that nobody can guess."""
    return os.urandom(count)


class IoPool:
    """A fixed number of daemon threads for calls that block, started when first needed.

    A hung call holds one thread and never the exit of the process. threads: how many at most; it
    may be raised.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = f"kvtier-{name}"
        self.threads = threads
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started: list[threading.Thread] = []
        self._closed = False

    def submit(self, call: Callable[..., T], *args: object) -> Future[T]:
        """Run ``call(*args)`` on a thread of the pool, with the Deadline of this one. Never blocks.

        Raises MisuseError after ``close``.
        """
        done: Future[T] = Future()
        deadline = current()

        def job() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                with under(deadline):
                    done.set_result(call(*args))
            except BaseException as error:  # noqa: BLE001  (handed to whoever waits)
                done.set_exception(error)

        with self._lock:
            if self._closed:
                raise MisuseError(f"{self._name} is closed")
            if len(self._started) < self.threads:
                self._start()
            self._jobs.put(job)
        return done

    def map(self, call: Callable[[A], T], items: Iterable[A]) -> list[T]:
        """Run ``call`` on each item in parallel and return the results in order. Blocks.

        Raises the first error, in order, after all have ended.
        """
        running = [self.submit(call, item) for item in items]
        for each in running:
            each.exception()
        return [each.result() for each in running]

    def ended(self, running: Sequence[Future[T]]) -> Sequence[Future[T]]:
        """Wait until calls have ended, and return them. Blocks.

        What has not begun when the Deadline is over is cancelled. What has is waited for: it has
        to look at the Deadline itself.
        """
        deadline = current()
        for each in running:
            left = deadline.left(time.monotonic())
            while left > 0 and not wait((each,), min(left, threading.TIMEOUT_MAX)).done:
                left = deadline.left(time.monotonic())  # it may have been put off
            if not each.cancel():
                wait((each,))
        return running

    def each(self, call: Callable[[A], T], items: Iterable[A], late: L) -> list[T | L]:
        """Run ``call`` on each item in parallel and return the results in order. Blocks.

        late: the result of what had not begun when the Deadline was over. Raises the first error,
        in order, after all have ended.
        """
        done = self.ended([self.submit(call, item) for item in items])
        return [late if one.cancelled() else one.result() for one in done]

    def close(self, timeout: float = 5.0) -> None:
        """Let queued calls finish and end the threads, waiting at most `timeout` seconds."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._started:
                self._jobs.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._started:
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                _log.warning("%s: a call still hangs at close; it is left behind", thread.name)

    def _start(self) -> None:
        """Start one more thread; where the system refuses, those that run must do."""
        name = f"{self._name}-{len(self._started)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._started:
                raise
        else:
            self._started.append(thread)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # or the memory that it wrote to is held until the next one comes


class Flow(Protocol):
    """Where the core's coroutines run."""

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine from any thread; the future reports its end. Never blocks."""
        ...

    def here(self) -> bool:
        """Say whether the calling thread is the one that coroutines run on: it must not wait."""
        ...

    async def io(self, pool: IoPool, call: Callable[..., T], *args: object) -> T:
        """Run a blocking call in `pool` and await it. Called on the loop only.

        Cancelling the await does not stop a call that has started: the caller still owns, and
        must wait for, whatever the call writes to. Use ``asyncio.shield`` accordingly.
        """
        ...

    def close(self) -> None:
        """Cancel what still runs, wait for it, bounded, and end the loop."""
        ...


class ThreadFlow:
    """The real Flow: one asyncio loop on one daemon thread, started when first needed."""

    def __init__(self, name: str = "kvtier-flow") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """See Flow. Raises MisuseError after ``close``: it is a cache's."""
        try:
            with self._lock:  # so that `close` finds whatever was started before it
                return asyncio.run_coroutine_threadsafe(work, self._running())
        except Exception:  # it is closed, or the system has no thread left
            work.close()
            raise

    def here(self) -> bool:
        """See Flow."""
        return threading.current_thread() is self._thread

    async def io(self, pool: IoPool, call: Callable[..., T], *args: object) -> T:
        """See Flow."""
        return await asyncio.wrap_future(pool.submit(call, *args))

    def close(self, timeout: float = 10.0) -> None:
        """See Flow. Waits at most `timeout` seconds."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout)
        if thread.is_alive():
            _log.warning("%s did not end within %.0f s; it is left behind", self._name, timeout)

    def _running(self) -> asyncio.AbstractEventLoop:
        """Return the loop, started if need be. Called under the lock."""
        if self._closed:
            raise MisuseError("this cache is closed")
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # or all that follows would wait for a loop that does not run
                loop.close()
                raise
            self._loop, self._thread = loop, thread
        return self._loop

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            left = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
            for task in left:
                task.cancel()
            with contextlib.suppress(Exception):
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.close()
