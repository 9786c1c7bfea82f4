"""The index: which part is where. Rows of plain arrays, and one dict from name to row.

A row is one part of one chunk. It knows its parent (the same part of the chunk before), in
which tiers it is present, and how many present children it has there: enough to evict
deepest-first and to see a headless tail. Not thread-safe: the Catalog holds its lock.
"""

from __future__ import annotations

from array import array
from typing import Final

from kvtier.identity.record import RecordId
from kvtier.memory.arena import Slot

__all__ = ["DRAM", "NO_ROW", "Index"]

NO_ROW: Final = -1
DRAM: Final = 0
"""The tier number of DRAM; slower tiers follow in their order."""


class Index:
    """Rows by name. `tiers` counts DRAM and the slower tiers."""

    def __init__(self, tiers: int) -> None:
        self.rows: dict[RecordId, int] = {}
        self.names: list[RecordId] = []
        self.sums: list[bytes] = []  # raw checksum, known while in DRAM
        self.parent = array("i")
        self.depth = array("i")
        self.present = array("H")  # a bit a tier
        self.children = array("i")  # children that are present in any tier
        self.links = array("i")  # rows whose parent this is, present or not
        self.kids = [array("i") for _ in range(tiers)]  # children present in that tier
        self.holds = array("i")  # leases, copies, reads and spills that need the row
        self.raw_bytes = array("q")
        self.offset = array("q")  # of the slot, while one is assigned
        self.serial = array("q")  # of the slot, 0 when none is assigned
        self.slot_bytes = array("q")
        self.charged = [array("q") for _ in range(tiers)]  # bytes of that tier's budget
        self.orphans = 0
        self.held_rows = 0
        self._free: list[int] = []

    def __len__(self) -> int:
        """Rows in use, those kept only for their children included."""
        return len(self.rows)

    def find(self, name: RecordId) -> int:
        """Return the row of a part, or NO_ROW."""
        return self.rows.get(name, NO_ROW)

    def ensure(self, name: RecordId, parent: RecordId | None, depth: int, raw_bytes: int) -> int:
        """Return the row of a part, made if need be, with a row for its parent above it.

        A parent is always one less deep, and depths never change: whatever the records of a
        tier say of themselves, no chain of parents leads back to where it began.
        """
        row = self.rows.get(name, NO_ROW)
        if row == NO_ROW:
            row = self._make(name, depth)
        linked = self.parent[row] != NO_ROW or self.present[row]
        if parent is not None and not linked and self.depth[row] == depth:
            above = self.rows.get(parent, NO_ROW)
            if above == NO_ROW:
                above = self._make(parent, depth - 1)
            if self.depth[above] == depth - 1:
                self.parent[row] = above
                self.links[above] += 1
        self.raw_bytes[row] = raw_bytes
        return row

    def set_slot(self, row: int, slot: Slot | None) -> None:
        """Assign a slot of the arena to the row, or take it away."""
        self.offset[row], self.slot_bytes[row], self.serial[row] = slot or (0, 0, 0)

    def slot(self, row: int) -> Slot:
        """Return the slot that is assigned to the row."""
        return Slot(self.offset[row], self.slot_bytes[row], self.serial[row])

    def hold(self, row: int, change: int) -> None:
        """Change the row's holds by 1 or -1."""
        before = self.holds[row]
        self.holds[row] = before + change
        self.held_rows += (before + change > 0) - (before > 0)

    def add(self, row: int, tier: int, charged: int = 0) -> None:
        """Make the part present in a tier."""
        bit = 1 << tier
        if self.present[row] & bit:
            return
        above = self.parent[row]
        if above != NO_ROW:
            self.kids[tier][above] += 1
            if not self.present[row]:
                self.children[above] += 1
                self.orphans += not self.present[above]
        if not self.present[row]:
            self.orphans -= self.children[row]  # the parent is back
        self.present[row] |= bit
        self.charged[tier][row] = charged

    def discard(self, row: int, tier: int) -> int:
        """Make the part absent from a tier; return what it was charged there."""
        bit = 1 << tier
        if not self.present[row] & bit:
            return 0
        self.present[row] &= ~bit
        charged = self.charged[tier][row]
        self.charged[tier][row] = 0
        above = self.parent[row]
        if above != NO_ROW:
            self.kids[tier][above] -= 1
            if not self.present[row]:
                self.children[above] -= 1
                self.orphans -= not self.present[above]
        if not self.present[row]:
            self.orphans += self.children[row]
        return charged

    def leaf(self, row: int, tier: int) -> bool:
        """Say whether the part may leave a tier without making a headless tail."""
        if self.holds[row] or self.kids[tier][row]:
            return False
        return not self.children[row] or self.present[row] != 1 << tier

    def prune(self, row: int) -> None:
        """Forget the row, and rows above it, that nothing needs any more."""
        while row != NO_ROW and not (
            self.present[row] or self.links[row] or self.holds[row] or self.serial[row]
        ):
            above = self.parent[row]
            self.parent[row] = NO_ROW
            del self.rows[self.names[row]]
            self.names[row] = b""
            self.sums[row] = b""
            self._free.append(row)
            if above != NO_ROW:
                self.links[above] -= 1
            row = above

    def _make(self, name: RecordId, depth: int) -> int:
        if self._free:
            row = self._free.pop()
            self.names[row] = name
        else:
            row = len(self.names)
            self.names.append(name)
            self.sums.append(b"")
            for column in (self.present, self.children, self.links, self.holds, self.raw_bytes):
                column.append(0)
            for column in (self.offset, self.serial, self.slot_bytes, self.depth):
                column.append(0)
            for column in (*self.kids, *self.charged):
                column.append(0)
            self.parent.append(NO_ROW)
        self.rows[name] = row
        self.depth[row] = depth
        return row
