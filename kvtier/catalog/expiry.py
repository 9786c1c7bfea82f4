"""Expiry: when parts that were saved for a time have to go. Called under the Catalog's lock."""

from __future__ import annotations

import heapq

from kvtier.identity.record import RecordId

NEVER = float("inf")


class Expiry:
    """Names by the moment at which they are due. In memory only.

    A part that is to be kept longer stays where it is in the heap, and moves on when its old
    turn comes: so saving it again and again costs no memory.
    """

    def __init__(self) -> None:
        self._until: dict[RecordId, float] = {}
        self._turn: dict[RecordId, float] = {}
        self._heap: list[tuple[float, RecordId]] = []

    def __len__(self) -> int:
        """Parts that have, or had, an end."""
        return len(self._until)

    def begin(self, name: RecordId, until: float) -> None:
        """Let a part that comes anew be due at some moment, or NEVER."""
        if until == NEVER and name not in self._until:
            return
        self._until[name] = until
        if until < self._turn.get(name, NEVER):
            self._turn[name] = until
            heapq.heappush(self._heap, (until, name))

    def extend(self, name: RecordId, until: float) -> None:
        """Let a part that is there be due no sooner than that; without an end it stays so."""
        before = self._until.get(name)
        if before is not None:
            self._until[name] = max(before, until)

    def due(self, now: float, most: int) -> list[RecordId]:
        """Take out names that are due, soonest first, looking at `most` at a time."""
        names: list[RecordId] = []
        while self._heap and most and self._heap[0][0] <= now:
            most -= 1
            turn, name = heapq.heappop(self._heap)
            if self._turn.get(name) != turn:  # it was saved anew for a shorter time
                continue
            until = self._until[name]
            if now < until < NEVER:
                self._turn[name] = until
                heapq.heappush(self._heap, (until, name))
                continue
            del self._until[name], self._turn[name]
            if until <= now:
                names.append(name)
        return names

    def waiting(self, now: float) -> bool:
        """Say whether more may be due."""
        return bool(self._heap) and self._heap[0][0] <= now
