"""Mending: what a read proved to be spoilt in a shared Store is deleted before it is written anew.

A Store keeps what has the header that it is to write, and so would keep spoilt bytes for good. It
is not deleted at once: whoever proved it has not got the right bytes, and the bytes may have been
spoilt on their way. A tier of this host deletes such records by itself, see ``catalog.strays``.

What a read proved to be of a newer version is not written over: hosts of it read it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvtier.identity.record import RecordId
from kvtier.tiers.coding import Written
from kvtier.tiers.exact import Fetched
from kvtier.tiers.store import Status, Store, Write

_MOST: Final = 1 << 12


class Mending:
    """Of one tier. Safe from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._none = not store.capabilities.shared
        self._lock = threading.Lock()
        self._spoilt: OrderedDict[RecordId, RecordId] = OrderedDict()  # a part, and its record
        self._newer: OrderedDict[RecordId, None] = OrderedDict()

    def note(self, part: RecordId, record: RecordId) -> None:
        """Take it that a part is spoilt where it lies: in a record of its name, or in a pack.

        Of two such records the one that was read last counts: it will be read again.
        """
        if self._none:
            return
        with self._lock:
            self._spoilt[part] = record
            self._spoilt.move_to_end(part)
            if len(self._spoilt) > _MOST:
                self._spoilt.popitem(last=False)

    def leave(self, record: RecordId) -> None:
        """Take it that a record is of a newer version: it is not written over from here."""
        if self._none:
            return
        with self._lock:
            self._newer[record] = None
            self._newer.move_to_end(record)
            if len(self._newer) > _MOST:
                self._newer.popitem(last=False)

    def leaves(self, records: Iterable[RecordId]) -> bool:
        """Say whether any of these is left as it is."""
        with self._lock:
            return any(record in self._newer for record in records)

    def spare(
        self, records: Sequence[Write], send: Callable[[list[Write]], list[Written]]
    ) -> list[Written]:
        """Send records that lie alone, but those that are left as they are. Blocks.

        Those of them that are spoilt are deleted before; where they are not, nothing is sent.
        """
        left = [self.leaves([one.header.id]) for one in records]
        rest = [one for one, stays in zip(records, left, strict=True) if not stays]
        cleared = self.clear([one.header.id for one in rest]) is not None
        sent = iter(send(rest) if cleared else [Written(Status.FAILED, one.header) for one in rest])
        out = [
            Written(Status.NEWER, one.header) if stays else next(sent)
            for one, stays in zip(records, left, strict=True)
        ]
        for one in out:
            if one.status is Status.NEWER:
                self.leave(one.header.id)
        return out

    def looked(self, records: Sequence[RecordId], found: list[Status]) -> list[Status]:
        """Take note of what a look-up found, and return that."""
        absent: list[RecordId] = []
        for record, status in zip(records, found, strict=True):
            if status is Status.NEWER:
                self.leave(record)
            elif status is Status.ABSENT:
                absent.append(record)
        with self._lock:
            for record in absent:  # they may be written again
                self._newer.pop(record, None)
        return found

    def learn(
        self, parts: Sequence[RecordId], records: Sequence[RecordId | None], out: Sequence[Fetched]
    ) -> None:
        """Take note of what a read proved. records: where each part lay, None if that is no news.

        What is only unknown here is not spoilt.
        """
        for part, record, found in zip(parts, records, out, strict=True):
            if record is None or found.status is Status.OK:
                continue
            if found.status is Status.NEWER:
                self.leave(record)
            elif found.status is Status.CORRUPT and not found.unknown:
                self.note(part, record)

    def spoilt(self, parts: Iterable[RecordId]) -> dict[RecordId, list[RecordId]]:
        """Return the records in which some of these parts are spoilt, and which."""
        found: dict[RecordId, list[RecordId]] = {}
        with self._lock:
            for part in parts:
                if (record := self._spoilt.get(part)) is not None:
                    found.setdefault(record, []).append(part)
        return found

    def clear(self, parts: Iterable[RecordId]) -> list[RecordId] | None:
        """Delete the records in which some of these parts are spoilt, before they are written.

        Returns what is there no more, None where the Store did not delete it. Blocks.
        """
        spoilt = self.spoilt(parts)
        if not spoilt:
            return []
        if Status.FAILED in self._store.delete_many(list(spoilt)):
            return None
        with self._lock:
            for part in (part for some in spoilt.values() for part in some):
                self._spoilt.pop(part, None)
        return list(spoilt)
