"""Least recently used: the default. Measured on four real traces, nothing reasonable beats it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Final

_NONE: Final = -1


class _Links:
    """The neighbours of each row, and the list that it is in, by number; 0 for none."""

    def __init__(self) -> None:
        self.older = array("i")
        self.newer = array("i")
        self.inside = array("i")
        self.lists = 0


class Lru:
    """A doubly linked list in arrays: twelve bytes a row, every call O(1)."""

    def __init__(self, links: _Links | None = None) -> None:
        links = links or _Links()
        links.lists += 1
        self._number = links.lists
        self._older, self._newer, self._inside = links.older, links.newer, links.inside
        self._oldest = _NONE
        self._newest = _NONE
        self._count = 0

    @classmethod
    def together(cls) -> Callable[[], Lru]:
        """Return a function that makes lists of rows each of which is in one of them at most.

        All take together what one takes: else each would need room for every row.
        """
        return partial(cls, _Links())

    def insert(self, row: int, key: Hashable, parent: int = _NONE) -> None:
        """See Policy. A part that continues another becomes the next older one."""
        del key
        self._reach(row)
        if self._inside[row] == self._number:
            self.touch((row,))
            return
        if 0 <= parent < len(self._inside) and self._inside[parent] == self._number:
            self._link(row, row, self._older[parent], parent)
        else:
            self._link(row, row, self._newest, _NONE)
        self._inside[row] = self._number
        self._count += 1

    def fill(self, rows: Sequence[int], parents: Sequence[int]) -> None:
        """See FillablePolicy."""
        self._reach(max(rows, default=_NONE))
        inside, older, newer = self._inside, self._older, self._newer
        mine, newest = self._number, self._newest
        for row, parent in zip(rows, parents, strict=True):
            if parent != _NONE and inside[parent] == mine:
                before = older[parent]
                older[parent], newer[row] = row, parent
            else:
                before = newest
                newest = row
            older[row] = before
            if before == _NONE:
                self._oldest = row
            else:
                newer[before] = row
            inside[row] = mine
        self._newest = newest
        self._count += len(rows)

    def touch(self, rows: Sequence[int]) -> None:
        """See Policy. Rows that stand in this order already are moved as one run."""
        inside, newer, mine = self._inside, self._newer, self._number
        rows = [row for row in rows if row < len(inside) and inside[row] == mine]
        at, count = 0, len(rows)
        while at < count:
            first = last = rows[at]
            at += 1
            while at < count and newer[last] == rows[at]:
                last = rows[at]
                at += 1
            if last != self._newest:
                self._unlink(first, last)
                self._link(first, last, self._newest, _NONE)

    def remove(self, row: int, *, evicted: bool = True) -> None:
        """See Policy."""
        del evicted
        if row < len(self._inside) and self._inside[row] == self._number:
            self._unlink(row, row)
            self._inside[row] = 0
            self._count -= 1

    def victims(self) -> Iterator[int]:
        """See Policy."""
        row = self._oldest
        while row != _NONE:
            newer = self._newer[row]
            yield row
            row = newer

    def __iter__(self) -> Iterator[int]:
        """See Policy."""
        return self.victims()

    def __len__(self) -> int:
        """See Policy."""
        return self._count

    def _reach(self, row: int) -> None:
        """Let there be room for a row."""
        grow = row + 1 - len(self._inside)
        if grow > 0:
            self._inside.extend((0,) * grow)
            self._older.extend((_NONE,) * grow)
            self._newer.extend((_NONE,) * grow)

    def _link(self, first: int, last: int, older: int, newer: int) -> None:
        """Put a run of rows, linked to each other, between two neighbours, or at an end."""
        self._older[first] = older
        self._newer[last] = newer
        if older == _NONE:
            self._oldest = first
        else:
            self._newer[older] = first
        if newer == _NONE:
            self._newest = last
        else:
            self._older[newer] = last

    def _unlink(self, first: int, last: int) -> None:
        older, newer = self._older[first], self._newer[last]
        if older == _NONE:
            self._oldest = newer
        else:
            self._newer[older] = newer
        if newer == _NONE:
            self._newest = older
        else:
            self._older[newer] = older
