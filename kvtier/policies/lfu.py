"""LFU: least often used first, least recently among equals.

With aging, a newcomer starts from the count of what left last (LFU with dynamic aging: Arlitt et
al., "Evaluating content management techniques for Web proxy caches", 2000), so that what was
used much, long ago, does not stay for ever. Without it, agent sessions make the cache collapse.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence


class Lfu:
    """Rows in a list for each count. Every call O(1), but for a new count's O(log counts)."""

    def __init__(self, *, aging: bool = True) -> None:
        self._aging = aging
        self._age = 0
        self._counts: dict[int, int] = {}
        self._lists: dict[int, OrderedDict[int, None]] = {}
        self._heap: list[int] = []

    def insert(self, row: int, key: Hashable, parent: int = -1) -> None:
        """See Policy."""
        del key, parent
        if row in self._counts:
            self.touch((row,))
        else:
            self._place(row, self._age + 1)

    def touch(self, rows: Sequence[int]) -> None:
        """See Policy."""
        for row in rows:
            count = self._counts.get(row)
            if count is not None:
                del self._lists[count][row]
                self._place(row, max(count, self._age) + 1)

    def renew(self, rows: Sequence[int]) -> None:
        """See RenewablePolicy."""
        for row in rows:
            count = self._counts.get(row)
            if count is not None:
                self._lists[count].move_to_end(row)

    def remove(self, row: int, *, evicted: bool = True) -> None:
        """See Policy."""
        count = self._counts.pop(row, None)
        if count is not None:
            del self._lists[count][row]
            if evicted and self._aging:
                self._age = max(self._age, count)

    def victims(self) -> Iterator[int]:
        """See Policy."""
        while self._counts:
            least = self._heap[0]
            if self._lists[least]:
                yield next(iter(self._lists[least]))
            else:
                heapq.heappop(self._heap)
                del self._lists[least]

    def __iter__(self) -> Iterator[int]:
        """See Policy."""
        for count in sorted(self._lists):
            yield from self._lists[count]

    def __len__(self) -> int:
        """See Policy."""
        return len(self._counts)

    def _place(self, row: int, count: int) -> None:
        self._counts[row] = count
        if count not in self._lists:
            self._lists[count] = OrderedDict()
            heapq.heappush(self._heap, count)
        self._lists[count][row] = None
