"""Settling: let a Store commit what it has gathered, once nothing else has called it for a second.

A Store that commits by time does it with a call: without one, what a quiet cache wrote last would
never be durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from kvtier.clock import Clock
from kvtier.tiers.store import Status, Store

_SETTLE_SECONDS: Final = 1.0

Commit = Callable[[Callable[[list[None]], list[Status]]], Awaitable[list[Status]]]
"""Makes a call on the Store, as its Tier does, of one item."""


class Settling:
    """One tier's. On the flow loop only. name: of the tier."""

    def __init__(self, name: str, store: Store, clock: Clock) -> None:
        self._name = name
        self._store = store
        self._clock = clock
        self._changed: float | None = None  # since when the Store may have what is not committed
        self._last = 0.0  # when something came that may not be
        self._task: asyncio.Task[None] | None = None

    def note(self) -> None:
        """Take it that the Store has changes that it may not have committed."""
        kind = self._store.capabilities
        if kind.durable and not kind.shared:
            self._last = self._clock()
            self._changed = self._last if self._changed is None else self._changed

    def settle(self, commit: Commit) -> None:
        """Begin a call if it is time. To be called again and again."""
        if self._changed is None or not (self._task is None or self._task.done()):
            return
        if self._clock() - self._changed >= _SETTLE_SECONDS:
            # What came last may be too young to be committed, where the rest was before.
            self._changed = self._last if self._last > self._changed else None
            self._task = asyncio.create_task(self._settle(commit), name=f"{self._name}-settle")

    async def _settle(self, commit: Commit) -> None:
        def nothing(_: list[None]) -> list[Status]:
            self._store.delete_many([])
            return [Status.OK]

        if await commit(nothing) != [Status.OK]:
            self.note()
