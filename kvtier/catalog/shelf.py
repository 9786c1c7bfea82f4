"""Room: which part may leave which tier, and where a new one goes. Called under the lock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.catalog.index import DRAM, NO_ROW, Index
from kvtier.errors import MisuseError
from kvtier.identity.record import RecordId
from kvtier.memory.arena import Arena, Slot
from kvtier.metrics import Metrics
from kvtier.policies.base import Policy

__all__ = ["Room", "Shelf"]


@dataclass(slots=True)
class Shelf:
    """What the Catalog keeps of one tier: its budget and the order in which parts leave it."""

    name: str
    policy: Policy
    capacity: int | None
    used: int = 0


class Room:
    """The index, the arena and the shelves, kept in step with each other."""

    def __init__(self, arena: Arena, shelves: Sequence[Shelf], metrics: Metrics) -> None:
        self.index = Index(len(shelves))
        self.arena = arena
        self.shelves = list(shelves)
        self._metrics = metrics

    def touch(self, rows: Sequence[int]) -> None:
        """Mark a chain as used, deepest first, in every tier that has it."""
        deepest_first = rows[::-1]
        for shelf in self.shelves:
            shelf.policy.touch(deepest_first)

    def in_dram(self, row: int) -> bool:
        """Say whether the part's bytes are whole in its slot."""
        return row != NO_ROW and bool(self.index.present[row] & 1)

    def known(self, row: int) -> bool:
        """Say whether the part is in a tier, or on its way into one."""
        return row != NO_ROW and bool(self.index.present[row] or self.index.serial[row])

    def slot_for(self, nbytes: int, below: list[int], victims: Iterator[int]) -> Slot | None:
        """Return a slot, evicting leaves of DRAM as needed; None when nothing may leave.

        below: held rows for whose sake it is done; neither they nor their ancestors leave.
        victims: of DRAM, one pass for all slots that one call asks for.
        """
        while (slot := self.arena.allocate(nbytes)) is None:
            row = next(victims, NO_ROW)
            if row == NO_ROW:
                row = self._last_copy(below)
            if row == NO_ROW:
                return None
            self.leave(row, DRAM)
            self._metrics.add("evicted_parts", tier=self.shelves[DRAM].name)
        return slot

    def victims(self, tier: int) -> Iterator[int]:
        """Yield the rows that should leave a tier, in order; one has left when the next is asked.

        One pass over the policy's order: a row that could not leave at its turn is looked at
        again only once the last of its children has left.
        """
        leaf, parent = self.index.leaf, self.index.parent
        passed: set[int] = set()
        for turn in self.shelves[tier].policy.victims():
            row = turn
            while row != NO_ROW and leaf(row, tier):
                above = parent[row]
                yield row
                passed.discard(row)
                row = above if above in passed else NO_ROW
            if row == turn:
                passed.add(row)

    def _last_copy(self, below: list[int]) -> int:
        """Return a row of DRAM whose children lie in slower tiers only, or NO_ROW.

        Its write has failed there. Its slot must not be lost for good, so its children become
        orphans: counted, never matched, and whole again when it is saved anew.
        """
        index = self.index
        kept: dict[int, None] = {}
        for held in below:
            row = held
            while row != NO_ROW and row not in kept:
                kept[row] = None
                row = index.parent[row]
        for row in self.shelves[DRAM].policy.victims():
            if not index.holds[row] and not index.kids[DRAM][row] and row not in kept:
                return row
        return NO_ROW

    def leave(self, row: int, tier: int) -> None:
        """Take a part out of a tier's index, its slot with it."""
        shelf = self.shelves[tier]
        shelf.policy.remove(row)
        shelf.used -= self.index.discard(row, tier)
        if tier == DRAM and self.index.serial[row]:
            self.arena.free(self.index.slot(row))
            self.index.set_slot(row, None)
        self.index.prune(row)

    def take(self, row: int, slot: Slot) -> None:
        """Give a row a slot that will be filled, and hold it, and its parent, until that ends."""
        self.index.set_slot(row, slot)
        for one in self._with_parent(row):
            self.index.hold(one, 1)

    def publish(self, row: int, raw_sum: bytes) -> None:
        """Make a part whose slot is filled visible in DRAM, and end the holds of ``take``."""
        self.index.sums[row] = raw_sum
        self.index.add(row, DRAM)
        self.shelves[DRAM].policy.insert(row)
        self.unhold(self._with_parent(row))

    def abort(self, row: int) -> None:
        """Take back the slot of a part that was not filled, and end the holds of ``take``."""
        self.arena.free(self.index.slot(row))
        self.index.set_slot(row, None)
        self.unhold(self._with_parent(row))

    def _with_parent(self, row: int) -> tuple[int, ...]:
        above = self.index.parent[row]
        return (row,) if above == NO_ROW else (row, above)

    def reserved(self, name: RecordId, slot: Slot) -> int:
        """Return the row that `slot` was reserved for. Raises MisuseError when it was not."""
        row = self.index.find(name)
        if row == NO_ROW or self.in_dram(row) or self.index.serial[row] != slot.serial:
            raise MisuseError("this part was not reserved with this slot")
        return row

    def hold_names(self, names: Iterable[RecordId]) -> list[int]:
        """Hold the rows that exist among `names`, and return them."""
        rows = [row for name in names if (row := self.index.find(name)) != NO_ROW]
        for row in rows:
            self.index.hold(row, 1)
        return rows

    def hold_parents(self, rows: Iterable[int]) -> list[int]:
        """Hold the parents of `rows` and return them.

        That keeps all ancestors from becoming leaves.
        """
        parents = [above for row in rows if (above := self.index.parent[row]) != NO_ROW]
        for above in parents:
            self.index.hold(above, 1)
        return parents

    def unhold(self, rows: Iterable[int]) -> None:
        """Give holds back, and forget rows that nothing needs any more."""
        for row in rows:
            self.index.hold(row, -1)
            self.index.prune(row)
