"""Pins: what leases of long life hold of DRAM, and how much of it they may. Under the lock."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.catalog.index import Index
from kvtier.memory.arena import Arena, slot_bytes_for


class Pins:
    """Counts pinned parts, each once however often it is pinned: half of DRAM at most."""

    def __init__(self, index: Index, arena: Arena) -> None:
        self.nbytes = 0
        self._index = index
        self._arena = arena
        self._rows: dict[int, int] = {}  # how many pins hold the row

    def __len__(self) -> int:
        """Parts that are pinned."""
        return len(self._rows)

    def __contains__(self, row: object) -> bool:
        """Say whether a part is pinned."""
        return row in self._rows

    def fit(self, parts: Iterable[tuple[int, int]]) -> bool:
        """Say whether parts may be pinned, given as row, or NO_ROW, and bytes."""
        more = sum(slot_bytes_for(nbytes) for row, nbytes in parts if row not in self._rows)
        return self.nbytes + more <= self._arena.nbytes // 2

    def add(self, rows: Iterable[int]) -> None:
        """Pin parts in DRAM, which are held."""
        for row in rows:
            count = self._rows.get(row, 0)
            self._rows[row] = count + 1
            if not count:
                self.nbytes += self._index.slot(row).nbytes

    def drop(self, rows: Iterable[int]) -> None:
        """End one pin of each part, before its hold ends."""
        for row in rows:
            self._rows[row] -= 1
            if not self._rows[row]:
                del self._rows[row]
                self.nbytes -= self._index.slot(row).nbytes
