"""Below: the half of the Catalog that fetch and spill use, for the tiers below DRAM."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvtier.catalog.index import DRAM, NO_ROW
from kvtier.catalog.shelf import Room, Victims
from kvtier.identity.record import RecordId
from kvtier.identity.shape import Shape
from kvtier.memory.arena import Slot
from kvtier.metrics import Metrics

LOT: Final = 256
"""Parts that leave a tier at a time: taking out more would hold the lock for milliseconds."""

_PEEK_PARTS: Final = 1000


class Part(NamedTuple):
    """One part: its name, its parent's, its chunk's depth, its raw bytes, whose it is.

    level: its priority; parts of a lower one leave before all of a higher one. seconds: how long
    it is kept once it is saved. outgrown: outside of every window already.
    """

    name: RecordId
    parent: RecordId | None
    depth: int
    nbytes: int
    owner: int = 0
    level: int = 0
    seconds: float = float("inf")
    outgrown: bool = False


class Described(NamedTuple):
    """A held row: what it is, and where its bytes lie."""

    part: Part
    namespace: bytes
    slot: Slot
    raw_sum: bytes


class Victim(NamedTuple):
    """A part that has left a slower tier's index and must be deleted from its Store."""

    row: int
    name: RecordId
    charged: int


class Below:
    """See the module. Every call is under the Catalog's lock, and touches memory only."""

    def __init__(self, room: Room, metrics: Metrics) -> None:
        self._room = room
        self._index = room.index
        self._shelves = room.shelves
        self._owners = room.owners
        self._metrics = metrics
        self._lock = threading.Lock()
        self._fetching_bytes = 0
        self._ahead: dict[int, None] = {}  # rows that prefetches read
        self._ahead_bytes = 0

    # ---- fetch: holds and slots for parts that lie in slower tiers

    def hold_for_fetch(
        self,
        names: Sequence[Sequence[RecordId]],
        shape: Shape,
        first: int,
        tokens: int,
        owner: int,
        *,
        ahead: bool = False,
    ) -> tuple[list[tuple[int, ...]], list[int]]:
        """Hold what a prefix of `tokens` needs of the chunks from `first` on, for bringing it up.

        Returns the rows of each chunk, as far as all of it could be held, and those rows that
        were given a fresh slot here: the caller reads them, then calls ``fetched``. A row that
        another fetch is reading is held and not returned as fresh. Nothing is held while reads in
        flight fill half of DRAM.
        ahead: it is a prefetch. It begins no chunk while reads in flight, its own included, fill a
        quarter of DRAM, and its reads do not count against the half of the others.
        """
        chunks: list[tuple[int, ...]] = []
        fresh: list[int] = []
        with self._lock:
            if self._busy(ahead=ahead):
                self._metrics.add("refused_prefetches" if ahead else "refused_fetches")
                return [], []
            wanted = itertools.chain.from_iterable(shape.select(names, first, tokens))
            kept = self._room.hold_names(wanted)  # room for a head is not made of its own tail
            victims = Victims(self._room, owner, kept)
            for chunk in range(first, -(-tokens // shape.chunk_tokens)):
                if ahead and self._busy(ahead=True):
                    break
                needed = shape.needed(tokens, chunk)
                taken: list[int] = []
                read: list[int] = []
                for at in needed:
                    name, nbytes = names[chunk][at], shape.nbytes[at]
                    if not self._hold_for_fetch(name, nbytes, taken, read, victims):
                        break
                fresh += read
                if ahead:  # also of a chunk of which not all can be held: it is read all the same
                    self._reading_ahead(read)
                if len(taken) < len(needed):
                    self._room.unhold(taken)
                    break
                chunks.append(tuple(taken))
            self._room.unhold(kept)
        return chunks, fresh

    def _busy(self, *, ahead: bool) -> bool:
        """Say whether so much is being read that a fetch, or a prefetch, begins nothing."""
        if ahead:
            return self._fetching_bytes >= self._room.arena.nbytes // 4
        return self._fetching_bytes - self._ahead_bytes > self._room.arena.nbytes // 2

    def _reading_ahead(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._ahead[row] = None
            self._ahead_bytes += self._index.slot(row).nbytes

    def _hold_for_fetch(
        self, name: RecordId, nbytes: int, taken: list[int], fresh: list[int], victims: Victims
    ) -> bool:
        index = self._index
        row = index.find(name)
        if row == NO_ROW or not index.present[row]:
            return False
        if index.serial[row]:
            index.hold(row, 1)
            taken.append(row)
            return True
        index.hold(row, 1)
        slot = self._room.slot_for(nbytes, [*taken, row], victims)
        if slot is None:
            self._room.unhold((row,))
            return False
        index.raw_bytes[row] = nbytes  # as the geometry says, whatever a record said of itself
        self._room.take(row, slot)
        self._fetching_bytes += slot.nbytes
        taken.append(row)
        fresh.append(row)
        return True

    def fetched(self, row: int, raw_sum: bytes | None) -> None:
        """End the reading of a fresh row: publish it in DRAM, or with None take its slot back."""
        with self._lock:
            nbytes = self._index.slot(row).nbytes
            self._fetching_bytes -= nbytes
            if row in self._ahead:
                del self._ahead[row]
                self._ahead_bytes -= nbytes
            if raw_sum is None:
                self._room.abort(row)
            else:
                self._room.publish(row, raw_sum)

    def release_rows(self, rows: Iterable[int]) -> None:
        """Give back holds."""
        with self._lock:
            self._room.unhold(rows)

    # ---- spill

    def capacity(self, tier: int) -> int | None:
        """Return a tier's budget in bytes; None for unbounded."""
        return self._shelves[tier].capacity

    def spare(self, tier: int) -> int | None:
        """Return the bytes that a tier's budget has left; None for unbounded."""
        with self._lock:
            shelf = self._shelves[tier]
            return None if shelf.capacity is None else shelf.capacity - shelf.used

    def missing_chain(self, name: RecordId, tier: int, queued: Container[int]) -> list[RecordId]:
        """Return a part and its ancestors that a tier lacks and DRAM has, deepest first.

        Ends at the first ancestor that the tier has, or that is queued for it. None at all when
        DRAM has not what would have to be written first: the tier would have a headless tail.
        """
        with self._lock:
            index = self._index
            names: list[RecordId] = []
            row = index.find(name)
            while row != NO_ROW and not index.present[row] & 1 << tier:
                if row in queued:
                    break
                if not self._room.in_dram(row):
                    return []
                names.append(index.names[row])
                row = index.parent[row]
            return names

    def gone(self, name: RecordId) -> bool:
        """Say whether a part is in no tier, nor on its way into one."""
        with self._lock:
            return not self._room.known(self._index.find(name))

    def hold_for_spill(self, name: RecordId, tier: int) -> int:
        """Hold a part in DRAM that a tier lacks, for writing it; NO_ROW when there is none."""
        with self._lock:
            row = self._index.find(name)
            if not self._room.in_dram(row) or self._index.present[row] & 1 << tier:
                return NO_ROW
            self._index.hold(row, 1)
            return row

    def unfit(self, rows: Sequence[int], tier: int) -> dict[int, str]:
        """Return those of held rows, parents first, that must not be written to a tier, and why.

        withdrawn: not in DRAM any more. headless: its parent is neither in that tier nor, before
        it, among the others.
        """
        with self._lock:
            fit: dict[int, None] = {}
            unfit: dict[int, str] = {}
            for row in rows:
                if why := self._unfit(row, tier, fit):
                    unfit[row] = why
                else:
                    fit[row] = None
            return unfit

    def written(self, row: int, tier: int, charged: int) -> str:
        """Note that a tier has taken a held part; or say why it must not be kept there, see unfit.

        Parents first: whatever the order in which the Store took them, the index never has a
        part there without its parent.
        """
        with self._lock:
            why = self._unfit(row, tier, ())
            if not why and not self._index.present[row] & 1 << tier:
                self._room.enter(row, tier, charged)
            return why

    def _unfit(self, row: int, tier: int, fit: Container[int]) -> str:
        if not self._room.in_dram(row):
            return "withdrawn"
        above = self._index.parent[row]
        headed = above == NO_ROW or above in fit or self._index.present[above] & 1 << tier
        return "" if headed else "headless"

    def leaving(self, tier: int, nbytes: int) -> list[RecordId]:
        """Return parts that DRAM would give up next for so many bytes, and that a tier lacks.

        Looks at a thousand parts at most, and changes nothing.
        """
        index, bit, names = self._index, 1 << tier, []
        with self._lock:
            for row in itertools.islice(self._shelves[DRAM].order.useful(), _PEEK_PARTS):
                if nbytes <= 0:
                    break
                nbytes -= index.raw_bytes[row]
                if not (index.holds[row] or index.present[row] & bit):
                    names.append(index.names[row])
        return names

    def describe(self, row: int) -> Described:
        """Return what a held row is, and where its bytes lie."""
        with self._lock:
            index = self._index
            above = index.parent[row]
            part = Part(
                index.names[row],
                index.names[above] if above != NO_ROW else None,
                index.depth[row],
                index.raw_bytes[row],
                index.owner[row],
                index.level[row],
            )
            namespace = self._owners.digests[part.owner]
            return Described(part, namespace, index.slot(row), index.sum_of(row))

    def tiers_of(self, row: int) -> list[int]:
        """Return the slower tiers that have the part, fastest first."""
        with self._lock:
            bits = self._index.present[row]
            return [t for t in range(1, len(self._shelves)) if bits & 1 << t]

    def stored(
        self, part: Part, tier: int, charged: int, withdrawn: Container[RecordId] = ()
    ) -> None:
        """Note that a tier has a part: found on reopening, or seen by a probe.

        withdrawn: names that were withdrawn since it was seen; such a part is passed over.
        """
        with self._lock:
            index = self._index
            if part.name in withdrawn:
                return
            row = index.ensure(part.name, part.parent, part.depth, part.nbytes, part.owner)
            if not index.present[row] & 1 << tier:
                self._room.enter(row, tier, charged)

    def lost(self, row: int, tier: int, why: str = "lost") -> bool:
        """Note that a tier does not have a part after all, or, where `why` says so, has it spoilt.

        False when it was withdrawn meanwhile, and so is no more said to be there.
        """
        with self._lock:
            there = bool(self._index.present[row] & 1 << tier)
            self._room.leave(row, tier, why)
            return there

    # ---- room

    def evict(
        self,
        tier: int,
        nbytes: Mapping[int, int],
        *,
        at_least: int = 0,
        below: Sequence[int] = (),
    ) -> list[Victim]:
        """Take leaves out of a slower tier until more bytes fit its budget, LOT at most.

        nbytes: by owner; a share that would be above its ceiling gives way itself, and otherwise
        what nobody may take from a share is left to it. at_least: parts that must leave even if
        the budget has room. below: rows for which the room is made; their parents, and so all
        their ancestors, stay. The caller asks again after a full lot, and deletes the victims
        from the Store; they can no longer be matched.
        """
        with self._lock:
            kept = self._room.hold_parents(below)
            shelf = self._shelves[tier]
            victims: list[Victim] = []
            total = share = 0
            for share, wanted in self._by_share(nbytes).items():
                rows = self._room.victims(tier, share)
                while len(victims) < LOT and self._room.over_ceiling(share, tier, wanted):
                    if not self._take_next(rows, tier, victims):
                        break
                total += wanted
                rows = self._room.victims(tier, by=share)
                while len(victims) < LOT and not shelf.has_room(total):
                    if not self._take_next(rows, tier, victims):
                        break
            rows = self._room.victims(tier, by=share)
            while len(victims) < min(at_least, LOT) and self._take_next(rows, tier, victims):
                pass
            self._metrics.add("evicted_parts", len(victims), tier=shelf.name)
            self._room.unhold(kept)
            return victims

    def clear(self, tier: int, keep: int = 0) -> list[Victim]:
        """Take what nobody holds, but `keep` parts, out of a tier, deepest first, in full LOTs."""
        with self._lock:
            shares = range(len(self._owners.quotas))
            rows = itertools.chain.from_iterable(self._room.victims(tier, one) for one in shares)
            most = max(min(len(self._shelves[tier].order) - keep, LOT), 0)
            why = "forgotten" if keep else "cleared"
            return [self._take_out(row, tier, why) for row in itertools.islice(rows, most)]

    def _by_share(self, nbytes: Mapping[int, int]) -> dict[int, int]:
        shares: dict[int, int] = {}
        for owner, count in nbytes.items():
            share = self._owners.shares[owner]
            shares[share] = shares.get(share, 0) + count
        return shares

    def over_ceilings(self, tier: int, parts: Iterable[tuple[int, int]]) -> list[bool]:
        """Say of parts, in their order, which would take their owner's share above its ceiling.

        parts: owner and bytes of each.
        """
        with self._lock:
            taken: dict[int, int] = {}
            over: list[bool] = []
            for owner, nbytes in parts:
                share = self._owners.shares[owner]
                wanted = taken.get(share, 0) + nbytes
                over.append(self._room.over_ceiling(share, tier, wanted))
                if not over[-1]:
                    taken[share] = wanted
            return over

    def _take_next(self, rows: Iterator[int], tier: int, victims: list[Victim]) -> bool:
        """Take the next row out of a tier; False when none may leave."""
        row = next(rows, NO_ROW)
        if row != NO_ROW:
            victims.append(self._take_out(row, tier))
        return row != NO_ROW

    def _take_out(self, row: int, tier: int, why: str = "evicted") -> Victim:
        victim = Victim(row, self._index.names[row], self._index.charged[tier][row])
        self._room.leave(row, tier, why)
        return victim
