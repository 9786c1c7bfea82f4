"""Removal: the part of the Catalog that takes parts out of all tiers, when told or when due.

What is withdrawn is matched no more from that moment on. The slower tiers' Stores have it for
longer: ``take_withdrawn`` says what has to be deleted there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from kvtier.catalog.below import LOT, Below, Part, Victim
from kvtier.catalog.expiry import NEVER, Expiry
from kvtier.catalog.index import NO_ROW
from kvtier.catalog.shelf import Room
from kvtier.clock import Clock
from kvtier.identity.record import RecordId
from kvtier.metrics import Metrics

_LOOKED_AT: Final = 16 * LOT
"""Rows of all namespaces that one step of a purge looks at."""

Withdrawn = dict[RecordId, None]
"""Names that were withdrawn while somebody asked a shared tier for them."""


class Removal(Below):
    """See the module. Every call is under the Catalog's lock, and touches memory only."""

    def __init__(self, room: Room, clock: Clock, metrics: Metrics) -> None:
        super().__init__(room, metrics)
        self._clock = clock
        self._expiry = Expiry()
        self._records: list[dict[RecordId, int]] = [{} for _ in room.shelves]
        self._watching: list[Withdrawn] = []

    # ---- withdraw

    def withdraw(self, names: Sequence[RecordId], reason: str) -> tuple[int, int]:
        """Take parts out of all tiers; those that are saved or read just now never come into one.

        names: LOT at a time, not more. Slots that are leased stay their holder's. Returns how
        many parts there were, and how many records the Stores have to delete.
        """
        with self._lock:
            return self._withdraw(names, reason)

    def withdraw_namespace(self, digest: bytes, start: int) -> tuple[list[RecordId], int]:
        """Withdraw parts of a namespace, LOT at most, from row `start` on.

        Returns their names, and where to go on, or NO_ROW at the end.
        """
        with self._lock:
            index, owner = self._index, self._owners.find(digest)
            if owner is None:
                return [], NO_ROW
            end = len(index.names)
            stop = min(start + _LOOKED_AT, end)
            mine = (r for r in range(start, stop) if index.owner[r] == owner and index.attached(r))
            rows = list(itertools.islice(mine, LOT + 1))
            if len(rows) > LOT:
                rows, stop = rows[:LOT], rows[LOT]
            names = [index.names[row] for row in rows]
            self._withdraw(names, "purged")
            return names, stop if stop < end else NO_ROW

    def withdraw_due(self) -> tuple[int, bool]:
        """Withdraw parts whose time is over; return how many, and whether more wait."""
        with self._lock:
            now = self._clock()
            names = self._expiry.due(now, LOT)
            self._withdraw(names, "expired")
            return len(names), self._expiry.waiting(now)

    def take_idle(self, tier: int) -> list[Victim]:
        """Take parts out of a tier that were not used for its time, LOT at most.

        One that must stay is looked at again later. See ``clear`` for what the caller does.
        """
        with self._lock:
            ages = self._shelves[tier].ages
            if ages is None:
                return []
            self._room.settle_touches()
            rows = [row for row in ages.overdue(LOT) if self._index.attached(row)]
            rows.sort(key=self._index.depth.__getitem__, reverse=True)
            found = [
                self._take_out(row, tier, "idle") for row in rows if self._index.leaf(row, tier)
            ]
            self._metrics.add("idle_parts", len(found), tier=self._shelves[tier].name)
            return found

    def any_idle(self, tier: int) -> bool:
        """Say whether parts of a tier may have gone unused for its time."""
        with self._lock:
            ages = self._shelves[tier].ages
            return ages is not None and ages.waiting()

    def _withdraw(self, names: Sequence[RecordId], reason: str) -> tuple[int, int]:
        index, count, records = self._index, 0, 0
        for name in reversed(names):  # children first, or each would be an orphan for a moment
            row = index.find(name)
            for tier, shelf in enumerate(self._shelves[1:], 1):
                there = row != NO_ROW and index.present[row] & 1 << tier
                if there or shelf.shared or shelf.unlisted:  # which have what nobody knows here
                    charged = index.charged[tier][row] if there and not shelf.shared else 0
                    self._records[tier][name] = charged
                    records += 1
            for withdrawn in self._watching:
                withdrawn[name] = None
            self._expiry.extend(name, NEVER)
            if row != NO_ROW:
                count += self._room.known(row)
                self._room.withdraw(row, reason)
        self._metrics.add("withdrawn_parts", count, reason=reason)
        return count, records

    # ---- what the Stores have of it

    def take_withdrawn(self, tier: int) -> dict[RecordId, int]:
        """Hand over the records that a tier's Store has to delete, with what they are charged."""
        with self._lock:
            records, self._records[tier] = self._records[tier], {}
            return records

    def lists(self, tier: int) -> None:
        """Take it that the index knows all that a tier has."""
        with self._lock:
            self._shelves[tier].unlisted = False

    def watch(self) -> Withdrawn:
        """Begin to note the names that are withdrawn, until ``unwatch``."""
        with self._lock:
            withdrawn: Withdrawn = {}
            self._watching.append(withdrawn)
            return withdrawn

    def unwatch(self, withdrawn: Withdrawn) -> None:
        """End that."""
        with self._lock:
            self._watching = [one for one in self._watching if one is not withdrawn]

    # ---- how long parts are kept

    def _keep(self, part: Part) -> None:
        """Give a part that is there a higher priority, or a later end, if it is saved with one."""
        row = self._index.find(part.name)
        if not self._room.known(row):
            return
        if part.level > self._index.level[row]:
            self._room.promote(row, part.level)
        if len(self._expiry):
            self._expiry.extend(part.name, self._clock() + part.seconds)

    def _begin(self, row: int, part: Part) -> None:
        """Take the priority and the end of a part as they are given, unless a tier has it."""
        if not self._index.present[row]:
            self._index.level[row] = part.level
            self._expiry.begin(part.name, self._clock() + part.seconds)
