"""Room: which part may leave which tier, and where a new one goes. Called under the lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.catalog.gone import Gone
from kvtier.catalog.index import DRAM, NO_ROW, Index
from kvtier.catalog.order import Order
from kvtier.catalog.owners import Owners
from kvtier.errors import MisuseError
from kvtier.identity.record import RecordId
from kvtier.memory.arena import Arena, Slot, slot_bytes_for
from kvtier.metrics import Metrics
from kvtier.policies.ages import Ages
from kvtier.policies.base import Policy

_MOST_TOUCHED: Final = 8
"""Chains whose marking is put off: as much as an eviction may have to do first."""


@dataclass(slots=True)
class Shelf:
    """What the Catalog keeps of one tier: its budget and the order in which parts leave it.

    policy: makes an empty one. shared: other hosts see it, and the index not all of it. unlisted:
    nor as long as it is not opened. ages: of what leaves if unused. used_by: bytes by share.
    """

    name: str
    policy: Callable[[], Policy]
    capacity: int | None
    shared: bool = False
    unlisted: bool = False
    ages: Ages | None = None
    used: int = 0
    used_by: list[int] = field(default_factory=list)
    order: Order = field(init=False)

    def has_room(self, nbytes: int) -> bool:
        """Say whether so many bytes fit the budget."""
        return self.capacity is None or self.used + nbytes <= self.capacity


class Room:
    """The index, the arena and the shelves, kept in step with each other."""

    def __init__(
        self,
        arena: Arena,
        shelves: Sequence[Shelf],
        metrics: Metrics,
        owners: Owners,
        gone: Gone,
    ) -> None:
        self.index = Index(len(shelves))
        self.arena = arena
        self.shelves = list(shelves)
        self.owners = owners
        self.gone = gone
        self.withdrawn: dict[int, int] = {}  # rows whose slots are held still, by slot serial
        self._metrics = metrics
        self._touched: list[tuple[list[int], bool]] = []
        self.index.freed = self._freed
        for tier, shelf in enumerate(self.shelves):
            shelf.used_by = [0] * len(owners.quotas)
            shelf.order = self._order(tier, shelf)

    def _order(self, tier: int, shelf: Shelf) -> Order:
        owner, shares, quotas = self.index.owner, self.owners.shares, self.owners.quotas

        def spare(share: int) -> int:
            return shelf.used_by[share] - int(quotas[share].floor * (shelf.capacity or 0))

        def size(row: int) -> int:
            if tier == DRAM:
                return slot_bytes_for(self.index.raw_bytes[row])
            return self.index.charged[tier][row]

        def share(row: int) -> int:
            return shares[owner[row]]

        return Order(self.index, tier, shelf.policy, share, spare, size, shelf.ages)

    # ---- what is used

    def touch(self, rows: list[int], *, again: bool = False) -> None:
        """Mark a chain as used, deepest first, in every tier that has it, before anything leaves.

        The marking itself is put off: a match has no time for it. again: it is no new use.
        """
        if rows:
            self._touched.append((rows, again))
        if len(self._touched) > _MOST_TOUCHED:
            self.settle_touches(1)

    def settle_touches(self, chains: int | None = None) -> None:
        """Mark chains that were used, oldest first; all of them unless a number is given."""
        for rows, again in self._touched[:chains]:
            rows.reverse()
            for shelf in self.shelves:
                shelf.order.touch(rows, again=again)
        del self._touched[:chains]

    @property
    def behind(self) -> bool:
        """Whether there are chains to be marked."""
        return bool(self._touched)

    def in_dram(self, row: int) -> bool:
        """Say whether the part's bytes are whole in its slot."""
        return row != NO_ROW and bool(self.index.present[row] & 1)

    def known(self, row: int) -> bool:
        """Say whether the part is in a tier, or on its way into one."""
        return row != NO_ROW and bool(self.index.present[row] or self.index.serial[row])

    # ---- room in DRAM

    def obtainable(self, row: int, audible: int) -> bool:
        """Say whether the part is in a tier that answers, of those bits, or on its way into one."""
        return row != NO_ROW and bool(self.index.present[row] & audible or self.index.serial[row])

    def slot_for(self, nbytes: int, below: list[int], victims: Victims) -> Slot | None:
        """Return a slot, evicting leaves of DRAM as needed; None when nothing may leave.

        below: held rows for whose sake it is done; neither they nor their ancestors leave.
        """
        while (slot := victims.slot(nbytes)) is None:
            row = victims.next(nbytes, below)
            if row == NO_ROW:
                return None
            self.leave(row, DRAM)
            self._metrics.add("evicted_parts", tier=self.shelves[DRAM].name)
        return slot

    def victims(self, tier: int, share: int | None = None, by: int = 0) -> Iterator[int]:
        """Yield the rows that should leave a tier, in order; one has left when the next is asked.

        share: take from it alone; by: the share for which room is made. See Order.
        """
        self.settle_touches()
        return self.shelves[tier].order.victims(share, by)

    def last_copy(self, below: list[int], share: int | None = None, by: int = 0) -> int:
        """Return a row of DRAM whose children lie in slower tiers only, or NO_ROW.

        Its write has failed there. Its slot must not be lost for good, so its children become
        orphans: counted, never matched, first to leave, and whole again when it is saved anew.
        """
        index = self.index
        kept: dict[int, None] = {}
        for held in below:
            row = held
            while row != NO_ROW and row not in kept:
                kept[row] = None
                row = index.parent[row]
        rows = self.shelves[DRAM].order.last_copies(share, by)
        return next((row for row in rows if row not in kept), NO_ROW)

    def over_ceiling(self, share: int, tier: int, nbytes: int) -> bool:
        """Say whether so many bytes more would take a share above its ceiling in a tier."""
        shelf = self.shelves[tier]
        if not share or shelf.capacity is None:
            return False
        ceiling = self.owners.quotas[share].ceiling * shelf.capacity
        return shelf.used_by[share] + nbytes > ceiling

    def share(self, row: int) -> int:
        """Return the share in which a row counts."""
        return self.owners.shares[self.index.owner[row]]

    def assign(self, owner: int, share: int) -> None:
        """Count what an owner has in another share from now on."""
        if self.owners.shares[owner] == share:
            return
        index, before = self.index, self.owners.shares[owner]
        rows = (*index.rows.values(), *self.withdrawn.values())
        mine = [row for row in rows if index.owner[row] == owner]
        inside = [
            (tier, row) for tier in range(len(self.shelves)) for row in mine if self._in(row, tier)
        ]
        for tier, row in inside:
            self.shelves[tier].order.remove(row)
        self.owners.shares[owner] = share
        for tier, row in inside:
            self.shelves[tier].order.insert(row)
            if index.orphan(row):
                self.shelves[tier].order.expend(row)
        for tier, shelf in enumerate(self.shelves):
            moved = sum(index.charged[tier][row] for row in mine)
            if tier == DRAM:
                moved = sum(index.slot(row).nbytes for row in mine if index.serial[row])
            shelf.used_by[before] -= moved
            shelf.used_by[share] += moved

    def _in(self, row: int, tier: int) -> bool:
        return bool(self.index.present[row] & 1 << tier)

    # ---- in and out of a tier

    def promote(self, row: int, level: int) -> None:
        """Give a part another priority."""
        index = self.index
        inside = [shelf for tier, shelf in enumerate(self.shelves) if self._in(row, tier)]
        for shelf in inside:
            shelf.order.remove(row)
        index.level[row] = level
        for shelf in inside:
            shelf.order.insert(row)
            if index.orphan(row):
                shelf.order.expend(row)

    def enter(self, row: int, tier: int, charged: int = 0) -> None:
        """Make a part present in a tier's index. Its children are no orphans any more.

        charged: bytes of its budget; in DRAM the slot has been counted.
        """
        index, shelf = self.index, self.shelves[tier]
        new = not index.present[row]
        self.settle_touches()  # or a use before it came would count as one of it
        index.add(row, tier, charged)
        shelf.order.insert(row)
        shelf.used += charged
        shelf.used_by[self.share(row)] += charged
        if index.orphan(row) or any(other.order.expends(row) for other in self.shelves):
            shelf.order.expend(row)
        elif new:
            for child in index.children_of(row):
                for other in self.shelves:
                    other.order.revive(child)

    def leave(self, row: int, tier: int, why: str = "evicted") -> None:
        """Take a part out of a tier's index, its slot with it; what hangs under it leaves next."""
        if self._depart(row, tier, why):
            if tier == DRAM:
                self._free(row)
            self.index.prune(row)

    def _depart(self, row: int, tier: int, why: str) -> bool:
        """Make a part absent from a tier; False when it was not there."""
        index, shelf = self.index, self.shelves[tier]
        if not self._in(row, tier):
            return False
        shelf.order.remove(row)
        charged = index.discard(row, tier)
        shelf.used -= charged
        shelf.used_by[self.share(row)] -= charged
        if not index.present[row]:
            self.gone.note(index.names[row], why, shelf.name)
            for child in index.children_of(row):
                for number, other in enumerate(self.shelves):
                    if self._in(child, number):
                        other.order.expend(child)
        return True

    def take(self, row: int, slot: Slot) -> None:
        """Give a row a slot that will be filled, and hold it, and its parent, until that ends."""
        self.index.set_slot(row, slot)
        self.shelves[DRAM].used_by[self.share(row)] += slot.nbytes
        for one in self._with_parent(row):
            self.index.hold(one, 1)

    def publish(self, row: int, raw_sum: bytes) -> bool:
        """Make a part whose slot is filled visible in DRAM, and end the holds of ``take``.

        False, and the slot is taken back, when the part was withdrawn meanwhile.
        """
        if self.index.serial[row] in self.withdrawn:
            self.abort(row)
            return False
        self.index.set_sum(row, raw_sum)
        self.enter(row, DRAM)
        self.unhold(self._with_parent(row))
        return True

    def abort(self, row: int) -> None:
        """Take back the slot of a part that was not filled, and end the holds of ``take``."""
        self.withdrawn.pop(self.index.serial[row], None)
        self._free(row)
        self.unhold(self._with_parent(row))

    def withdraw(self, row: int, why: str = "invalidated") -> None:
        """Make a part absent everywhere; whoever holds its slot keeps that until the hold ends.

        Such a row loses its name, so that the part can be saved anew meanwhile.
        """
        index = self.index
        if self.known(row):
            self.gone.note(index.names[row], why)
        index.hold(row, 1)  # it must outlive its tiers until the slot is dealt with
        for tier in range(len(self.shelves)):
            self._depart(row, tier, why)
        if index.serial[row]:
            self.withdrawn[index.serial[row]] = row
            self._detach(row)
        self.unhold((row,))

    def _detach(self, row: int) -> None:
        """Take the name from a row; a child that is being filled holds its new parent instead."""
        index = self.index
        for child in index.detach(row):
            if index.serial[child] and not self.in_dram(child):
                index.hold(index.parent[child], 1)
                index.hold(row, -1)

    def _free(self, row: int) -> None:
        slot = self.index.slot(row)
        self.arena.free(slot)
        self.index.set_slot(row, None)
        self.shelves[DRAM].used_by[self.share(row)] -= slot.nbytes

    def _freed(self, row: int) -> None:
        """Look again at a row that had to stay in some tiers."""
        for shelf in self.shelves:
            shelf.order.wake(row)

    # ---- holds

    def _with_parent(self, row: int) -> tuple[int, ...]:
        above = self.index.parent[row]
        return (row,) if above == NO_ROW else (row, above)

    def reserved(self, name: RecordId, slot: Slot) -> int:
        """Return the row that `slot` was reserved for. Raises MisuseError when it was not."""
        row = self.withdrawn.get(slot.serial, self.index.find(name))
        taken = row != NO_ROW and self.index.serial[row] == slot.serial
        if not taken or self.in_dram(row) or self.index.names[row] != name:
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
        index, withdrawn = self.index, self.withdrawn
        for row in rows:
            index.hold(row, -1)
            if index.serial[row] in withdrawn and not index.holds[row]:
                del withdrawn[index.serial[row]]
                self._free(row)
            index.prune(row)


class Victims:
    """One pass over the order of DRAM, for all slots that one call of one owner asks for.

    kept: held rows that give way, the last of them first, once nothing else can.
    """

    def __init__(self, room: Room, owner: int, kept: list[int]) -> None:
        self._room = room
        self._kept = kept
        self._share = room.owners.shares[owner]
        self._only: int | None = None
        self._turns: Iterator[int] | None = None

    def slot(self, nbytes: int) -> Slot | None:
        """Return a free slot, unless the owner has no right to one."""
        return None if self._full(nbytes) else self._room.arena.allocate(nbytes)

    def next(self, nbytes: int, below: list[int]) -> int:
        """Return the next row to leave; the owner's own while it is at its ceiling. Or NO_ROW.

        below: see ``slot_for``.
        """
        only = self._share if self._full(nbytes) else None
        while True:
            if self._turns is None or only != self._only:  # no two passes at a time
                self._only = only
                self._turns = self._room.victims(DRAM, only, self._share)
            row = next(self._turns, NO_ROW)
            if row == NO_ROW:
                self._turns = None  # what is above a last copy may leave once that has
                row = self._room.last_copy(below, only, self._share)
            if row != NO_ROW or not self._kept:
                return row
            self._room.unhold((self._kept.pop(),))

    def _full(self, nbytes: int) -> bool:
        return self._room.over_ceiling(self._share, DRAM, slot_bytes_for(nbytes))
