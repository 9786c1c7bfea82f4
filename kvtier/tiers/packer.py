"""Packer: the verbs of a Store, with small parts packed. See ``pack`` for what a pack is.

Packing needs a Store that is shared and reads spans of a record. Where a part lies is remembered,
for the parts that were written or looked up last; of any other it is not known in which pack it
is, so it is taken for a part alone. A read of it finds nothing then, the index drops it, and the
next look-up finds the pack.

Whether a codec made the parts of a pack smaller, and where they lie then, its beginning says. A
pack of which that is not known is taken for one like the last that was looked into, and the first
one is looked into where there is a codec; where a part is not found in its place, the beginning is
read, and then the part once more.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvtier.errors import Corrupt
from kvtier.identity.record import CODEC_RAW, HEADER_BYTES, KEY_BYTES, Header, RecordId
from kvtier.tiers.coding import Coding, Written, encoded
from kvtier.tiers.pack import (
    LONGEST,
    cut,
    head_bytes,
    lengths_in,
    longest_order,
    order_of,
    pack,
    pack_id,
    pack_sized,
)
from kvtier.tiers.places import KnownPack, Member, Place, adjacent
from kvtier.tiers.store import Read, Span, SpanStore, Status, Write

__all__ = ["Packer"]

_REMEMBERED: Final = 1 << 18  # parts, of about 120 bytes each
_DELETED: Final = 1 << 16  # parts that were deleted and not written again since


class _Missed(NamedTuple):
    """A part that was not where it was looked for, and what the Store said of that place."""

    member: Member
    span: Status


class Packer:
    """Packs above one Store. Every method blocks, and may be called from several threads.

    coding: what encodes the parts, if anything does.
    """

    def __init__(self, store: SpanStore) -> None:
        self._store = store
        self.coding: Coding | None = None
        self._sized: bool | None = None  # whether any that was looked into was of version 2
        self._lock = threading.Lock()
        self._packs: OrderedDict[RecordId, KnownPack] = OrderedDict()
        self._places: dict[RecordId, Place] = {}
        self._deleted: OrderedDict[RecordId, None] = OrderedDict()

    def runs(self, records: Sequence[Write]) -> list[list[int]]:
        """Return how records are packed: the places in `records` of each run, in their order.

        A run is a chain of one part, of one length. Windows and states, whose parents are another
        part, are records alone.
        """
        chains: list[list[int]] = []
        open_chains: dict[bytes, list[int]] = {}
        for place, (header, _) in enumerate(records):
            which = header.id[KEY_BYTES:]
            chain = open_chains.get(which)
            above = records[chain[-1]].header if chain else None
            if (
                chain is None
                or above is None
                or (header.parent, header.depth) != (above.id, above.depth + 1)
                or (header.stored_bytes, header.namespace) != (above.stored_bytes, above.namespace)
            ):
                chain = open_chains[which] = []
                chains.append(chain)
            chain.append(place)
        runs: list[list[int]] = []
        for chain in chains:
            header = records[chain[0]].header
            first = header.depth
            pieces = cut(first, first + len(chain), longest_order(header.stored_bytes))
            runs += [chain[run.start - first : run.stop - first] for run in pieces]
        return sorted(runs)

    def write_many(self, records: Sequence[Write]) -> list[Status]:
        """See Store; small parts as packs. A pack's status is that of each part in it."""
        out = [Status.FAILED] * len(records)
        for run in self.runs(records):
            members = [records[place] for place in run]
            for place, one in zip(run, self._write(members), strict=True):
                out[place] = one.status
        return out

    def send(self, records: Sequence[Write]) -> list[Written]:
        """Do the same, and say how each part was written."""
        out = [Written(Status.FAILED, record.header) for record in records]
        for run in self.runs(records):
            written = self._write([records[place] for place in run])
            for place, one in zip(run, written, strict=True):
                out[place] = one
        return out

    def _write(self, members: Sequence[Write]) -> list[Written]:
        """Write a run."""
        order = len(members).bit_length() - 1
        headers = [each.header for each in members]
        nbytes = headers[0].stored_bytes
        lengths: tuple[int, ...] = ()
        record = members[0]
        if not order:
            if self.coding is not None:
                record = encoded(record, self.coding, self._store.ALIGNMENT)
                headers = [record.header]
        elif self.coding is not None and self.coding.chooses(members):
            record, headers = pack_sized(members, order, self.coding.encode)
            if any(each.codec != CODEC_RAW for each in headers):
                lengths = tuple(each.stored_bytes for each in headers)
        if order and not lengths:
            record = pack(members, order)
        if self.coding is None:
            (status,) = self._store.write_many([record])
        else:
            (status,) = self.coding.timed(self._store, [record])
        if status is Status.OK:
            names = [each.id for each in headers]
            with self._lock:
                for name in names:
                    self._deleted.pop(name, None)
            self._know(names, nbytes, lengths)
        return [Written(status, header) for header in headers]

    def learn(self, members: Sequence[RecordId], nbytes: int) -> bool:
        """Remember that there is the pack of these parts, a run, each of so many raw bytes.

        False, and nothing is remembered, if one of them was deleted here: another host has
        written it with a tail of its own, under a name that nobody here could tell then.
        """
        return self._know(members, nbytes, None)

    def _know(
        self, members: Sequence[RecordId], nbytes: int, lengths: tuple[int, ...] | None
    ) -> bool:
        order = len(members).bit_length() - 1
        name = pack_id(members[-1], order)
        with self._lock:
            if any(member in self._deleted for member in members):
                return False
            if not order:
                return True
            self._forget(name)
            self._packs[name] = KnownPack(tuple(members), nbytes, lengths)
            for index, member in enumerate(members):
                self._places[member] = Place(name, index)
            while len(self._places) > _REMEMBERED:
                self._forget(next(iter(self._packs)))
        return True

    def _forget(self, name: RecordId) -> None:
        known = self._packs.pop(name, None)
        for member in known.members if known else ():
            if (place := self._places.get(member)) is not None and place.pack == name:
                del self._places[member]

    # ---- read

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """See Store; parts that lie in packs by ranges, straight into their buffers."""
        alone, packed = self._sorted(ids)
        out = [Read(Status.FAILED)] * len(ids)
        reads = self._store.read_many([ids[at] for at in alone], [into[at] for at in alone])
        for at, read in zip(alone, reads, strict=True):
            out[at] = read
        if self._sized if self._sized is not None else self.coding is not None:
            self._look(packed, anew=False)
        missed = self._read_packed(packed, ids, into, out)
        there = [at for at, one in missed.items() if one.span is not Status.ABSENT]
        self._look({at: packed[at] for at in there}, anew=True)
        again = self._elsewhere({at: missed.pop(at) for at in there}, ids, missed)
        missed |= self._read_packed({at: packed[at] for at in again}, ids, into, out)
        with self._lock:
            for at, one in missed.items():
                if one.span is not Status.OK:  # it is gone, or there otherwise packed
                    self._forget(packed[at])
        return out

    def _sorted(self, ids: Sequence[RecordId]) -> tuple[list[int], dict[int, RecordId]]:
        """Return which of a batch lie alone, and which in what packs."""
        alone: list[int] = []
        packed: dict[int, RecordId] = {}
        with self._lock:
            for at, name in enumerate(ids):
                place = self._places.get(name)
                if place is None:
                    alone.append(at)
                else:
                    self._packs.move_to_end(place.pack)
                    packed[at] = place.pack
        return alone, packed

    def _look(self, packed: Mapping[int, RecordId], *, anew: bool) -> None:
        """Read where the parts of packs lie. anew: of those too that were looked into before."""
        names: list[RecordId] = []
        with self._lock:
            for name in dict.fromkeys(packed.values()):
                known = self._packs.get(name)
                if known is not None and (anew or known.lengths is None):
                    names.append(name)
        heads = [bytearray(head_bytes(order_of(name))) for name in names]
        spans = [Span(name, 0, [memoryview(head)]) for name, head in zip(names, heads, strict=True)]
        statuses = self._store.read_spans(spans) if spans else []
        with self._lock:
            for name, head, status in zip(names, heads, statuses, strict=True):
                known = self._packs.get(name)
                if status is Status.OK and known is not None:
                    known.lengths = lengths_in(bytes(head), order_of(name))
                    self._sized = bool(self._sized or known.lengths)

    def _elsewhere(
        self, missed: Mapping[int, _Missed], ids: Sequence[RecordId], still: dict[int, _Missed]
    ) -> list[int]:
        """Return those that lie elsewhere than they were looked for; the others are still missed.

        What was looked for, and not what was known before the look: another thread may have looked
        meanwhile.
        """
        again: list[int] = []
        with self._lock:
            for at, one in missed.items():
                place = self._places.get(ids[at])
                if place and self._packs[place.pack].member(at, place) != one.member:
                    again.append(at)
                else:
                    still[at] = one
        return again

    def _read_packed(
        self,
        packed: Mapping[int, RecordId],
        ids: Sequence[RecordId],
        into: Sequence[memoryview],
        out: list[Read],
    ) -> dict[int, _Missed]:
        """Read parts from packs; return those that were not where they were looked for."""
        members: list[Member] = []
        with self._lock:
            for at in packed:
                place = self._places.get(ids[at])
                if place is not None:
                    one = self._packs[place.pack].member(at, place)
                    if len(into[at]) >= one.nbytes:
                        members.append(one)
        missed: dict[int, _Missed] = {}
        for one, span, read in self._read_members(members, into):
            out[one.at] = read
            found = read.header is not None and read.header.id == ids[one.at]
            if not found and span is not Status.FAILED:
                missed[one.at] = _Missed(one, span)
        return missed

    def _read_members(
        self, members: Sequence[Member], into: Sequence[memoryview]
    ) -> Iterator[tuple[Member, Status, Read]]:
        groups = list(adjacent(members))
        heads = [[memoryview(bytearray(HEADER_BYTES)) for _ in group] for group in groups]
        spans = []
        for group, above in zip(groups, heads, strict=True):
            first = group[0]
            buffers = [
                (head, into[one.at][: one.nbytes]) for head, one in zip(above, group, strict=True)
            ]
            flat = list(itertools.chain.from_iterable(buffers))
            spans.append(Span(first.place.pack, first.start, flat))
        statuses = self._store.read_spans(spans) if spans else []
        for group, above, status in zip(groups, heads, statuses, strict=True):
            for one, head in zip(group, above, strict=True):
                yield one, status, _read_of(status, head)

    # ---- look up, delete

    def contains_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store. The names may be those of packs."""
        return self._store.contains_many(ids)

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store. A part takes along each pack that ends with it, or is known to have it.

        In a pack that another host wrote with another tail it may stay; but until it is written
        from here again, no such pack is taken for there (see ``learn``).
        """
        doomed: dict[RecordId, list[RecordId]] = {}
        with self._lock:
            for name in ids:
                doomed[name] = [pack_id(name, order) for order in _orders(name)]
                if (place := self._places.get(name)) is not None:
                    doomed[name].append(place.pack)
                    self._forget(place.pack)
                self._deleted[name] = None
                self._deleted.move_to_end(name)
            while len(self._deleted) > _DELETED:
                self._deleted.popitem(last=False)
        names = list(dict.fromkeys(itertools.chain.from_iterable(doomed.values())))
        fates = dict(zip(names, self._store.delete_many(names), strict=True))
        return [_worst(fates[one] for one in doomed[name]) for name in ids]

    def evict_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """Let parts go: a pack is deleted when this process has no use for any part of it."""
        whole: dict[RecordId, None] = {}
        alone: list[RecordId] = []
        with self._lock:
            for name in ids:
                place = self._places.get(name)
                if place is None:
                    alone.append(name)
                    continue
                known = self._packs[place.pack]
                known.gone.add(name)
                if len(known.gone) == len(known.members):
                    whole[place.pack] = None
            for pack_name in whole:
                self._forget(pack_name)
        names = [*whole, *alone]
        fates = dict(zip(names, self._store.delete_many(names), strict=True)) if names else {}
        return [fates.get(name, Status.OK) for name in ids]

    @property
    def residue(self) -> int:
        """How many parts are still in packs although this process let them go."""
        with self._lock:
            return sum(len(known.gone) for known in self._packs.values())


def _read_of(status: Status, head: memoryview) -> Read:
    if status is not Status.OK:
        return Read(status)
    try:
        return Read(status, Header.unpack(head))
    except Corrupt:
        return Read(Status.CORRUPT)


def _orders(name: RecordId) -> range:
    """Return the orders of the records that may end with a part; of a pack, its own."""
    own = order_of(name)
    return range(own, own + 1) if own else range(LONGEST + 1)


def _worst(fates: Iterable[Status]) -> Status:
    """Return what became of a part that may lie in several records."""
    found = set(fates)
    for status in (Status.FAILED, Status.OK):
        if status in found:
            return status
    return Status.ABSENT
