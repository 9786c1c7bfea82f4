"""Order: which part of one tier leaves first. Called under the Catalog's lock.

First go parts that nothing can use any more (orphans, and what hangs under them), then the lower
priorities, and within one priority the policy decides. A part whose turn comes while it has to
stay is parked, and looked at again only when what kept it has ended: so the order is never gone
through twice, however many parts are held.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.catalog.index import NO_ROW, Index
from kvtier.policies.ages import Ages
from kvtier.policies.base import FillablePolicy, Policy, RenewablePolicy


class _Queue:
    """The parts of one priority and one share. ready: their turn came before, and they may go."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.ready: OrderedDict[int, None] = OrderedDict()  # a dict is slow to empty in order


class Order:
    """The order of one tier. policy: makes an empty one, for each priority and share.

    share: says in which share a row counts; spare: by how many bytes a share is above what nobody
    may take from it; size: the bytes that a row takes here. Share 0, the common one, keeps nothing
    back. ages: knows what was not used for the tier's time, where it has one.
    """

    def __init__(
        self,
        index: Index,
        tier: int,
        policy: Callable[[], Policy],
        share: Callable[[int], int],
        spare: Callable[[int], int],
        size: Callable[[int], int],
        ages: Ages | None = None,
    ) -> None:
        self._index = index
        self._tier = tier
        self._policy = policy
        self._share = share
        self._spare = spare
        self._size = size
        self._ages = ages
        self._queues: dict[tuple[int, int], _Queue] = {}
        self._first: dict[int, OrderedDict[int, None]] = {}  # by share: children above parents
        self._parked: dict[int, None] = {}
        self._stuck: OrderedDict[int, None] = OrderedDict()  # parked: a parent's last copy
        self._count = 0

    def __len__(self) -> int:
        """Rows in the tier."""
        return self._count

    def __iter__(self) -> Iterator[int]:
        """Yield every row, those first that would leave first if none were kept."""
        for stack in self._first.values():
            yield from reversed(stack)
        yield from self.useful()
        yield from self._parked
        yield from self._stuck

    def useful(self) -> Iterator[int]:
        """Yield the rows that something can use and nothing was seen to keep, in order."""
        for queue in self._sorted():
            yield from queue.ready
            yield from queue.policy

    def insert(self, row: int) -> None:
        """A part came into the tier."""
        self._count += 1
        if self._ages is not None:
            self._ages.enter(row)
        self._put(row)

    def fill(self, rows: NDArray[np.intp], parents: NDArray[np.intp]) -> None:
        """Parts of one share came into the empty tier, each after its parent; none is an orphan.

        parents: of every row that there is.
        """
        self._count += len(rows)
        if self._ages is not None:
            for row in rows.tolist():
                self._ages.enter(row)
        policy = self._queue(int(rows[0])).policy
        if isinstance(policy, FillablePolicy):
            policy.fill(rows.tolist(), parents[rows].tolist())
        else:
            for row in rows.tolist():
                self._put(row)

    def touch(self, rows: Sequence[int], *, again: bool = False) -> None:
        """Parts were used, in this order; those that are not in the tier are passed over.

        again: they are what was used last, and are so still.
        """
        queues = self._among(rows)
        self._bring_back(rows, queues)
        if self._ages is not None:
            self._ages.used(rows)
        for queue in queues:
            if again and isinstance(queue.policy, RenewablePolicy):
                queue.policy.renew(rows)
            else:
                queue.policy.touch(rows)

    def remove(self, row: int) -> None:
        """A part left the tier."""
        self._count -= 1
        if self._ages is not None:
            self._ages.leave(row)
        self._take(row)

    def expend(self, row: int) -> None:
        """Let a part leave before all others: nothing can use it."""
        self._take(row)
        self._stack(row)[row] = None

    def expends(self, row: int) -> bool:
        """Say whether a part would leave before all others."""
        return row in self._stack(row)

    def revive(self, row: int) -> None:
        """Let a part, and what hangs under it, leave in its turn again."""
        rows = [row]
        while rows:
            row = rows.pop()
            if _dropped(self._stack(row), row):
                self._put(row)
                rows += self._index.children_of(row)

    def wake(self, row: int) -> None:
        """Look again at a part that may be parked: what kept it may have ended."""
        if self._unpark(row):
            orphan = self._index.orphan(row)
            (self._stack(row) if orphan else self._queue(row).ready)[row] = None

    def victims(self, share: int | None = None, by: int = 0) -> Iterator[int]:
        """Yield the rows that should leave, in order; one has left when the next is asked.

        share: take from it alone. Otherwise what nobody may take from a share is left to it, but
        by: the share that asks, which may take from its own.
        """
        going = True
        while going:
            going = False
            for row in itertools.chain(self._expendable(share, by), self._by_level(share, by)):
                going = True
                yield row
            # Once more: a parent of a lower priority may have become a leaf after its turn.

    def last_copies(self, share: int | None = None, by: int = 0) -> Iterator[int]:
        """Yield rows that stay only because their children, in other tiers, need a parent.

        share, by: see ``victims``.
        """
        for row in self._stuck:  # a child that came into the tier has woken it
            if not self._index.holds[row] and self._may_take(row, share, by):
                yield row

    def _may_take(self, row: int, share: int | None, by: int) -> bool:
        its = self._share(row)
        if share is not None:
            return its == share
        return its in (0, by) or self._spare(its) >= self._size(row)

    def _by_level(self, share: int | None, by: int) -> Iterator[int]:
        """Yield rows by priority; within one, from the share that is most above its own."""
        for level in sorted({level for level, _ in self._queues}):
            turns = {
                one: self._leaving(queue)
                for (at, one), queue in self._queues.items()
                if at == level and share in (None, one)
            }
            while turns:
                most = max(turns, key=self._spare)
                row = next(turns[most], NO_ROW)
                if row != NO_ROW and self._may_take(row, share, by):
                    yield row
                else:
                    del turns[most]

    def _leaving(self, queue: _Queue) -> Iterator[int]:
        """Yield the rows of one queue that may leave; park those that may not."""
        leaf, tier = self._index.leaf, self._tier
        turns = queue.policy.victims()
        while True:
            while queue.ready:
                row = next(iter(queue.ready))
                if leaf(row, tier):
                    yield row
                else:
                    del queue.ready[row]
                    self._park(row)
            row = next(turns, NO_ROW)
            if row == NO_ROW:
                return
            if leaf(row, tier):
                yield row
            else:
                queue.policy.remove(row, evicted=False)
                self._park(row)

    def _expendable(self, share: int | None, by: int) -> Iterator[int]:
        """Yield the rows that leave first, each after what hangs under it."""
        for stack in tuple(self._first.values()):
            while stack:
                row = next(reversed(stack))
                if not self._may_take(row, share, by):
                    break
                below = self._expendable_below(row)
                for child in below:  # all at once: those that have left may stay among them
                    self.expend(child)
                if below:
                    continue
                if self._index.leaf(row, self._tier):
                    yield row
                else:
                    del stack[row]
                    self._park(row)

    def _expendable_below(self, row: int) -> list[int]:
        """Return what hangs under a row in its own share, and was not seen to be kept."""
        index, bit, share = self._index, 1 << self._tier, self._share(row)
        return [
            child
            for child in (index.children_of(row) if index.kids[self._tier][row] else ())
            if index.present[child] & bit
            and not index.parked[child] & bit
            and self._share(child) == share
        ]

    def _bring_back(self, rows: Sequence[int], queues: Sequence[_Queue]) -> None:
        """Let those parts leave in their turn again that would leave before, or had to stay."""
        parked, bit = self._index.parked, 1 << self._tier
        for stack in filter(None, tuple(self._first.values())):
            for row in [row for row in rows if row in stack and not self._index.orphan(row)]:
                self.revive(row)
        if self._parked or self._stuck:
            for row in [row for row in rows if parked[row] & bit and self._unpark(row)]:
                self._put(row)
        for queue in queues:
            if queue.ready:
                for row in [row for row in rows if _dropped(queue.ready, row)]:
                    self._put(row)

    def _put(self, row: int) -> None:
        index = self._index
        self._queue(row).policy.insert(row, index.names[row], index.parent[row])

    def _queue(self, row: int) -> _Queue:
        key = (self._index.level[row], self._share(row))
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue(self._policy())
        return queue

    def _among(self, rows: Sequence[int]) -> list[_Queue]:
        """Return the queues in which some of the rows may be, however many there are."""
        level, owner = self._index.level, self._index.owner
        kinds = zip(map(level.__getitem__, rows), map(owner.__getitem__, rows), strict=True)
        each = dict(zip(kinds, rows, strict=True))  # a row of each kind: no loop in Python
        keys = dict.fromkeys((level[row], self._share(row)) for row in each.values())
        return [self._queues[key] for key in keys if key in self._queues]

    def _stack(self, row: int) -> OrderedDict[int, None]:
        share = self._share(row)
        stack = self._first.get(share)
        if stack is None:
            stack = self._first[share] = OrderedDict()
        return stack

    def _sorted(self) -> list[_Queue]:
        return [queue for _, queue in sorted(self._queues.items(), key=lambda item: item[0])]

    def _park(self, row: int) -> None:
        index = self._index
        index.parked[row] |= 1 << self._tier
        stays = index.holds[row] or index.kids[self._tier][row]
        (self._parked if stays else self._stuck)[row] = None

    def _unpark(self, row: int) -> bool:
        """Take a row from where it was parked; say whether it was."""
        bit = 1 << self._tier
        if not self._index.parked[row] & bit:
            return False
        self._index.parked[row] &= ~bit
        self._parked.pop(row, None)
        self._stuck.pop(row, None)
        return True

    def _take(self, row: int) -> None:
        """Take a row out of wherever it is: it is in one place, and a stranger to the others."""
        self._stack(row).pop(row, None)
        self._unpark(row)
        queue = self._queue(row)
        queue.ready.pop(row, None)
        queue.policy.remove(row)


def _dropped(rows: dict[int, None], row: int) -> bool:
    """Take a row out of some; say whether it was there."""
    if row in rows:
        del rows[row]
        return True
    return False
