"""A tether keeps a client at its daemon: one thread, that watches the connection and comes back."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from typing import Final

from kvtier.clock import monotonic
from kvtier.errors import KvtierError
from kvtier.events import Reporter

_GREETING_SECONDS: Final = 2.0
_SOONEST: Final = 0.05  # seconds until it is tried again, which double up to the latest
_LATEST: Final = 0.25


class Tether:
    """See the module. Not for use across fork. All but `start` and `end` is safe from any thread.

    name: of the thread. watch: waits while there is a connection, and says whether there was one;
    come_up: connects, in time, or raises OSError or KvtierError; gone: called when the daemon is
    gone and its memory with it, says whether any was mapped here. All three by the thread.
    closing: set by ``end``, or before it. wake: a descriptor to poll beside the connection.
    """

    def __init__(
        self,
        path: str,
        name: str,
        *,
        watch: Callable[[], bool],
        come_up: Callable[[float], None],
        gone: Callable[[], bool],
    ) -> None:
        self.watch = watch
        self.come_up = come_up
        self.gone = gone
        self.closing = False
        self._down = False
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._what = f"the daemon at {path}"
        self._reporter = Reporter(monotonic)
        self._lock = threading.Lock()  # of `wake`, which may be closed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; there is a connection, or none yet."""
        self._thread.start()

    def end(self) -> None:
        """End the thread. Waits for a greeting at most, and for nobody else. Idempotent."""
        self.closing = True
        self.poke()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            if self.wake >= 0:
                os.close(self.wake)
                self.wake = -1

    def here(self) -> bool:
        """Say whether the calling thread is this one."""
        return threading.current_thread() is self._thread

    def poke(self) -> None:
        """Let the thread look again."""
        with self._lock:
            if self.wake >= 0:
                os.eventfd_write(self.wake, 1)

    def heard(self) -> None:
        """Take note, by the thread, of what it was poked for; what that was, it sees."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)

    def report(self, why: str) -> None:
        """Tell the operator, now and then."""
        if not self.closing:
            self._reporter.warn(self._what, why)

    def lost(self, why: object) -> None:
        """Tell the operator that the daemon is not there, once until it is back."""
        if not self._down:
            self._down = True
            self.report(f"{why}; every call is a miss until it is back")

    def _run(self) -> None:
        wait = 0.0
        while not self.closing:
            began = monotonic()
            if self.watch() and monotonic() - began > _LATEST:
                wait = 0.0
            self._pause(wait)
            if self._over():
                return
            try:
                self.come_up(monotonic() + _GREETING_SECONDS)
                self._came_back()
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if self.gone():
                    self.report(f"{error.strerror}: its memory is let go")
            except TimeoutError as error:  # it has waited, and may go on: it is in the queue
                self.lost(error)
                wait = 0.0
                continue
            except OSError as error:  # its server ended just now, and the next is on its way
                self.lost(error)
                wait = 0.0
            except KvtierError as error:
                self.report(str(error))
            wait = min(2 * wait or _SOONEST, _LATEST)

    def _came_back(self) -> None:
        if self._down:
            self._down = False
            self.report("it is back")

    def _over(self) -> bool:
        return self.closing

    def _pause(self, seconds: float) -> None:
        """Wait, or until this is to end."""
        until = monotonic() + seconds
        poll = select.poll()  # select knows descriptors below 1024 alone
        poll.register(self.wake, select.POLLIN)
        while not self.closing and (left := until - monotonic()) > 0:
            if poll.poll(left * 1000):
                self.heard()
