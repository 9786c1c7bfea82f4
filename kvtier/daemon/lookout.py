"""The lookout: what the server's loop waits with, for its sockets.

Once something has come, more is as a rule on its way: a client that was told of a match asks for
its lease. To sleep and be woken takes longer than that, so that the thread looks for a moment
before it sleeps. Where nothing has come by then, it does what was put off; where nothing comes at
all, it sleeps, and costs nothing.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Final, Protocol

from kvtier.clock import Clock

__all__ = ["Lookout"]

_LOOK_SECONDS: Final = 0.0001


class Readable(Protocol):
    """A socket, or what else has a descriptor."""

    def fileno(self) -> int:
        """Return it."""
        ...


class Lookout:
    """See the module. For one thread.

    rest: does a piece of what was put off, and says whether there is more.
    """

    def __init__(self, clock: Clock, rest: Callable[[], bool]) -> None:
        self._clock = clock
        self._rest = rest
        self._epoll = select.epoll()
        self._stirred = False

    def add(self, one: int | Readable) -> None:
        """Tell when it can be read, and of its end."""
        self._epoll.register(one, select.EPOLLIN)

    def change(self, one: Readable, *, writing: bool) -> None:
        """Also tell when it can be written, or no more."""
        self._epoll.modify(one, select.EPOLLIN | (select.EPOLLOUT if writing else 0))

    def drop(self, one: int | Readable) -> None:
        """Tell of it no more."""
        self._epoll.unregister(one)

    def wait(self, seconds: float) -> list[tuple[int, int]]:
        """Return descriptors with their events; none when so many seconds have passed."""
        found = self._look() if self._stirred and seconds > 0 else []
        found = found or self._epoll.poll(seconds)
        self._stirred = bool(found)
        return found

    def _look(self) -> list[tuple[int, int]]:
        """Look for a moment, without sleep, and then do what was put off until something comes."""
        until = self._clock() + _LOOK_SECONDS
        while not (found := self._epoll.poll(0)):
            if self._clock() >= until and not self._rest():
                break
        return found

    def close(self) -> None:
        """Give the descriptor back."""
        self._epoll.close()
