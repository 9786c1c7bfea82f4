"""Least recently used: the default. Measured on four real traces, nothing reasonable beats it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

__all__ = ["Lru"]

_NONE: Final = -1


class Lru:
    """A doubly linked list in two arrays: eight bytes a row, every call O(1)."""

    def __init__(self) -> None:
        self._older = array("i")
        self._newer = array("i")
        self._oldest = _NONE
        self._newest = _NONE
        self._inside = bytearray()
        self._count = 0

    def insert(self, row: int) -> None:
        """See Policy."""
        if row >= len(self._inside):
            grow = max(row + 1, 2 * len(self._inside)) - len(self._inside)
            self._inside.extend(bytes(grow))
            self._older.extend([_NONE] * grow)
            self._newer.extend([_NONE] * grow)
        if self._inside[row]:
            self.touch((row,))
            return
        self._inside[row] = 1
        self._count += 1
        self._append(row)

    def touch(self, rows: Sequence[int]) -> None:
        """See Policy."""
        inside = self._inside
        for row in rows:
            if row != self._newest and row < len(inside) and inside[row]:
                self._unlink(row)
                self._append(row)

    def remove(self, row: int) -> None:
        """See Policy."""
        if row < len(self._inside) and self._inside[row]:
            self._unlink(row)
            self._inside[row] = 0
            self._count -= 1

    def victims(self) -> Iterator[int]:
        """See Policy."""
        row = self._oldest
        while row != _NONE:
            newer = self._newer[row]
            yield row
            row = newer

    def __len__(self) -> int:
        """See Policy."""
        return self._count

    def _append(self, row: int) -> None:
        self._older[row] = self._newest
        self._newer[row] = _NONE
        if self._newest == _NONE:
            self._oldest = row
        else:
            self._newer[self._newest] = row
        self._newest = row

    def _unlink(self, row: int) -> None:
        older, newer = self._older[row], self._newer[row]
        if older == _NONE:
            self._oldest = newer
        else:
            self._newer[older] = newer
        if newer == _NONE:
            self._newest = older
        else:
            self._older[newer] = older
