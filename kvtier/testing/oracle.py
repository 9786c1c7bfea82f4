"""What must hold of a Cache at every moment, checked from outside by recounting everything."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Container, Mapping
from functools import cache as remembered
from typing import Any

from kvtier.cache import Cache, Match
from kvtier.catalog.catalog import Part, Shelf
from kvtier.catalog.index import DRAM, NO_ROW
from kvtier.catalog.lease import Lease, LeaseState
from kvtier.identity.record import RecordId
from kvtier.memory.arena import Slot
from kvtier.prefix import Prefix
from kvtier.testing.inside import inside
from kvtier.testing.simmodel import CHUNK, Model
from kvtier.testing.simtask import Leak, SimError


@remembered
def payload(name: RecordId, size: int) -> bytes:
    """Return the only bytes that a part of this name may ever have."""
    digest = hashlib.blake2b(name).digest()
    return (digest * (size // len(digest) + 1))[:size]


class Oracle:
    """Recounts one catalog. ``check`` raises SimError with the first thing that does not hold.

    caches: all that share it.
    """

    def __init__(self, cache: Cache, model: Model, clock: Callable[[], float]) -> None:
        self.cache = cache
        self.caches = [cache]
        self.model = model
        self.lost = 0
        self.also: list[Callable[[], None]] = []
        self.also_at_rest: list[Callable[[], None]] = []
        self._clock = clock
        self._catalog = inside(cache).catalog
        self._index = inside(cache).catalog._index
        self._arena = inside(cache).depot.arena
        self.came: dict[int, float] = {}
        """When the last read of each row ended."""
        self._count_losses()
        self._note_reads()

    def _count_losses(self) -> None:
        """Note what may leave orphans: a tier lost a part or did not take it, or a probe saw one.

        What a probe sees may have lost its parent while the shared tier was asked.
        """
        lost, stored = self._catalog.lost, self._catalog.stored
        last_copy, withdraw = self._catalog._room.last_copy, self._catalog._room.withdraw

        def counted_lost(row: int, tier: int, why: str = "lost") -> bool:
            self.lost += 1
            return lost(row, tier, why)

        def counted_stored(part: Part, tier: int, charged: int, *args: Any) -> None:
            row = self._index.find(part.name)
            self.lost += row == NO_ROW or not self._index.present[row]
            stored(part, tier, charged, *args)

        def counted_last(below: list[int], share: int | None = None, by: int = 0) -> int:
            row = last_copy(below, share, by)
            self.lost += row != NO_ROW
            return row

        self._catalog.lost = counted_lost  # type: ignore[method-assign]
        self._catalog.stored = counted_stored  # type: ignore[assignment, method-assign]

        def counted_withdraw(row: int, why: str = "invalidated") -> None:
            self.lost += 1
            withdraw(row, why)

        self._catalog._room.last_copy = counted_last  # type: ignore[method-assign]
        self._catalog._room.withdraw = counted_withdraw  # type: ignore[method-assign]

    def _note_reads(self) -> None:
        fetched = self._catalog.fetched

        def noted(row: int, raw_sum: bytes | None) -> None:
            self.came[row] = self._clock()
            fetched(row, raw_sum)

        self._catalog.fetched = noted  # type: ignore[method-assign]

    # ---- at any moment

    def check(self) -> None:
        """Check everything that holds between any two callbacks."""
        self._check_slots()
        self._check_links()
        self._check_holds()
        self._check_leases()
        self._check_budgets()
        for look in self.also:
            look()

    def _check_slots(self) -> None:
        index, arena = self._index, self._arena
        owner: dict[int, int] = {}
        total = 0
        for row in self._rows():
            in_dram = index.present[row] & 1 << DRAM
            if not index.serial[row]:
                if in_dram:
                    raise SimError(f"row {row} is in DRAM without a slot")
                continue
            slot = index.slot(row)
            if owner.setdefault(slot.offset, row) != row:
                raise SimError(f"rows {owner[slot.offset]} and {row} share a slot")
            if not arena.holds(slot):
                raise SimError(f"row {row} has {slot}, which is not in use")
            total += slot.nbytes
            if in_dram:
                self.expect_bytes(index.names[row], slot, index.raw_bytes[row], "published")
        self._expect(len(owner) == arena.slots_in_use, "a slot is in use and belongs to no row")
        self._expect(total == arena.used_bytes <= arena.nbytes, "used_bytes of the arena is wrong")

    def _check_links(self) -> None:
        index = self._index
        present, parent, depth = index.present, index.parent, index.depth
        children: Counter[int] = Counter()
        kids = [Counter[int]() for _ in index.kids]
        orphans = 0
        for name, row in index.rows.items():
            above = parent[row]
            if index.names[row] != name:
                raise SimError(f"row {row} has lost its name")
            if above == NO_ROW:
                continue
            if index.rows.get(index.names[above]) != above or depth[above] != depth[row] - 1:
                raise SimError(f"the parent of row {row} is gone")
            bits = present[row]
            if bits:
                children[above] += 1
                orphans += not present[above]
                for tier, counts in enumerate(kids):
                    counts[above] += bits >> tier & 1
        for row in index.rows.values():
            if index.children[row] != children[row]:
                raise SimError(f"row {row} has {children[row]} children, not the number counted")
            if any(index.kids[tier][row] != counts[row] for tier, counts in enumerate(kids)):
                raise SimError(f"row {row}: its children in some tier are not the number counted")
        self._expect(index.orphans == orphans, f"{orphans} orphans, counted {index.orphans}")
        self._expect(not orphans or self.lost > 0, f"{orphans} orphans, and no tier lost anything")

    def _check_holds(self) -> None:
        index = self._index
        known = Counter(row for lease in self._leases() for row in lease.rows)
        for row in index.rows.values():
            if index.serial[row] and not index.present[row] & 1 << DRAM:
                known[row] += 1  # it is being filled
        for row, count in known.items():
            if index.holds[row] < count:
                raise SimError(f"row {row} has {index.holds[row]} holds, {count} known")
        for row in self._catalog._room.withdrawn.values():
            if not index.holds[row] or index.present[row]:
                raise SimError(f"row {row} was withdrawn, and is in a tier or held by nobody")
        held = sum(count > 0 for count in index.holds)
        self._expect(held == index.held_rows, f"{held} rows are held, counted {index.held_rows}")

    def _check_leases(self) -> None:
        now = self._clock()
        for lease in self._leases():
            if lease.plans or (lease.state is LeaseState.HELD and lease.deadline > now):
                self.expect_leased(lease)

    def _check_budgets(self) -> None:
        index = self._index
        for tier, shelf in enumerate(self._catalog._shelves):
            rows = [row for row in index.rows.values() if index.present[row] >> tier & 1]
            if len(rows) != len(shelf.order) or sorted(rows) != sorted(self._order(shelf)):
                raise SimError(f"{shelf.name}: the order's rows are not those of the index")
            used = sum(index.charged[tier][row] for row in rows)
            self._expect(used == shelf.used, f"{shelf.name}: used {used}, counted {shelf.used}")
            binds = tier and not inside(self.cache).depot.tiers[tier].store.capabilities.shared
            if binds and shelf.capacity is not None and used > shelf.capacity:
                raise SimError(f"{shelf.name}: {used} is over its budget")

    def _order(self, shelf: Shelf) -> list[int]:
        """Return the order in which parts leave; one that runs in a circle is cut."""
        return list(itertools.islice(shelf.order, len(self._index) + 1))

    def _rows(self) -> list[int]:
        """Return all rows: those with a name, and those withdrawn whose slot is held still."""
        return [*self._index.rows.values(), *self._catalog._room.withdrawn.values()]

    def _leases(self) -> list[Lease]:
        return list(self._catalog._leases._all.values())

    # ---- what a caller was given

    def expect_leased(self, lease: Lease) -> None:
        """Check that each slot of a lease is that of its part, and whole."""
        index = self._index
        for row, slot in zip(lease.rows, itertools.chain(*lease.slots), strict=True):
            self._expect(index.slot(row) == slot, f"a leased slot is no longer row {row}'s")
            self.expect_bytes(index.names[row], slot, index.raw_bytes[row], "leased")

    def expect_bytes(self, name: RecordId, slot: Slot, size: int, what: str) -> None:
        """Check that a slot is in use and holds exactly the bytes of that part."""
        self._expect(self._arena.holds(slot), f"a {what} slot is not in use")
        data = self._arena.view(slot.offset, size)
        self._expect(data == payload(name, size), f"{what} bytes of {name.hex()[:8]} are wrong")

    def expect_match(self, match: Match) -> None:
        """Check that a match is as long as what is anywhere allows, and not longer.

        Nor shorter than what is in the tiers that answer.
        """
        names, prompt = match.prefix.names, len(match.prefix.tokens)
        most = self.model.usable(names, prompt, self._present)
        self._expect(match.tokens <= most, "a part that is nowhere was matched")
        tiers = inside(self.cache).depot.tiers.items()
        answering = 1 | sum(1 << number for number, tier in tiers if tier.available)
        least = self.model.usable(names, prompt, lambda name: self._present(name) & answering)
        self._expect(match.tokens >= least, f"{match.tokens} tokens were matched of {least}")

    def _present(self, name: RecordId) -> int:
        row = self._index.rows.get(name, NO_ROW)
        return self._index.present[row] if row != NO_ROW else 0

    def readable(self, match: Match, slots: int, has: Callable[[RecordId], object]) -> int:
        """Return how many of the matched tokens a fetch brings into so many slots.

        has: says which parts can be read. Of a model that does not need all of every chunk it is
        all tokens or none: a shorter prefix needs other parts.
        """
        names = match.prefix.names
        if not self.model.plain:
            needed = list(self.model.needed(names, match.tokens))
            return match.tokens if len(needed) <= slots and all(map(has, needed)) else 0
        chunks = min(-(-match.tokens // CHUNK), slots // self.model.width)
        while not all(map(has, self.model.needed(names, chunks * CHUNK))):
            chunks -= 1
        return min(chunks * CHUNK, match.tokens)

    def copies(self, kept: Mapping[int, Container[RecordId]]) -> Callable[[RecordId], bool]:
        """Return what says whether some tier has a part that the index names, and can return it.

        kept: by tier number, the names of what its Store really has.
        """

        def has(name: RecordId) -> bool:
            bits = self._present(name)
            below = any(bits >> tier & 1 and name in names for tier, names in kept.items())
            return bool(bits & 1 << DRAM) or below

        return has

    def known(self, prefix: Prefix) -> int:
        """Return how many chunks, from the first, have all that later ones need, or get it now."""
        rows, present, serial = self._index.rows, self._index.present, self._index.serial
        for count, chunk in enumerate(prefix.names):
            found = [rows.get(name, NO_ROW) for name in self.model.anchors(chunk)]
            if not all(row != NO_ROW and (present[row] or serial[row]) for row in found):
                return count
        return len(prefix.names)

    def expect_known(self, prefix: Prefix, chunks: int) -> None:
        """Check that a reservation has not evicted its own ancestors."""
        self._expect(self.known(prefix) >= chunks, "a save evicted its own ancestors")

    # ---- at the end

    def check_rest(self) -> None:
        """Check that nothing is held once all requests and moves have ended."""
        self.check()
        moves = inside(self.cache).moves
        self._left(not self._leases(), "a lease is left")
        self._left(not any(len(cache._plans) for cache in self.caches), "a plan is left")
        self._left(not moves._saved, "a save is left")
        self._left(not moves._fetcher._reading, "a read is left")
        self._left(not moves._fetcher._tasks, "a reading task is left")
        for spiller in moves._spillers.values():
            self._left(not spiller._queue and not spiller._queued, "a spill is left")
            self._left(not spiller._waiting, "a spill waits for ever")
            self._left(spiller._queued_bytes == 0, "the spill queue's bytes are wrong")
        index = self._index
        self._left(index.held_rows == 0, f"{index.held_rows} rows are held for ever")
        self._left(not any(index.holds), "a row that is gone is held")
        for row in index.rows.values():
            in_dram = index.present[row] & 1 << DRAM
            self._left(bool(index.serial[row]) == bool(in_dram), f"the slot of row {row} leaks")
        for look in self.also_at_rest:
            look()

    def check_empty(self) -> None:
        """Check that nothing at all is left."""
        self.check_rest()
        self._left(not len(self._index), f"{len(self._index)} rows are left in an empty cache")
        self._left(self._arena.slots_in_use == 0, "a slot is in use in an empty cache")
        self._left(self._index.orphans == 0, "an empty cache has orphans")

    def indexed(self, tier: int) -> list[RecordId]:
        """Return the names of the parts that the index says a tier has."""
        index = self._index
        return [name for name, row in index.rows.items() if index.present[row] >> tier & 1]

    def strays(self, tier: int) -> set[RecordId]:
        """Return the names of the records that a tier may have besides."""
        return set(inside(self.cache).moves._spillers[tier]._strays._charged)

    @property
    def orphans(self) -> int:
        """Parts whose parent is in no tier, as the index counts them; ``check`` recounts that."""
        return self._index.orphans

    def used(self, tier: int) -> int:
        """Return the bytes that a tier is charged for what it has."""
        return self._catalog._shelves[tier].used

    def capacity(self, tier: int) -> int | None:
        """Return a tier's budget in bytes; None for unbounded."""
        return self._catalog.capacity(tier)

    def state(self) -> str:
        """Return what the index and the arena hold, as text for a digest."""
        index = self._index
        rows = [
            (name.hex(), row, index.present[row], index.holds[row], *index.slot(row))
            for name, row in index.rows.items()
        ]
        orders = [self._order(shelf) for shelf in self._catalog._shelves]
        return repr((rows, orders, self._arena.used_bytes))

    @staticmethod
    def _left(nothing: bool, otherwise: str) -> None:  # noqa: FBT001  (a condition, first)
        if not nothing:
            raise Leak(otherwise)

    @staticmethod
    def _expect(holds: bool, otherwise: str) -> None:  # noqa: FBT001  (a condition, first)
        if not holds:
            raise SimError(otherwise)
