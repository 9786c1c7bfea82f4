"""S3-FIFO: a small queue that most newcomers do not outlive, a main one, and a memory of the rest.

Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023): the small queue has a
tenth of the room, and two uses there lead to the main queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Final

_SMALL_SHARE: Final = 10
_PROMOTED: Final = 2
_MOST_USES: Final = 3


class S3Fifo:
    """Rows in two queues, with how often each was used since it came."""

    def __init__(self) -> None:
        self._small: OrderedDict[int, Hashable] = OrderedDict()
        self._main: OrderedDict[int, Hashable] = OrderedDict()
        self._left: OrderedDict[Hashable, None] = OrderedDict()
        self._uses: dict[int, int] = {}
        self._room = 0

    def insert(self, row: int, key: Hashable, parent: int = -1) -> None:
        """See Policy."""
        del parent
        if row in self._uses:
            self.touch((row,))
            return
        self._uses[row] = 0
        if key in self._left:
            del self._left[key]
            self._main[row] = key
        else:
            self._small[row] = key
        self._room = max(self._room, len(self))

    def touch(self, rows: Sequence[int]) -> None:
        """See Policy."""
        uses = self._uses
        for row in rows:
            if row in uses:
                uses[row] = min(uses[row] + 1, _MOST_USES)

    def renew(self, rows: Sequence[int]) -> None:
        """See RenewablePolicy. Queues know no more than that something was used."""

    def remove(self, row: int, *, evicted: bool = True) -> None:
        """See Policy."""
        self._uses.pop(row, None)
        self._main.pop(row, None)
        if row in self._small:
            key = self._small.pop(row)
            if evicted:
                self._left[key] = None
                if len(self._left) > self._room - self._room // _SMALL_SHARE:
                    self._left.popitem(last=False)

    def victims(self) -> Iterator[int]:
        """See Policy. Moves rows that were used to where their uses take them."""
        uses = self._uses
        while uses:
            small = len(self._small) >= max(self._room // _SMALL_SHARE, 1) or not self._main
            queue = self._small if self._small and small else self._main
            row, key = next(iter(queue.items()))
            if queue is self._small and uses[row] >= _PROMOTED:
                uses[row] = 0
                del queue[row]
                self._main[row] = key
            elif queue is self._main and uses[row]:
                uses[row] -= 1
                queue.move_to_end(row)
            else:
                yield row

    def __iter__(self) -> Iterator[int]:
        """See Policy."""
        yield from self._small
        yield from self._main

    def __len__(self) -> int:
        """See Policy."""
        return len(self._uses)
