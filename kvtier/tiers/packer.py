"""Packer: the verbs of a Store, with small parts packed. See ``pack`` for what a pack is.

Packing needs a Store that is shared and reads spans of a record. Where a part lies is remembered,
for the parts that were written or looked up last; of any other it is not known in which pack it
is, so it is taken for a part alone. A read of it finds nothing then, the index drops it, and the
next look-up finds the pack.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvtier.errors import Corrupt
from kvtier.identity.record import HEADER_BYTES, KEY_BYTES, Header, RecordId
from kvtier.tiers.pack import cut, longest_order, member_at, order_of, pack, pack_id
from kvtier.tiers.store import Read, Span, SpanStore, Status, Write

__all__ = ["Packer"]

_REMEMBERED: Final = 1 << 18  # parts, of about 120 bytes each
_SPAN_BYTES: Final = 4 << 20  # read by one request; a longer one is several in parallel


class _Place(NamedTuple):
    """A pack, and how many of its parts come before this one."""

    pack: RecordId
    before: int


class _Member(NamedTuple):
    """A part of a batch that lies in a pack: which of the batch, where, and its stored bytes."""

    at: int
    place: _Place
    nbytes: int


class _Pack:
    """The parts of a pack that is there, and of how many this process has no use any more."""

    __slots__ = ("gone", "members", "nbytes")

    def __init__(self, members: tuple[RecordId, ...], nbytes: int) -> None:
        self.members = members
        self.nbytes = nbytes
        self.gone: set[RecordId] = set()


class Packer:
    """Packs above one Store. Every method blocks, and may be called from several threads."""

    def __init__(self, store: SpanStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._packs: OrderedDict[RecordId, _Pack] = OrderedDict()
        self._places: dict[RecordId, _Place] = {}

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
            order = len(run).bit_length() - 1
            record = pack(members, order) if order else members[0]
            (status,) = self._store.write_many([record])
            if order and status is Status.OK:
                self.learn([each.header.id for each in members], members[0].header.stored_bytes)
            for place in run:
                out[place] = status
        return out

    def learn(self, members: Sequence[RecordId], nbytes: int) -> None:
        """Remember that there is the pack of these parts, a run, each of so many stored bytes."""
        order = len(members).bit_length() - 1
        if not order:
            return
        name = pack_id(members[-1], order)
        with self._lock:
            self._forget(name)
            self._packs[name] = _Pack(tuple(members), nbytes)
            for index, member in enumerate(members):
                self._places[member] = _Place(name, index)
            while len(self._places) > _REMEMBERED:
                self._forget(next(iter(self._packs)))

    def _forget(self, name: RecordId) -> None:
        known = self._packs.pop(name, None)
        for member in known.members if known else ():
            if (place := self._places.get(member)) is not None and place.pack == name:
                del self._places[member]

    # ---- read

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """See Store; parts that lie in packs by ranges, straight into their buffers."""
        alone: list[int] = []
        members: list[_Member] = []
        with self._lock:
            for at, name in enumerate(ids):
                place = self._places.get(name)
                if place is None:
                    alone.append(at)
                    continue
                self._packs.move_to_end(place.pack)
                members.append(_Member(at, place, self._packs[place.pack].nbytes))
        out = [Read(Status.FAILED)] * len(ids)
        reads = self._store.read_many([ids[at] for at in alone], [into[at] for at in alone])
        for at, read in zip(alone, reads, strict=True):
            out[at] = read
        fitting = [one for one in members if len(into[one.at]) >= one.nbytes]
        for at, read in self._read_members(fitting, into):
            out[at] = read
        return out

    def _read_members(
        self, members: Sequence[_Member], into: Sequence[memoryview]
    ) -> Iterator[tuple[int, Read]]:
        groups = list(_adjacent(members))
        heads = [[memoryview(bytearray(HEADER_BYTES)) for _ in group] for group in groups]
        spans = []
        for group, above in zip(groups, heads, strict=True):
            place, nbytes = group[0].place, group[0].nbytes
            buffers = [
                (head, into[one.at][:nbytes]) for head, one in zip(above, group, strict=True)
            ]
            start = member_at(place.before, order_of(place.pack), nbytes)
            spans.append(Span(place.pack, start, list(itertools.chain.from_iterable(buffers))))
        statuses = self._store.read_spans(spans) if spans else []
        for group, above, status in zip(groups, heads, statuses, strict=True):
            if status in (Status.ABSENT, Status.CORRUPT):  # or it is there otherwise packed
                with self._lock:
                    self._forget(group[0].place.pack)
            for one, head in zip(group, above, strict=True):
                yield one.at, _read_of(status, head)

    # ---- look up, delete

    def contains_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store. The names may be those of packs."""
        return self._store.contains_many(ids)

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """See Store. A part that lies in a pack takes all of that pack along, at once."""
        with self._lock:
            doomed = [(name, self._places.get(name)) for name in ids]
            for _, place in doomed:
                if place is not None:
                    self._forget(place.pack)
        packs = dict.fromkeys(place.pack for _, place in doomed if place is not None)
        names = [*packs, *dict.fromkeys(ids)]
        fates = dict(zip(names, self._store.delete_many(names), strict=True))
        return [_both(fates[name], fates[place.pack] if place else None) for name, place in doomed]

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


def _adjacent(members: Sequence[_Member]) -> Iterator[list[_Member]]:
    """Yield runs of a batch that follow each other in one pack, each of a few MiB."""
    group: list[_Member] = []
    for one in members:
        if group and not (
            one.place == _Place(group[-1].place.pack, group[-1].place.before + 1)
            and (len(group) + 1) * one.nbytes <= _SPAN_BYTES
        ):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _read_of(status: Status, head: memoryview) -> Read:
    if status is not Status.OK:
        return Read(status)
    try:
        return Read(status, Header.unpack(head))
    except Corrupt:
        return Read(Status.CORRUPT)


def _both(alone: Status, packed: Status | None) -> Status:
    """Return what became of a part that may lie in a pack, alone, or both."""
    found = (alone, packed or Status.ABSENT)
    for status in (Status.FAILED, Status.OK):
        if status in found:
            return status
    return Status.ABSENT
