"""Packer: the verbs of a Store, with small parts packed. See ``pack`` for what a pack is.

Packing needs a Store that is shared and reads spans of a record. Where a part lies is remembered,
for the parts that were written or looked up last; of any other it is not known in which pack it
is, so it is taken for a part alone. A read of it finds nothing then, the index drops it, and the
next look-up finds the pack.

Whether a codec made the parts of a pack smaller, and where they lie then, its beginning says. As
long as all packs that were looked into were as they are without a codec, the next one is taken for
one of these. A pack of another length is not read so: its beginning is, and then the part.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvtier.errors import Corrupt
from kvtier.identity.record import CODEC_RAW, HEADER_BYTES, KEY_BYTES, Header, RecordId
from kvtier.tiers.coding import Coding, Written, encoded
from kvtier.tiers.mending import Mending
from kvtier.tiers.pack import (
    LONGEST,
    cut,
    head_bytes,
    is_newer,
    longest_order,
    order_of,
    pack,
    pack_id,
    pack_sized,
    repack,
)
from kvtier.tiers.places import Member, Places, adjacent
from kvtier.tiers.store import Read, Span, SpanStore, Status, Store, Write


def packer_for(store: Store, mending: Mending, coding: Coding | None) -> Packer | None:
    """Return what packs small parts in a Store, None where they lie alone."""
    if not store.capabilities.shared or not isinstance(store, SpanStore):
        return None
    packer = Packer(store, mending)
    packer.coding = coding
    return packer


class _Seen(enum.Enum):
    """What was found where a pack should be."""

    SOUND = enum.auto()  # its table has the parts that it should
    OTHER = enum.auto()
    NEWER = enum.auto()


class Packer:
    """Packs above one Store. Every method blocks, and may be called from several threads.

    coding: what encodes the parts, if anything does. mending: what is to be written anew.
    """

    def __init__(self, store: SpanStore, mending: Mending | None = None) -> None:
        self._store = store
        self._mending = mending or Mending(store)
        self.coding: Coding | None = None
        self.places = Places()

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
        return [one.status for one in self.send(records)]

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
        headers = [each.header for each in members]
        names = [each.id for each in headers]
        if self._mending.leaves([pack_id(names[-1], len(names).bit_length() - 1)]):
            return [Written(Status.NEWER, header) for header in headers]
        if self._mend(dict(zip(names, members, strict=True))):
            return [Written(Status.OK, header) for header in headers]
        cleared = self._mending.clear(names)
        if cleared is None:
            return [Written(Status.FAILED, header) for header in headers]
        for name in cleared:
            self.places.forget(name)
        record, headers = self._packed(members)
        status = self._put(record, headers)
        return [Written(status, header) for header in headers]

    def _mend(self, anew: Mapping[RecordId, Write]) -> bool:
        """Write packs anew in which these parts are spoilt, so that their other parts stay.

        Says whether all of these parts are mended by that. A pack that cannot be read whole, or is
        of this very run, is left as it is.
        """
        mended = 0
        own = pack_id(list(anew)[-1], len(anew).bit_length() - 1)
        for name, parts in self._mending.spoilt(anew).items():
            whole = memoryview(bytearray(self.places.total(name)))
            if not whole or name == own:
                continue
            (read,) = self._store.read_many([name], [whole])
            again = {part: anew[part] for part in parts}
            found = repack(Write(read.header, whole), again) if read.header is not None else None
            if found is None or self._mending.clear(parts) is None:
                continue
            if self._put(*found) is Status.OK:
                mended += len(parts)
            else:
                self.places.forget(name)
        return mended == len(anew)

    def _put(self, record: Write, headers: Sequence[Header]) -> Status:
        """Write a record, and remember where its parts lie."""
        if self.coding is None:
            (status,) = self._store.write_many([record])
        else:
            (status,) = self.coding.timed(self._store, [record])
        if status is Status.OK:
            sized = any(each.codec != CODEC_RAW for each in headers)
            lengths = tuple(each.stored_bytes for each in headers) if sized else ()
            names = [each.id for each in headers]
            self.places.written(record.header.id, names, headers[0].raw_bytes, lengths)
        elif status is Status.NEWER:
            self._mending.leave(record.header.id)
        return status

    def _packed(self, members: Sequence[Write]) -> tuple[Write, list[Header]]:
        """Return the record of a run, encoded where that pays, and the headers of its parts."""
        order = len(members).bit_length() - 1
        if not order:
            (record,) = members
            if self.coding is not None:
                record = encoded(record, self.coding, self._store.ALIGNMENT)
            return record, [record.header]
        if self.coding is not None and self.coding.chooses(members):
            record, headers = pack_sized(members, order, self.coding.encode)
            if any(each.codec != CODEC_RAW for each in headers):
                return record, headers
        return pack(members, order), [each.header for each in members]

    def learn(self, members: Sequence[RecordId], nbytes: int) -> bool:
        """Remember that there is the pack of these parts, a run, each of so many raw bytes.

        False, and nothing is remembered, if one of them was deleted here: another host has
        written it with a tail of its own, under a name that nobody here could tell then.
        """
        name = pack_id(members[-1], len(members).bit_length() - 1)
        return self.places.learned(name, members, nbytes)

    # ---- read

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """See Store; parts that lie in packs by ranges, straight into their buffers."""
        return self.fetch(ids, into)[0]

    def fetch(
        self, ids: Sequence[RecordId], into: Sequence[memoryview]
    ) -> tuple[list[Read], list[RecordId | None]]:
        """Do the same, and say from which record each was read: that of its name, or a pack.

        None where that is no pack of these parts. Where a part lies may be known otherwise by then.
        """
        out = [Read(Status.FAILED)] * len(ids)
        records: list[RecordId | None] = list(ids)
        packed = self.places.packs(ids)
        alone = [at for at in range(len(ids)) if at not in packed]
        reads = self._store.read_many([ids[at] for at in alone], [into[at] for at in alone])
        for at, read in zip(alone, reads, strict=True):
            out[at] = read
        self._fetch_packed(packed, ids, into, out, records)
        return out, records

    def _fetch_packed(
        self,
        packed: Mapping[int, RecordId],
        ids: Sequence[RecordId],
        into: Sequence[memoryview],
        out: list[Read],
        records: list[RecordId | None],
    ) -> None:
        """Read parts from packs; what is not where it was known to be, once more from elsewhere."""
        newer = _newer(self._look(self.places.unseen(packed.values())))
        known = self.places.members(packed, ids)
        missed = self._read([one for one in known if one.place.pack not in newer], ids, into, out)
        there = [one for one, status in missed.items() if status is not Status.ABSENT]
        looked = self._look([one.place.pack for one in there])
        newer |= _newer(looked)
        # What was looked for, and not what was known before the look: others look, too.
        found = self.places.members([one.at for one in there], ids)
        moved = [one for one in found if one not in missed and one.place.pack not in newer]
        for one in itertools.chain(known, moved):
            records[one.at] = one.place.pack
        elsewhere = {one.at for one in moved}
        missed = {one: status for one, status in missed.items() if one.at not in elsewhere}
        missed |= self._read(moved, ids, into, out)
        for one, status in missed.items():
            pack = one.place.pack
            if looked.get(pack) is not _Seen.SOUND:
                records[one.at] = None
            if status is not Status.OK or looked.get(pack) is _Seen.OTHER:
                self.places.forget(pack)  # it is gone, or no pack of these parts
        for one in known:
            if one.place.pack in newer:
                out[one.at], records[one.at] = Read(Status.NEWER), one.place.pack
                self.places.forget(one.place.pack)

    def _look(self, packs: Iterable[RecordId]) -> dict[RecordId, _Seen]:
        """Read the headers of packs, and where their parts lie; say what was found of which."""
        names = list(dict.fromkeys(packs))
        sizes = [HEADER_BYTES + head_bytes(order_of(name)) for name in names]
        rooms = [memoryview(bytearray(size)) for size in sizes]
        spans = [Span(name, -HEADER_BYTES, [room]) for name, room in zip(names, rooms, strict=True)]
        statuses = self._store.read_spans(spans) if spans else []
        looked: dict[RecordId, _Seen] = {}
        for name, room, status in zip(names, rooms, statuses, strict=True):
            if status is Status.OK and is_newer(room):
                looked[name] = _Seen.NEWER
            elif status is Status.OK:
                sound = self.places.seen(name, bytes(room[HEADER_BYTES:]))
                looked[name] = _Seen.SOUND if sound else _Seen.OTHER
        return looked

    def _read(
        self,
        members: Sequence[Member],
        ids: Sequence[RecordId],
        into: Sequence[memoryview],
        out: list[Read],
    ) -> dict[Member, Status]:
        """Read parts from packs into `out`.

        Returns those that were not where they were looked for, and what the Store said of that.
        """
        missed: dict[Member, Status] = {}
        fitting = [one for one in members if len(into[one.at]) >= one.nbytes]
        for one, span, read in self._read_members(fitting, into):
            out[one.at] = read
            found = read.header is not None and read.header.id == ids[one.at]
            if not found and span is not Status.FAILED:
                missed[one] = span
        return missed

    def _read_members(
        self, members: Sequence[Member], into: Sequence[memoryview]
    ) -> Iterator[tuple[Member, Status, Read]]:
        groups = list(adjacent(members))
        heads = [_heads(len(group)) for group in groups]
        spans = []
        for group, above in zip(groups, heads, strict=True):
            first = group[0]
            flat: list[memoryview] = []
            for head, one in zip(above, group, strict=True):
                flat += head, into[one.at][: one.nbytes]
            spans.append(Span(first.place.pack, first.start, flat, first.total))
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
        for name, packs in zip(ids, self.places.deleted(ids), strict=True):
            doomed[name] = [*(pack_id(name, order) for order in _orders(name)), *packs]
        fates = self._delete(doomed.values())
        for one, fate in fates.items():
            if fate is not Status.FAILED:
                self.places.forget(one)
        return [_worst(fates[one] for one in doomed[name]) for name in ids]

    def evict_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """Let parts go: a pack is deleted when this process has no use for any part of it.

        What became of it is said of each of these that was in it; of others in packs, OK. One that
        was not deleted is tried again with the next parts.
        """
        overdue = self.places.overdue()
        doomed = self.places.let_go(ids)
        fates = self._delete([*doomed, overdue])
        self.places.ended(one for one, fate in fates.items() if fate is not Status.FAILED)
        self.places.stayed(one for one, fate in fates.items() if fate is Status.FAILED)
        return [_worst(fates[one] for one in some) if some else Status.OK for some in doomed]

    def _delete(self, lots: Iterable[Iterable[RecordId]]) -> dict[RecordId, Status]:
        """Delete all records of these, and say what became of each."""
        names = list(dict.fromkeys(itertools.chain.from_iterable(lots)))
        statuses = self._store.delete_many(names) if names else []
        return dict(zip(names, statuses, strict=True))


def _heads(count: int) -> list[memoryview]:
    """Return room for so many headers, which lie together: one piece of memory for all."""
    room = memoryview(bytearray(HEADER_BYTES * count))
    return [room[at : at + HEADER_BYTES] for at in range(0, len(room), HEADER_BYTES)]


def _newer(looked: Mapping[RecordId, _Seen]) -> set[RecordId]:
    return {name for name, seen in looked.items() if seen is _Seen.NEWER}


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
