"""Policies that the simulator compares the live ones with. Each keeps the contract of Policy."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence


class Fifo:
    """First in, first out."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, None] = OrderedDict()

    def insert(self, row: int, key: Hashable, parent: int = -1) -> None:
        """See Policy."""
        del key, parent
        self._rows.setdefault(row)

    def touch(self, rows: Sequence[int]) -> None:
        """See Policy."""

    def remove(self, row: int, *, evicted: bool = True) -> None:
        """See Policy."""
        del evicted
        self._rows.pop(row, None)

    def victims(self) -> Iterator[int]:
        """See Policy."""
        while self._rows:
            yield next(iter(self._rows))

    def __iter__(self) -> Iterator[int]:
        """See Policy."""
        return iter(self._rows)

    def __len__(self) -> int:
        """See Policy."""
        return len(self._rows)


class Sieve:
    """A hand goes from old to new over a queue, and takes the first that was not used since.

    Zhang et al., "SIEVE is Simpler than LRU" (NSDI 2024). What the hand has passed and what lies
    ahead of it are two queues, so that its place is the border between them.
    """

    def __init__(self) -> None:
        self._passed: OrderedDict[int, bool] = OrderedDict()
        self._ahead: OrderedDict[int, bool] = OrderedDict()

    def insert(self, row: int, key: Hashable, parent: int = -1) -> None:
        """See Policy."""
        del key, parent
        if row in self._passed or row in self._ahead:
            self.touch((row,))
        else:
            self._ahead[row] = False

    def touch(self, rows: Sequence[int]) -> None:
        """See Policy."""
        for row in rows:
            if row in self._ahead:
                self._ahead[row] = True
            elif row in self._passed:
                self._passed[row] = True

    def remove(self, row: int, *, evicted: bool = True) -> None:
        """See Policy."""
        del evicted
        self._passed.pop(row, None)
        self._ahead.pop(row, None)

    def victims(self) -> Iterator[int]:
        """See Policy. The hand clears the marks that it passes."""
        while len(self):
            if not self._ahead:
                self._ahead, self._passed = self._passed, self._ahead
            row, used = next(iter(self._ahead.items()))
            if used:
                del self._ahead[row]
                self._passed[row] = False
            else:
                yield row

    def __iter__(self) -> Iterator[int]:
        """See Policy."""
        yield from self._ahead
        yield from self._passed

    def __len__(self) -> int:
        """See Policy."""
        return len(self._passed) + len(self._ahead)


class TwoQueues:
    """2Q: newcomers in a quarter of the room; what returns after that is kept by recency.

    Johnson and Shasha, "2Q" (VLDB 1994), with a memory of half the room.
    """

    def __init__(self) -> None:
        self._new: OrderedDict[int, Hashable] = OrderedDict()
        self._kept: OrderedDict[int, Hashable] = OrderedDict()
        self._left: OrderedDict[Hashable, None] = OrderedDict()
        self._room = 0

    def insert(self, row: int, key: Hashable, parent: int = -1) -> None:
        """See Policy."""
        del parent
        if key in self._left:
            del self._left[key]
            self._kept[row] = key
        elif row not in self._kept:
            self._new[row] = key
        self._room = max(self._room, len(self))

    def touch(self, rows: Sequence[int]) -> None:
        """See Policy."""
        for row in rows:
            if row in self._kept:
                self._kept.move_to_end(row)

    def remove(self, row: int, *, evicted: bool = True) -> None:
        """See Policy."""
        self._kept.pop(row, None)
        if row in self._new:
            key = self._new.pop(row)
            if evicted:
                self._left[key] = None
                if len(self._left) > max(self._room // 2, 1):
                    self._left.popitem(last=False)

    def victims(self) -> Iterator[int]:
        """See Policy."""
        while len(self):
            new = len(self._new) > max(self._room // 4, 1) or not self._kept
            yield next(iter(self._new if new and self._new else self._kept or self._new))

    def __iter__(self) -> Iterator[int]:
        """See Policy."""
        yield from self._new
        yield from self._kept

    def __len__(self) -> int:
        """See Policy."""
        return len(self._new) + len(self._kept)


class TinyLfu:
    """W-TinyLFU: a window of newcomers, which enter the main part only if used more than its least.

    Einziger, Friedman and Manes (ACM TOS 2017): a window of one percent, a main part of which
    four fifths are protected, exact counts that are halved every ten times the room.
    """

    def __init__(self) -> None:
        self._window: OrderedDict[int, Hashable] = OrderedDict()
        self._trial: OrderedDict[int, Hashable] = OrderedDict()
        self._protected: OrderedDict[int, Hashable] = OrderedDict()
        self._uses: dict[Hashable, int] = {}
        self._seen = 0
        self._room = 0

    def insert(self, row: int, key: Hashable, parent: int = -1) -> None:
        """See Policy."""
        del parent
        if row in self._window or row in self._trial or row in self._protected:
            self.touch((row,))
            return
        self._count(key)
        self._window[row] = key
        self._room = max(self._room, len(self))
        main = len(self._trial) + len(self._protected)
        if main < self._room - self._most_new and len(self._window) > self._most_new:
            self._trial.update((self._window.popitem(last=False),))

    def touch(self, rows: Sequence[int]) -> None:
        """See Policy."""
        for row in rows:
            for queue in (self._window, self._protected, self._trial):
                if row in queue:
                    self._count(queue[row])
                    if queue is self._trial:
                        self._protect(row)
                    else:
                        queue.move_to_end(row)
                    break

    def remove(self, row: int, *, evicted: bool = True) -> None:
        """See Policy."""
        del evicted
        for queue in (self._window, self._trial, self._protected):
            queue.pop(row, None)

    def victims(self) -> Iterator[int]:
        """See Policy. The oldest newcomer takes the place of the main part's least, or leaves."""
        while len(self):
            main = self._trial or self._protected
            if not main or not self._window or len(self._window) < self._most_new:
                yield next(iter(main or self._window))
                continue
            (new, new_key), (old, old_key) = (
                next(iter(self._window.items())),
                next(iter(main.items())),
            )
            if self._uses.get(new_key, 0) > self._uses.get(old_key, 0):
                del self._window[new]
                self._trial[new] = new_key
                yield old
            else:
                yield new

    def __iter__(self) -> Iterator[int]:
        """See Policy."""
        yield from self._window
        yield from self._trial
        yield from self._protected

    def __len__(self) -> int:
        """See Policy."""
        return len(self._window) + len(self._trial) + len(self._protected)

    @property
    def _most_new(self) -> int:
        return max(self._room // 100, 1)

    def _protect(self, row: int) -> None:
        self._protected[row] = self._trial.pop(row)
        if len(self._protected) > (self._room - self._most_new) * 4 // 5:
            self._trial.update((self._protected.popitem(last=False),))

    def _count(self, key: Hashable) -> None:
        self._uses[key] = min(self._uses.get(key, 0) + 1, 15)
        self._seen += 1
        if self._seen >= 10 * self._room:
            self._seen //= 2
            self._uses = {one: uses >> 1 for one, uses in self._uses.items() if uses > 1}


class CostAware:
    """What is cheapest to compute again leaves first, and ages: Greedy-Dual with recompute time.

    Cao and Irani, "Cost-aware WWW proxy caching algorithms" (USITS 1997). cost: relative time to
    compute a row's block, which grows with its depth as attention looks further back.
    """

    def __init__(self, cost: Callable[[int], float]) -> None:
        self._cost = cost
        self._age = 0.0
        self._turn = 0
        self._worth: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, int]] = []

    def insert(self, row: int, key: Hashable, parent: int = -1) -> None:
        """See Policy."""
        del key, parent
        self._turn += 1
        worth = (self._age + self._cost(row), self._turn)
        self._worth[row] = worth
        heapq.heappush(self._heap, (*worth, row))

    def touch(self, rows: Sequence[int]) -> None:
        """See Policy."""
        for row in rows:
            if row in self._worth:
                self.insert(row, row)

    def remove(self, row: int, *, evicted: bool = True) -> None:
        """See Policy."""
        worth = self._worth.pop(row, None)
        if worth is not None and evicted:
            self._age = max(self._age, worth[0])

    def victims(self) -> Iterator[int]:
        """See Policy."""
        while self._worth:
            *worth, row = self._heap[0]
            if self._worth.get(row) == tuple(worth):
                yield row
            else:
                heapq.heappop(self._heap)

    def __iter__(self) -> Iterator[int]:
        """See Policy."""
        return iter(sorted(self._worth, key=self._worth.__getitem__))

    def __len__(self) -> int:
        """See Policy."""
        return len(self._worth)
