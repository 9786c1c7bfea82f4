"""A server's pulse: once a second it tells its supervisor that it goes on.

It beats where the work is done: in the loop, and only when the flow has answered since the beat
before. So a server in which either of the two hangs falls silent, as one that is stopped does.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable
from typing import Final, TypeVar

from kvtier.clock import Clock
from kvtier.seams import Flow, Future, IoPool

T = TypeVar("T")

BEAT: Final = b"."
"""What is said. All else that a server says is JSON."""

BEAT_SECONDS: Final = 1.0


class Pulse:
    """One server's. link: to its supervisor, which may be stopped itself: nothing waits for it.

    flow: what has to answer, once there is one.
    """

    def __init__(self, link: socket.socket, clock: Clock) -> None:
        self.flow: Flow | None = None
        self._link = link
        self._clock = clock
        self._due = clock()
        self._asked: Future[None] | None = None

    def beat(self) -> None:
        """Beat, if it is time, and the flow has answered. Called by the loop; never blocks."""
        if self._clock() < self._due or not (self._asked is None or self._asked.done()):
            return
        self._due = self._clock() + BEAT_SECONDS
        self._asked = self.flow.spawn(_answer()) if self.flow is not None else None
        self._say()

    def through(self, call: Callable[[], T]) -> T:
        """Do what blocks, on a thread of its own, and beat until it has ended. Raises what it does.

        The flow is not asked: it may be what begins or ends.
        """
        pool = IoPool("pulse", 1)
        done = pool.submit(call)
        while not done.done():
            self._say()
            with contextlib.suppress(Exception):
                done.exception(BEAT_SECONDS)
        pool.close()
        return done.result()

    def _say(self) -> None:
        with contextlib.suppress(OSError):  # it does not listen now, or is gone
            self._link.send(BEAT, socket.MSG_DONTWAIT)


class Silence:
    """What a supervisor has not heard, in beats; none is due before it has heard anything.

    Each is missed while this process waits for it, one by one, and by no clock: time in which this
    process was stopped itself, or the machine, is no server's fault.
    """

    def __init__(self) -> None:
        self.beats = -math.inf

    def broken(self) -> None:
        """Note that something was heard."""
        self.beats = 0

    def lasts(self) -> None:
        """Note that one was waited for, and did not come."""
        self.beats += 1


async def _answer() -> None:
    """Come to one's turn."""
