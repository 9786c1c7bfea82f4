"""The index: which part is where. Rows of plain arrays, and one dict from name to row.

A row is one part of one chunk. It knows its parent (a part of the chunk before), in which tiers
it is present, and how many present children it has there: enough to evict deepest-first and to
see a headless tail. Not thread-safe: the Catalog holds its lock.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.identity.record import RecordId
from kvtier.memory.arena import Slot, slot_bytes_for
from kvtier.memory.packed import pack_slots

NO_ROW: Final = -1
DRAM: Final = 0
"""The tier number of DRAM; slower tiers follow in their order."""

_FEW: Final = 8
"""Rows that are sooner dealt with one by one than by numpy."""

_SUM: Final = struct.Struct("16s")


class Index:
    """Rows by name. `tiers` counts DRAM and the slower tiers.

    freed: called with a row that has become free to leave a tier in which it was parked.
    """

    def __init__(self, tiers: int) -> None:
        self.rows: dict[RecordId, int] = {}
        self.names: list[RecordId] = []
        self._sums = array("Q")  # raw checksums, two items each: as objects they take 57 bytes
        self.parent = array("i")
        self.depth = array("i")
        self.owner = array("H")  # the namespace, as a number
        self.level = array("b")  # the priority: lower levels leave first
        self.present = array("H")  # a bit a tier
        self.parked = array("H")  # a bit a tier where its turn to leave came, and it had to stay
        self.children = array("i")  # children that are present in any tier
        self.kids = [array("i") for _ in range(tiers)]  # children present in that tier
        self.holds = array("i")  # leases, copies, reads and spills that need the row
        self.raw_bytes = array("q")
        self.offset = array("q")  # of the slot, while one is assigned
        self.serial = array("q")  # of the slot, 0 when none is assigned
        self.charged = [array("q") for _ in range(tiers)]  # bytes of that tier's budget
        self.orphans = 0
        self.held_rows = 0
        self.freed: Callable[[int], None] = _nobody
        self._child = array("i")  # a row's first child; children are chained to each other
        self._next = array("i")
        self._last = array("i")
        self._free: list[int] = []

    def __len__(self) -> int:
        """Rows in use, those kept only for their children included."""
        return len(self.rows)

    @property
    def blank(self) -> bool:
        """Whether there never was a row."""
        return not self.names

    def find(self, name: RecordId) -> int:
        """Return the row of a part, or NO_ROW."""
        return self.rows.get(name, NO_ROW)

    def known(self, names: Iterable[RecordId]) -> tuple[list[int], list[int]]:
        """Return the rows of parts, and the tiers of each, up to the first that is in none.

        The loops run in C: one in Python takes longer than the look-up itself.
        """
        rows: list[int] = list(iter(map(self.rows.get, names).__next__, None))
        bits: list[int] = list(iter(map(self.present.__getitem__, rows).__next__, 0))
        return rows[: len(bits)], bits

    def in_dram(self, names: Iterable[RecordId]) -> list[int]:
        """Return the rows of parts up to the first that is not in DRAM."""
        rows: list[int] = list(iter(map(self.rows.get, names).__next__, None))
        present = self.present
        there = [present[row] & 1 for row in rows]
        return rows[: there.index(0)] if 0 in there else rows

    def ensure(
        self, name: RecordId, parent: RecordId | None, depth: int, raw_bytes: int, owner: int
    ) -> int:
        """Return the row of a part, made if need be, with a row for its parent above it.

        A parent is always one less deep, and depths never change: whatever the records of a
        tier say of themselves, no chain of parents leads back to where it began.
        """
        row = self.rows.get(name, NO_ROW)
        if row == NO_ROW:
            row = self._make(name, depth, owner)
        linked = self.parent[row] != NO_ROW or self.present[row]
        if parent is not None and not linked and self.depth[row] == depth:
            above = self.rows.get(parent, NO_ROW)
            if above == NO_ROW:
                above = self._make(parent, depth - 1, owner)
            if self.depth[above] == depth - 1:
                self._link(row, above)
        if not self.serial[row]:
            self.raw_bytes[row] = raw_bytes
        return row

    def fill(
        self,
        names: Sequence[RecordId],
        parents: NDArray[np.intp],
        depths: NDArray[np.int32],
        owners: NDArray[np.uint16],
        raw_bytes: NDArray[np.int64],
        tier: int,
        charged: NDArray[np.int64],
    ) -> None:
        """Make parts present in one tier, while this is blank; as `ensure` and `add` would.

        parents: of each the row, which is smaller than its own and one less deep, or NO_ROW.
        """
        count = len(names)
        self.names.extend(names)
        self.rows.update(zip(names, range(count), strict=True))
        self._sums.frombytes(bytes(count * _SUM.size))
        children = np.bincount(parents[parents != NO_ROW], minlength=count)
        child, following, last = _chained(parents)
        for column, values in (
            *((self.parent, parents), (self.depth, depths), (self.owner, owners)),
            *((self.children, children), (self.kids[tier], children)),
            *((self.raw_bytes, raw_bytes), (self.charged[tier], charged)),
            *((self._child, child), (self._next, following), (self._last, last)),
            (self.present, np.full(count, 1 << tier)),
        ):
            column.frombytes(values.astype(column.typecode).tobytes())
        for column in (self.level, self.parked, self.holds, self.offset, self.serial):
            column.frombytes(bytes(count * column.itemsize))
        for number in range(len(self.kids)):
            if number != tier:
                for column in (self.kids[number], self.charged[number]):
                    column.frombytes(bytes(count * column.itemsize))

    def line(self, row: int) -> list[int]:
        """Return a row and all above it, the topmost first."""
        rows: list[int] = []
        while row != NO_ROW:
            rows.append(row)
            row = self.parent[row]
        rows.reverse()
        return rows

    def set_slot(self, row: int, slot: Slot | None) -> None:
        """Assign a slot of the arena to the row, or take it away."""
        self.offset[row], _, self.serial[row] = slot or (0, 0, 0)

    def slot(self, row: int) -> Slot:
        """Return the slot that is assigned to the row."""
        return Slot(self.offset[row], slot_bytes_for(self.raw_bytes[row]), self.serial[row])

    def set_sum(self, row: int, raw_sum: bytes) -> None:
        """Note the raw checksum of a part in DRAM, 16 bytes."""
        _SUM.pack_into(self._sums, row * _SUM.size, raw_sum)

    def sum_of(self, row: int) -> bytes:
        """Return the raw checksum of a part in DRAM."""
        found: bytes = _SUM.unpack_from(self._sums, row * _SUM.size)[0]
        return found

    def children_of(self, row: int) -> Iterator[int]:
        """Yield the rows whose parent this is, present or not."""
        child = self._child[row]
        while child != NO_ROW:
            following = self._next[child]
            yield child
            child = following

    def hold(self, row: int, change: int) -> None:
        """Change the row's holds by 1 or -1."""
        before = self.holds[row]
        self.holds[row] = before + change
        self.held_rows += (before + change > 0) - (before > 0)
        if self.parked[row] and before + change == 0:
            self.freed(row)

    def hold_all(self, rows: Sequence[int]) -> bytes:
        """Hold each of many rows once more, none of them twice; return their slots, packed.

        A view keeps an array from growing, so that none may outlive this.
        """
        if len(rows) < _FEW:
            for row in rows:
                self.hold(row, 1)
            return pack_slots(map(self.slot, rows))
        some = np.array(rows, np.int64)
        holds = np.frombuffer(self.holds, np.int32)
        before = holds[some]
        holds[some] = before + 1
        self.held_rows += len(rows) - int(np.count_nonzero(before))
        columns = self.offset, self.raw_bytes, self.serial
        offsets, raw, serials = (np.frombuffer(column, np.int64)[some] for column in columns)
        return np.array((offsets, slot_bytes_for(raw), serials), "<u8").tobytes()

    def add(self, row: int, tier: int, charged: int = 0) -> None:
        """Make a part present in a tier that has it not."""
        above = self.parent[row]
        if above != NO_ROW:
            self.kids[tier][above] += 1
            if not self.present[row]:
                self.children[above] += 1
                self.orphans += not self.present[above]
        if not self.present[row]:
            self.orphans -= self.children[row]  # the parent is back
        self.present[row] |= 1 << tier
        self.charged[tier][row] = charged
        if self.parked[row]:
            self.freed(row)  # where it was the last copy, it is no longer

    def discard(self, row: int, tier: int) -> int:
        """Make a part absent from a tier that has it; return what it was charged there."""
        self.present[row] &= ~(1 << tier)
        charged = self.charged[tier][row]
        self.charged[tier][row] = 0
        above = self.parent[row]
        if above != NO_ROW:
            self.kids[tier][above] -= 1
            if not self.present[row]:
                self.children[above] -= 1
                self.orphans -= not self.present[above]
            if self.parked[above]:
                self.freed(above)
        if not self.present[row]:
            self.orphans += self.children[row]
        return charged

    def detach(self, row: int) -> list[int]:
        """Take the name from a row that is in no tier, for whoever still holds it.

        What hangs under it hangs under a new row of that name from now on. Returns those children.
        """
        name, above = self.names[row], self.parent[row]
        moved = [child for child in self.children_of(row) if self.attached(child)]
        del self.rows[name]
        if moved:
            fresh = self._make(name, self.depth[row], self.owner[row])
            if above != NO_ROW:
                self._link(fresh, above)
            for child in moved:
                self._unlink(child, row)
                self._link(child, fresh)
            for counts in (self.children, *self.kids):
                counts[fresh], counts[row] = counts[row], 0
        return moved

    def attached(self, row: int) -> bool:
        """Say whether a row is found under its name."""
        return self.rows.get(self.names[row]) == row

    def leaf(self, row: int, tier: int) -> bool:
        """Say whether the part may leave a tier without making a headless tail."""
        if self.holds[row] or self.kids[tier][row]:
            return False
        return not self.children[row] or self.present[row] != 1 << tier

    def orphan(self, row: int) -> bool:
        """Say whether the part is in a tier although its parent is in none."""
        above = self.parent[row]
        return bool(above != NO_ROW and self.present[row] and not self.present[above])

    def prune(self, row: int) -> None:
        """Forget the row, and rows above it, that nothing needs any more.

        A slot needs no asking: its row is in DRAM, or held.
        """
        while row != NO_ROW and not (self.present[row] or self._child[row] >= 0 or self.holds[row]):
            above = self.parent[row]
            if above != NO_ROW:
                self._unlink(row, above)
            if self.attached(row):
                del self.rows[self.names[row]]
            self.names[row] = b""
            self._free.append(row)
            row = above

    def _link(self, row: int, above: int) -> None:
        first = self._child[above]
        self.parent[row] = above
        self._next[row], self._last[row] = first, NO_ROW
        if first != NO_ROW:
            self._last[first] = row
        self._child[above] = row

    def _unlink(self, row: int, above: int) -> None:
        following, last = self._next[row], self._last[row]
        if following != NO_ROW:
            self._last[following] = last
        if last != NO_ROW:
            self._next[last] = following
        else:
            self._child[above] = following
        self.parent[row] = NO_ROW

    def _make(self, name: RecordId, depth: int, owner: int) -> int:
        if self._free:
            row = self._free.pop()
            self.names[row] = name
        else:
            row = len(self.names)
            self.names.append(name)
            self._sums.extend((0, 0))
            for column in (self.owner, self.level, self.present, self.parked, self.children):
                column.append(0)
            for column in (self.holds, self.raw_bytes, self.offset, self.serial, self.depth):
                column.append(0)
            for column in (*self.kids, *self.charged):
                column.append(0)
            for column in (self.parent, self._child, self._next, self._last):
                column.append(NO_ROW)
        self.rows[name] = row
        self.depth[row] = depth
        self.owner[row] = owner
        self.level[row] = 0
        return row


def _chained(parents: NDArray[np.intp]) -> tuple[NDArray[np.intp], ...]:
    """Return of each row its first child, and its two neighbours among its parent's children."""
    child, following, last = np.full((3, len(parents)), NO_ROW)
    rows = np.flatnonzero(parents != NO_ROW)
    rows = rows[np.argsort(parents[rows], kind="stable")]
    siblings = parents[rows[1:]] == parents[rows[:-1]]
    older, newer = rows[:-1][siblings], rows[1:][siblings]
    following[newer], last[older] = older, newer
    first = rows[np.append(~siblings, True)[: len(rows)]]  # the last one to come
    child[parents[first]] = first
    return child, following, last


def _nobody(_row: int) -> None:
    pass
