"""ARC: parts used once and parts used again, with a share of room that adapts between them.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003). Room is made
here before it is known what for, so its one case that looks at the newcomer falls away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence


class Arc:
    """Two lists of rows, and two of keys that have left them, as long as the tier was full."""

    def __init__(self) -> None:
        self._once: OrderedDict[int, Hashable] = OrderedDict()
        self._again: OrderedDict[int, Hashable] = OrderedDict()
        self._left_once: OrderedDict[Hashable, None] = OrderedDict()
        self._left_again: OrderedDict[Hashable, None] = OrderedDict()
        self._room = 0  # the most rows there were: what fits, as far as is known
        self._target = 0.0  # rows that `once` should have

    def insert(self, row: int, key: Hashable, parent: int = -1) -> None:
        """See Policy."""
        del parent
        if row in self._once or row in self._again:
            self.touch((row,))
            return
        once, again = len(self._left_once), len(self._left_again)
        if key in self._left_once:
            self._target = min(self._target + max(again // once, 1), self._room)
            del self._left_once[key]
            self._again[row] = key
        elif key in self._left_again:
            self._target = max(self._target - max(once // again, 1), 0)
            del self._left_again[key]
            self._again[row] = key
        else:
            self._once[row] = key
        self._room = max(self._room, len(self))
        self._forget()

    def touch(self, rows: Sequence[int]) -> None:
        """See Policy."""
        once, again = self._once, self._again
        for row in rows:
            if row in again:
                again.move_to_end(row)
            elif row in once:
                again[row] = once.pop(row)

    def renew(self, rows: Sequence[int]) -> None:
        """See RenewablePolicy."""
        for row in rows:
            for inside in (self._once, self._again):
                if row in inside:
                    inside.move_to_end(row)

    def remove(self, row: int, *, evicted: bool = True) -> None:
        """See Policy."""
        for rows, left in ((self._once, self._left_once), (self._again, self._left_again)):
            if row in rows:
                key = rows.pop(row)
                if evicted:
                    left[key] = None

    def victims(self) -> Iterator[int]:
        """See Policy."""
        while self._once or self._again:
            first = self._once if len(self._once) > self._target else self._again
            yield next(iter(first or self._once or self._again))

    def __iter__(self) -> Iterator[int]:
        """See Policy."""
        yield from self._once
        yield from self._again

    def __len__(self) -> int:
        """See Policy."""
        return len(self._once) + len(self._again)

    def _forget(self) -> None:
        while self._left_once and len(self._once) + len(self._left_once) > self._room:
            self._left_once.popitem(last=False)
        while self._left_again and len(self) + self._remembered > 2 * self._room:
            self._left_again.popitem(last=False)

    @property
    def _remembered(self) -> int:
        return len(self._left_once) + len(self._left_again)
