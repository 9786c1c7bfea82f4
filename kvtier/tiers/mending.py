"""Mending: what a read proved to be spoilt in a shared Store is deleted before it is written anew.

A Store keeps what has the header that it is to write, and so would keep spoilt bytes for good. It
is not deleted at once: whoever proved it has not got the right bytes, and the bytes may have been
spoilt on their way. A tier of this host deletes such records by itself, see ``catalog.strays``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from kvtier.identity.record import RecordId
from kvtier.tiers.store import Status, Store

__all__ = ["Mending"]

_MOST: Final = 1 << 12


class Mending:
    """Of one tier. Safe from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._none = not store.capabilities.shared
        self._lock = threading.Lock()
        self._spoilt: OrderedDict[RecordId, RecordId] = OrderedDict()  # a part, and its record

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
