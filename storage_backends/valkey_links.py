"""The connections of a Valkey store: kept while they are sound, several requests on their way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from kvtier.errors import Corrupt, StoreError, Unavailable
from kvtier.storage_backends.valkey_link import BrokenError, Link, RefusedError

A = TypeVar("A")
T = TypeVar("T")

_AHEAD: Final = 4  # requests on their way: more would only fill the server's memory with replies


class UnfitError(StoreError):
    """A record and its buffer do not fit together; the reply was taken whole."""


class Links:
    """Makes and keeps connections to one server. Thread-safe.

    connect: makes a Link; it blocks, and raises OSError, BrokenError and RefusedError.
    """

    def __init__(self, connect: Callable[[], Link], most: int) -> None:
        """Keep up to `most` that nobody uses."""
        self._connect = connect
        self._most = most
        self._guard = threading.Lock()
        self._idle: list[Link] = []
        self._closed = False

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Link]:
        """Lend a connection; it is kept afterwards unless an error has spoilt it."""
        with self._guard:
            if self._closed:
                raise Unavailable("the store is closed")
            link = self._idle.pop() if self._idle else None
        if link is None:
            link = self._connect()
        try:
            yield link
        except BaseException:
            link.close()
            raise
        self._keep(link)

    def _keep(self, link: Link) -> None:
        with self._guard:
            keep = not self._closed and len(self._idle) < self._most
            if keep:
                self._idle.append(link)
        if not keep:
            link.close()

    def converse(
        self,
        items: Sequence[A],
        *,
        ask: Callable[[Link, A], None],
        take: Callable[[Link, A], T],
        silent: list[Exception],
    ) -> list[T | Exception]:
        """Ask for each item on one connection, a few ahead; return replies, or the errors.

        A connection that was idle may have been closed by the server meanwhile: if it ends before
        its first reply, all is asked again on a new one. One that ends later costs one item.
        silent: gets the error of a server that does not answer, from here or from whoever shares
        the list; then nothing more is asked.
        """
        found: list[T | Exception] = []
        stale = True  # until an idle connection was found closed
        while len(found) < len(items):
            if silent:
                found += silent[:1] * (len(items) - len(found))
                break
            done, met, old = len(found), False, False
            try:
                with self.borrowed() as link:
                    met, old = True, link.used
                    _ask_all(link, items[done:], ask, take, found)
            except (OSError, BrokenError) as error:
                if not met or isinstance(error, TimeoutError):
                    silent.append(error)
                elif stale and old and len(found) == done:
                    stale = False
                    self._forget()
                else:
                    found.append(error)
            except RefusedError as error:  # who connects is refused, whatever it asks
                silent.append(error)
        return found

    def close(self) -> None:
        """Close the idle connections; those in use are closed when their call ends."""
        with self._guard:
            self._closed = True
        self._forget()

    def _forget(self) -> None:
        with self._guard:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()


def _ask_all(
    link: Link,
    items: Sequence[A],
    ask: Callable[[Link, A], None],
    take: Callable[[Link, A], T],
    found: list[T | Exception],
) -> None:
    """Ask for each item and append what came of it. Raises what makes a connection useless."""
    asked = 0
    for place, item in enumerate(items):
        while asked < min(len(items), place + _AHEAD):
            ask(link, items[asked])
            asked += 1
        try:
            found.append(take(link, item))
        except (RefusedError, Corrupt, UnfitError) as error:
            found.append(error)
