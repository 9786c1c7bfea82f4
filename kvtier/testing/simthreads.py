"""Real threads in lock-step with a simulated loop: one baton, so that one of them all runs.

What an engine does for a request runs on a thread of its own, and the core's code is what it
always is. A thread hands the baton back wherever it waits, before and after it takes a lock,
and at some of the lines of chosen modules. Who has it next is the seed's choice, so that a race
between threads is found and repeated as any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from types import FrameType
from typing import Any, Final, Self, TypeVar
from unittest import mock

from kvtier.cache import Cache
from kvtier.config import Config
from kvtier.identity.namespace import Namespace
from kvtier.seams import Future
from kvtier.testing.inside import inside
from kvtier.testing.simcrash import Past
from kvtier.testing.simflow import SimFlow
from kvtier.testing.simloop import SimLoop
from kvtier.testing.simscenario import Scenario
from kvtier.testing.simtask import SimError
from kvtier.testing.simworld import World

T = TypeVar("T")
_JOIN_SECONDS: Final = 10.0


class _Over(BaseException):
    """The run has ended; whoever still waits goes home."""


class _Thread:
    """One thread: it runs between ``go`` and ``back``."""

    def __init__(self, name: str, done: asyncio.Future[Any]) -> None:
        self.name = name
        self.done = done
        self.go = threading.Semaphore(0)
        self.back = threading.Semaphore(0)
        self.ended = False
        self.turn = 0  # a call to resume it is stale when it carries another
        self.quiet = False
        self.wants: SimLock | None = None
        self.real: threading.Thread | None = None


class Baton:
    """All threads of one loop.

    traced: parts of the paths of files of which some lines hand the baton back; trace_rate: how
    probable that is for each line that runs.
    """

    def __init__(self, loop: SimLoop, traced: tuple[str, ...], trace_rate: float) -> None:
        self._loop = loop
        self._traced = traced
        self._trace_rate = trace_rate
        self._rng: random.Random = loop.rng("threads")
        self._threads: list[_Thread] = []
        self._all: dict[int, _Thread] = {}  # those that have begun, by what the system calls them
        self.over = False
        self._block_loop = loop.block
        loop.block = self._block  # type: ignore[method-assign]

    # ---- on the loop

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Future[T]:
        """Run a coroutine on a thread of its own: where it awaits, the thread waits."""
        thread = _Thread(name, self._loop.create_future())
        thread.real = threading.Thread(target=self._run, args=(thread, work), name=name)
        thread.real.daemon = True
        thread.real.start()
        self._threads.append(thread)
        self._loop.call_soon(self._resume, thread, thread.turn)
        return thread.done

    def close(self) -> None:
        """End the threads that still wait; none may be left."""
        self.over = True
        for thread in self._threads:
            thread.go.release()
            if thread.real is not None:
                thread.real.join(_JOIN_SECONDS)
        self._threads.clear()
        self._loop.block = self._block_loop  # type: ignore[method-assign]

    def _resume(self, thread: _Thread, turn: int) -> None:
        """Hand the baton over, and wait until it is back."""
        if thread.ended or turn != thread.turn:
            return
        thread.turn += 1
        self._loop.note("thread", thread.name)
        thread.go.release()
        thread.back.acquire()

    def let_run(self, thread: _Thread) -> None:
        """Have a thread go on now, or whoever has the lock that it wants."""
        while thread.wants is not None and isinstance(thread.wants.owner, _Thread):
            thread = thread.wants.owner
        self._resume(thread, thread.turn)

    # ---- on a thread

    def current(self) -> _Thread | None:
        """Return the thread that asks; None on the loop's."""
        return self._all.get(threading.get_ident())

    def hop(self) -> None:
        """Let others run, if this is one of the threads."""
        thread = self.current()
        if thread is not None and not thread.quiet and not self.over:
            self._loop.call_soon(self._resume, thread, thread.turn)
            self._hand_back(thread)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Keep the baton through what is inside."""
        thread = self.current()
        if thread is None or thread.quiet:
            yield
            return
        thread.quiet = True
        try:
            yield
        finally:
            thread.quiet = False

    def park(self, thread: _Thread) -> Callable[..., None]:
        """Return what ends the wait that this thread is about to begin."""
        turn = thread.turn

        def wake(_: object = None) -> None:
            if not self.over:
                self._loop.call_soon(self._resume, thread, turn)

        return wake

    def _hand_back(self, thread: _Thread) -> None:
        if self.over:
            return
        thread.back.release()
        thread.go.acquire()
        if self.over:
            raise _Over

    def wait(self, thread: _Thread) -> None:
        """Wait to be woken."""
        self._hand_back(thread)

    def _block(self, future: Future[Any], timeout: float | None) -> None:
        """See SimLoop.block: a thread waits by itself."""
        thread = self.current()
        if thread is None:
            self._block_loop(future, timeout)
            return
        deadline = None if timeout is None else self._loop.time() + max(timeout, 0.0)
        while not future.done() and not self.over:
            if deadline is not None and self._loop.time() >= deadline:
                raise TimeoutError
            wake = self.park(thread)
            if deadline is not None:
                self._loop.call_at(deadline, wake)
            future.add_done_callback(wake)
            self.wait(thread)

    def _run(self, thread: _Thread, work: Coroutine[Any, Any, Any]) -> None:
        thread.go.acquire()
        result, error = None, None
        self._all[threading.get_ident()] = thread
        try:
            asyncio._set_running_loop(self._loop)  # what it calls may ask which loop there is
            if self._trace_rate:
                sys.settrace(self._trace)
            result = None if self.over else self._drive(thread, work)
        except BaseException as caught:  # noqa: BLE001  (handed to whoever waits)
            error = caught
        finally:
            sys.settrace(None)
            work.close()
            asyncio._set_running_loop(None)
            del self._all[threading.get_ident()]
        thread.ended = True
        if not self.over:
            if error is None:
                thread.done.set_result(result)
            else:
                thread.done.set_exception(error)
        thread.back.release()

    def _drive(self, thread: _Thread, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; what it awaits, the thread waits for."""
        while True:
            try:
                awaited = work.send(None)
            except StopIteration as ended:
                result: T = ended.value
                return result
            if awaited is None:
                self.hop()
                continue
            awaited._asyncio_future_blocking = False
            while not awaited.done() and not self.over:
                wake = self.park(thread)
                awaited.add_done_callback(wake)
                self.wait(thread)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not any(part in frame.f_code.co_filename for part in self._traced):
            return None
        if event == "line" and self._rng.random() < self._trace_rate:
            self.hop()
        return self._trace


class SimLock:
    """Stands in for ``threading.Lock``: who takes it or lets it go hands the baton back."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self.owner: _Thread | str | None = None
        self._waiting: list[Callable[..., None]] = []

    def locked(self) -> bool:
        """Say whether anybody has it."""
        return self.owner is not None

    def acquire(self, blocking: bool = True) -> bool:  # noqa: FBT001, FBT002  (as threading's)
        """Take it; without `blocking`, only if nobody has it."""
        thread = self._baton.current()
        self._baton.hop()
        if self.owner is not None and not blocking:
            return False
        if thread is None:
            self._take_on_the_loop()
            return True
        while self.owner is not None and not self._baton.over:
            thread.wants = self
            self._waiting.append(self._baton.park(thread))
            self._baton.wait(thread)
        thread.wants, self.owner = None, thread
        self._baton.hop()
        return True

    def _take_on_the_loop(self) -> None:
        """The loop's thread is blocked until the lock is free: its owner alone goes on."""
        while isinstance(self.owner, _Thread):
            self._baton.let_run(self.owner)
        if self.owner is not None:
            raise SimError("a lock is taken twice by the loop, or held across an await")
        self.owner = "loop"

    def release(self) -> None:
        """Let it go."""
        self.owner = None
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()
        self._baton.hop()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class ThreadWorld(World):
    """A world whose requests run on real threads. traced, trace_rate: see Baton."""

    atomic = False
    traced = ("/kvtier/catalog/", "/kvtier/memory/", "/kvtier/policies/")
    trace_rate = 0.05

    def __init__(self, loop: SimLoop, scenario: Scenario, past: Past | None = None) -> None:
        self.baton = Baton(loop, self.traced, self.trace_rate)
        super().__init__(loop, scenario, past)

    def open_cache(self, config: Config, namespace: Namespace, flow: SimFlow) -> Cache:
        """Open the cache; each of its locks is one that hands the baton back."""
        with mock.patch.object(threading, "Lock", partial(SimLock, self.baton)):
            return super().open_cache(config, namespace, flow)

    def start_request(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Future[None]:
        """Start a thread."""
        return self.baton.start(work, name)

    def check(self) -> None:
        """Check everything, unless a thread is in the middle of a call on the Catalog."""
        lock: Any = inside(self.cache).catalog._lock
        if not lock.locked():
            with self.baton.undisturbed():
                super().check()

    def after(self, what: str) -> None:
        """Check everything after a call."""
        with self.baton.undisturbed():
            super().after(what)

    def end(self) -> None:
        """End the threads too."""
        self.baton.close()
        super().end()
