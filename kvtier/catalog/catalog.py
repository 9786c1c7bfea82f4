"""The Catalog: which part is where, who holds it, and what leaves to make room.

All calls touch memory only, under one lock, for microseconds; they may come from any thread.
What waits (reading, writing, hashing) is done by fetch and spill, which call back here to
publish. Nothing is visible before its bytes are whole, and nothing held is ever given away.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvtier.catalog.below import LOT, Part, Victim
from kvtier.catalog.explain import ChunkPlace, Glance
from kvtier.catalog.filling import Parts, fill
from kvtier.catalog.gone import Gone
from kvtier.catalog.index import DRAM, NO_ROW
from kvtier.catalog.lease import Lease, Leases, LeaseState
from kvtier.catalog.owners import Owners, Quota
from kvtier.catalog.removal import Removal
from kvtier.catalog.shelf import Room, Shelf, Victims
from kvtier.catalog.usable import leasable, usable_tokens
from kvtier.clock import Clock
from kvtier.errors import MisuseError
from kvtier.identity.record import RecordId
from kvtier.identity.shape import Shape
from kvtier.memory.arena import Arena, Slot
from kvtier.metrics import Metrics

__all__ = ["LOT", "Catalog", "Found", "Part", "Parts", "Shelf", "Victim"]


class Found(NamedTuple):
    """What a match found: usable tokens, the tier of each chunk that they need, chunks known.

    tiers: the slowest that one of the chunk's needed parts has to come from. chunks: those, from
    the first, that have what every chunk needs, usable or not.
    """

    tokens: int
    tiers: list[int]
    chunks: int


class Catalog(Removal):
    """Index, arena and leases behind one lock.

    silent: returns the bits of the tiers that would not be asked now. What only they have is no
    hit, and may be saved anew, so that DRAM does its work without them.
    """

    def __init__(
        self,
        arena: Arena,
        shelves: Sequence[Shelf],
        clock: Clock,
        metrics: Metrics,
        quotas: Mapping[str, Quota] | None = None,
    ) -> None:
        super().__init__(Room(arena, shelves, metrics, Owners(quotas), Gone(clock)), clock, metrics)
        self.silent: Callable[[], int] = _nobody
        self._pid = os.getpid()
        self._leases = Leases(self._room, clock, metrics)

    def owner(self, digest: bytes, tenant: str | None = None) -> int:
        """Return the number of a namespace. tenant: its own, where that is known."""
        with self._lock:
            number = self._owners.number(digest)
            if tenant is not None:
                self._room.assign(number, self._owners.share_of(tenant))
            return number

    def stored_many(self, parts: Parts, tier: int) -> None:
        """Do as ``stored`` would for each of many parts, heads first; at reopening, all at once.

        Holds the lock as long as that takes.
        """
        with self._lock:
            left = fill(self._room, parts, tier)
        for at in left:
            self.stored(parts.part(at), tier, int(parts.charged[at]))

    # ---- match

    def match(self, names: Sequence[Sequence[RecordId]], shape: Shape, limit: int) -> Found:
        """Return the longest usable prefix, at most `limit` tokens, and where its parts are.

        names: for each chunk the names of its parts. What the prefix needs counts as used.
        """
        with self._lock:
            return (
                self._match_plain(names, shape, limit)
                if shape.plain
                else (self._match_hybrid(names, shape, limit))
            )

    def _match_plain(self, names: Sequence[Sequence[RecordId]], shape: Shape, limit: int) -> Found:
        """Match where every chunk needs all its parts: one pass, which ends at the first gap."""
        rows, bits = self._index.known(itertools.chain.from_iterable(names))
        if silent := self.silent():
            bits = list(itertools.takewhile(bool, (one & ~silent for one in bits)))
            del rows[len(bits) :]
        fastest = {one: (one & -one).bit_length() - 1 for one in set(bits)}
        each = map(fastest.__getitem__, bits)
        parts = len(names[0]) if names else 1
        tiers = list(map(max, zip(*[each] * parts, strict=False)))
        self._room.touch(rows)
        size, block = shape.chunk_tokens, shape.block_tokens
        tokens = min(len(tiers) * size, limit // block * block)
        return Found(tokens, tiers[: -(-tokens // size)], len(tiers))

    def _match_hybrid(self, names: Sequence[Sequence[RecordId]], shape: Shape, limit: int) -> Found:
        find, present, audible = self._index.find, self._index.present, ~self.silent()

        def has(chunk: int, at: int) -> bool:
            row = find(names[chunk][at])
            return row != NO_ROW and bool(present[row] & audible)

        tokens, chunks = usable_tokens(shape, len(names), limit, has)
        rows: list[int] = []
        tiers: list[int] = []
        for chunk in range(-(-tokens // shape.chunk_tokens)):
            slowest = 1
            for at in shape.needed(tokens, chunk):
                row = find(names[chunk][at])
                bits = present[row] & audible
                slowest = max(slowest, bits & -bits)
                rows.append(row)
            tiers.append(slowest.bit_length() - 1)
        self._room.touch(rows)
        return Found(tokens, tiers, chunks)

    # ---- leases

    def lease(
        self,
        names: Sequence[Sequence[RecordId]],
        shape: Shape,
        first: int,
        tokens: int,
        seconds: float,
        *,
        whole: bool,
        pin: int = 0,
    ) -> Lease | None:
        """Hold the slots of what a prefix needs of the chunks from `first` on, all in DRAM.

        tokens: the prefix's length. not whole: where DRAM has not all of it, the longest shorter
        one. pin: see Lease. None when there is none beyond the first `first` chunks, or pins
        would hold too much.
        """
        with self._lock:
            usable, rows = leasable(self._index, names, shape, first, tokens)
            if usable <= first * shape.chunk_tokens or (whole and usable < tokens):
                return None
            held = shape.select(names, first, usable)
            return self._leases.new(first, usable, held, rows, seconds, self, pin)

    def may_pin(
        self, names: Sequence[Sequence[RecordId]], shape: Shape, first: int, tokens: int
    ) -> bool:
        """Say whether pins have room for what a prefix needs of the chunks from `first` on."""
        with self._lock:
            parts = (
                (self._index.find(names[chunk][at]), shape.nbytes[at])
                for chunk in range(first, -(-tokens // shape.chunk_tokens))
                for at in shape.needed(tokens, chunk)
            )
            fits = self._leases.pins.fit(parts)
            if not fits:
                self._metrics.add("refused_pins")
            return fits

    def unpin(self, pinned: int) -> None:
        """End all pins of one cache."""
        with self._lock:
            self._leases.unpin(pinned)

    def issue(self, lease: Lease, owner: int) -> bool:
        """Note that a CopyPlan of the lease goes out; False when its deadline has passed.

        Raises MisuseError for a lease of another catalog, or of another namespace than `owner`.
        """
        with self._lock:
            self._leases.expire()
            if lease.state is not LeaseState.HELD:
                return False
            mine = self._leases.keeps(lease)  # another's rows are not rows here
            row = next(iter(lease.rows), NO_ROW) if mine else NO_ROW
            its = owner if row == NO_ROW else self._index.owner[row]
            if not mine or its != owner:
                raise MisuseError("this lease is of another cache; each plans its own")
            lease.plans += 1
            return True

    def settle(self, lease: Lease) -> None:
        """Note that a plan's copies have ended everywhere; may free what the lease held."""
        with self._lock:
            if lease.plans < 1:
                raise MisuseError("a plan settled that was not issued")
            lease.plans -= 1
            self._leases.drop(lease)

    def expire(self) -> int:
        """End leases whose deadline has passed; return how many are left."""
        with self._lock:
            self._leases.expire()
            self._room.settle_touches(1)
            return len(self._leases)

    def rest(self) -> bool:
        """Mark one chain that was used, while nobody waits; say whether there are more."""
        with self._lock:
            self._room.settle_touches(1)
            return self._room.behind

    def end_lease(self, lease: Lease) -> None:
        """See ``Lease.release``."""
        self._check_process()
        with self._lock:
            self._leases.end(lease, LeaseState.RELEASED)

    def renew_lease(self, lease: Lease, seconds: float) -> bool:
        """See ``Lease.renew``."""
        self._check_process()
        with self._lock:
            return self._leases.renew(lease, seconds)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:  # before the lock, which another thread may have held
            raise MisuseError("a lease does not cross fork; its parent holds it")

    # ---- reserve, commit, abort

    def reserve(self, chunks: Sequence[Sequence[Part]]) -> tuple[list[tuple[Part, Slot]], int]:
        """Hand out slots for the parts of chunks that cannot be had yet, evicting leaves.

        A part that exists or is being written needs none: a chunk of which some parts have left
        gets the others. Of the priorities and ends that such a part was saved with, the higher
        and the later hold. Stops at the first chunk of which a part's parent is nowhere, or for
        which not enough can be evicted; ancestors and the chunks' own parts are not.
        Returns the parts with their slots, and how many chunks stay incomplete.
        """
        with self._lock:
            self._leases.expire()
            room, find, audible = self._room, self._index.find, ~self.silent()
            for part in itertools.chain.from_iterable(chunks):
                self._keep(part)

            def lacks(part: Part) -> bool:
                return not room.obtainable(find(part.name), audible)

            places = [place for place, chunk in enumerate(chunks) if any(map(lacks, chunk))]
            if not places:
                return [], 0
            lacking = [chunks[place] for place in places]
            onward = chunks[places[0] :]
            needed = (name for chunk in onward for part in chunk for name in part[:2] if name)
            kept = room.hold_names(needed)
            victims = Victims(room, lacking[0][0].owner, [])
            taken: list[tuple[Part, Slot]] = []
            count = 0
            ends: Sequence[Part] = ()
            for chunk in lacking:
                parts = [part for part in chunk if lacks(part)]
                slots = self._reserve(parts, kept, victims)
                if len(slots) < len(parts):
                    break
                taken += zip(parts, slots, strict=True)
                count, ends = count + 1, chunk
            # Or what a long answer adds would be as old as its beginning.
            line = [row for end in ends for row in self._index.line(find(end.name))]
            room.touch(line, again=True)
            for part in itertools.chain.from_iterable(lacking[count:]):
                room.gone.note(part.name, "busy")  # of one that is there, nobody asks
            room.unhold(kept)
            return taken, len(lacking) - count

    def _reserve(self, parts: Sequence[Part], kept: list[int], victims: Victims) -> list[Slot]:
        """Reserve all of some parts of one chunk, or none."""
        index = self._index
        rows: list[int] = []
        for part in parts:
            known = part.parent is None or self._room.known(index.find(part.parent))
            slot = self._room.slot_for(part.nbytes, kept, victims) if known else None
            if slot is None:
                for row in rows:
                    self._room.abort(row)
                return []
            row = index.ensure(part.name, part.parent, part.depth, part.nbytes, part.owner)
            self._begin(row, part)
            self._room.take(row, slot)
            rows.append(row)
        return [index.slot(row) for row in rows]

    def commit(self, name: RecordId, slot: Slot, raw_sum: bytes) -> bool:
        """Publish a reserved part whose bytes are whole.

        False, and the slot is taken back, when its parent is gone (it would be a headless tail)
        or it was withdrawn meanwhile.
        """
        with self._lock:
            row = self._room.reserved(name, slot)
            above = self._index.parent[row]
            if above != NO_ROW and not self._index.present[above]:
                self._room.abort(row)
                self._room.gone.note(name, "orphan")
                return False
            return self._room.publish(row, raw_sum)

    def abort(self, name: RecordId, slot: Slot, why: str = "copy") -> None:
        """Take back a reserved slot whose bytes never became whole."""
        with self._lock:
            self._room.abort(self._room.reserved(name, slot))
            self._room.gone.note(name, why)

    def outgrown(self, names: Iterable[RecordId]) -> None:
        """Let parts leave first that lie outside every window now, until they are used again."""
        with self._lock:
            for name in names:
                self._room.settle_touches()  # or a use before this would count as one after it
                row = self._index.find(name)
                for tier, shelf in enumerate(self._shelves):
                    if row != NO_ROW and self._index.present[row] & 1 << tier:
                        shelf.order.expend(row)

    # ---- the arena

    def cut_for(self, part_bytes: Sequence[int]) -> None:
        """See ``Arena.cut_for``."""
        with self._lock:
            self._room.arena.cut_for(part_bytes)

    def give_back(self, slots: Iterable[Slot]) -> None:
        """Free slots of no part: those that an earlier catalog of this arena handed out."""
        with self._lock:
            for slot in slots:
                self._room.arena.free(slot)

    # ---- explain, figures

    def places(
        self, names: Sequence[Sequence[RecordId]], labels: Sequence[str], shape: Shape, first: int
    ) -> list[ChunkPlace]:
        """Return where the parts of chunks from `first` on are. Nothing counts as used.

        labels: of the parts of a chunk.
        """
        with self._lock:
            now, silent, size = self._clock(), self.silent(), shape.chunk_tokens
            glance = Glance(self._room, self._leases.pins, silent, now)
            return [
                ChunkPlace(
                    chunk,
                    chunk * size,
                    (chunk + 1) * size,
                    tuple(map(glance.at, parts, labels)),
                )
                for chunk, parts in enumerate(names, first)
            ]

    def figures(self) -> None:
        """Set the gauges."""
        with self._lock:
            index, metrics = self._index, self._metrics
            for number, shelf in enumerate(self._shelves):
                used = self._room.arena.used_bytes if number == DRAM else shelf.used
                metrics.set("tier_used_bytes", used, tier=shelf.name)
                metrics.set("tier_parts", len(shelf.order), tier=shelf.name)
                if shelf.capacity is not None:
                    metrics.set("tier_capacity_bytes", shelf.capacity, tier=shelf.name)
            for share, tenant in enumerate(self._owners.tenants[1:], 1):
                for shelf in self._shelves:
                    used = shelf.used_by[share]
                    metrics.set("tenant_used_bytes", used, tenant=tenant, tier=shelf.name)
            metrics.set("leased_parts", index.held_rows)
            metrics.set("pinned_parts", len(self._leases.pins))
            metrics.set("quarantined_slots", self._leases.quarantined)
            metrics.set("orphan_parts", index.orphans)


def _nobody() -> int:
    return 0
