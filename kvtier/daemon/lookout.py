"""The lookout: what the server's loop waits with, for its sockets.

Once something has come, more is as a rule on its way: a client that was told of a match asks for
its lease. To sleep and be woken takes longer than that, so that the thread looks for a moment
before it sleeps. Where nothing has come by then, it does what was put off; where nothing comes at
all, it sleeps, and costs nothing. Where others want the cores, nothing comes in that moment, which
is theirs: it hardly looks any more then.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Final, Protocol

from kvtier.clock import Clock

_LOOK_SECONDS: Final = 0.0001
_MOST_HOPE: Final = 8
_FOUND: Final = 3
_LEFT_OUT: Final = -16


class Readable(Protocol):
    """A socket, or what else has a descriptor."""

    def fileno(self) -> int:
        """Return it."""
        ...


class Hope:
    """Whether it is worth to look: while one look in four finds something.

    Else one in seventeen is taken, to see whether that has changed.
    """

    def __init__(self) -> None:
        self._hope = _MOST_HOPE

    def look(self) -> bool:
        """Say whether to look this time."""
        if self._hope < 0:
            self._hope += 1
            return False
        return True

    def tell(self, *, found: bool) -> None:
        """Take note of what came of a look."""
        if found:
            self._hope = min(self._hope + _FOUND, _MOST_HOPE)
        else:
            self._hope = self._hope - 1 if self._hope > 0 else _LEFT_OUT


class Lookout:
    """See the module. For one thread.

    rest: does a piece of what was put off, and says whether there is more.
    """

    def __init__(self, clock: Clock, rest: Callable[[], bool]) -> None:
        self._clock = clock
        self._rest = rest
        self._epoll = select.epoll()
        self._stirred = False
        self._hope = Hope()

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
        looks, until = self._hope.look(), self._clock()
        if looks:
            until += _LOOK_SECONDS
        while not (found := self._epoll.poll(0)):
            if self._clock() >= until:
                break
        if looks:
            self._hope.tell(found=bool(found))
        while not found and self._rest():
            found = self._epoll.poll(0)
        return found

    def close(self) -> None:
        """Give the descriptor back."""
        self._epoll.close()
