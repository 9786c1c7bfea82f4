"""Places: where parts lie in packs, as far as this process knows, in bounded memory."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kvtier.identity.record import KEY_BYTES, RecordId
from kvtier.tiers.pack import lengths_in, member_at, order_of, sized_at

_REMEMBERED: Final = 1 << 18  # parts of packs, with names 50 MB; 120 MB if all are of two
_DELETED: Final = 1 << 16  # parts that were deleted and not written again since
_AGAIN: Final = 256  # packs of which one eviction tries the deletion again
_SPAN_BYTES: Final = 4 << 20  # read by one request; a longer one is several in parallel


class Place(NamedTuple):
    """A pack, and how many of its parts come before this one."""

    pack: RecordId
    before: int


class Member(NamedTuple):
    """A part of a batch that lies in a pack: which of the batch, where, and its stored bytes.

    total: the stored bytes of a pack in which it lies there.
    """

    at: int
    place: Place
    start: int
    nbytes: int
    total: int


class _Known:
    """A pack that is there: its parts, and of which of them this process has no use there.

    lengths: of its parts, none for one of version 1; None as long as nobody has looked. total: its
    stored bytes, if it is as it is taken to be.
    """

    __slots__ = ("gone", "lengths", "members", "nbytes", "order", "total")

    def __init__(
        self, members: tuple[RecordId, ...], nbytes: int, lengths: tuple[int, ...] | None
    ) -> None:
        self.members = members
        self.order = len(members).bit_length() - 1
        self.nbytes = nbytes
        self.gone: set[RecordId] = set()
        self.lay(lengths)

    def lay(self, lengths: tuple[int, ...] | None) -> None:
        """Take it that its parts have these lengths."""
        self.lengths = lengths
        count, order = len(self.members), self.order
        self.total = (
            sized_at(count, order, lengths) if lengths else member_at(count, order, self.nbytes)
        )

    def member(self, at: int, place: Place) -> Member:
        """Return where a part lies; of a pack that nobody has looked into, as in version 1."""
        order, before = self.order, place.before
        if self.lengths:
            start = sized_at(before, order, self.lengths)
            return Member(at, place, start, self.lengths[before], self.total)
        return Member(at, place, member_at(before, order, self.nbytes), self.nbytes, self.total)


class Places:
    """Of one tier. Safe from any thread; nothing blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._packs: OrderedDict[RecordId, _Known] = OrderedDict()
        self._places: dict[RecordId, Place] = {}
        # The packs in which a part lies too, and how many come before it there.
        self._others: dict[RecordId, dict[RecordId, int]] = {}
        self._remembered = 0  # parts, counted in each of their packs
        self._deleted: OrderedDict[RecordId, None] = OrderedDict()
        self._residue = 0
        self._overdue: dict[RecordId, None] = {}  # packs that were let go, and are not deleted
        self._sized = False  # whether any that was looked into or written was of version 2

    # ---- what is there

    def written(
        self, name: RecordId, members: Sequence[RecordId], nbytes: int, lengths: tuple[int, ...]
    ) -> None:
        """Take it that there is that record of these parts."""
        with self._lock:
            for member in members:
                self._deleted.pop(member, None)
            if len(members) > 1:
                self._put(name, members, nbytes, lengths)

    def learned(self, name: RecordId, members: Sequence[RecordId], nbytes: int) -> bool:
        """Take the same of a pack of another host, if none of its parts was deleted here."""
        with self._lock:
            if any(member in self._deleted for member in members):
                return False
            if len(members) > 1:
                self._put(name, members, nbytes, None)
            return True

    def _put(
        self,
        name: RecordId,
        members: Sequence[RecordId],
        nbytes: int,
        lengths: tuple[int, ...] | None,
    ) -> None:
        self._forget(name)
        self._packs[name] = _Known(tuple(members), nbytes, lengths)
        self._sized |= bool(lengths)
        self._remembered += len(members)
        for index, member in enumerate(members):
            if (place := self._places.get(member)) is not None:
                self._others.setdefault(member, {})[place.pack] = place.before
            self._places[member] = Place(name, index)
        while self._remembered > _REMEMBERED:
            self._forget(next(iter(self._packs)))

    def forget(self, pack: RecordId) -> None:
        """Take it that a pack is not there."""
        with self._lock:
            self._forget(pack)

    def _forget(self, pack: RecordId) -> None:
        known = self._packs.pop(pack, None)
        if known is None:
            return
        self._residue -= len(known.gone)
        self._remembered -= len(known.members)
        for member in known.members:
            others = self._others.get(member, {})
            if self._places[member].pack != pack:
                del others[pack]
            elif others:
                self._places[member] = Place(*others.popitem())
            else:
                del self._places[member]
            if not others:
                self._others.pop(member, None)

    def _unused(self, pack: RecordId) -> bool:
        """Say whether a pack is known of which this process has no use for any part."""
        known = self._packs.get(pack)
        return known is not None and len(known.gone) == len(known.members)

    # ---- where it lies

    def packs(self, ids: Sequence[RecordId]) -> dict[int, RecordId]:
        """Return in which packs those of a batch lie that lie in one."""
        with self._lock:
            places = map(self._places.get, ids)
            found = {at: place.pack for at, place in enumerate(places) if place is not None}
            for pack in dict.fromkeys(found.values()):
                self._packs.move_to_end(pack)
        return found

    def total(self, pack: RecordId) -> int:
        """Return the stored bytes of a pack; 0 if it is not known."""
        with self._lock:
            known = self._packs.get(pack)
            return known.total if known is not None else 0

    def members(self, ats: Iterable[int], ids: Sequence[RecordId]) -> list[Member]:
        """Return where those of a batch lie that lie in packs."""
        with self._lock:
            return [
                self._packs[place.pack].member(at, place)
                for at in ats
                if (place := self._places.get(ids[at])) is not None
            ]

    def unseen(self, packs: Iterable[RecordId]) -> list[RecordId]:
        """Return the packs that are to be looked into before they are read.

        Those of whose form nothing is known, once any has been met that was of version 2. Until
        then a pack is taken for one of version 1: one that is not costs a request in vain.
        """
        with self._lock:
            if not self._sized:
                return []
            known = {name: self._packs.get(name) for name in packs}
            return [name for name, one in known.items() if one and one.lengths is None]

    def seen(self, pack: RecordId, head: bytes) -> bool:
        """Note the first ``head_bytes`` of a pack; say whether its table has the parts known."""
        order = order_of(pack)
        with self._lock:
            known = self._packs.get(pack)
            if known is None:
                return False
            known.lay(lengths_in(head, order))
            self._sized |= bool(known.lengths)
            keys = b"".join(member[:KEY_BYTES] for member in known.members)
            return head[: KEY_BYTES << order] == keys

    # ---- what goes

    def deleted(self, ids: Sequence[RecordId]) -> list[list[RecordId]]:
        """Remember that parts are deleted; return the packs in which each lies.

        These stay known until they are gone, or who tries again would not find them.
        """
        with self._lock:
            for name in ids:
                self._deleted[name] = None
                self._deleted.move_to_end(name)
            while len(self._deleted) > _DELETED:
                self._deleted.popitem(last=False)
            return [self._holding(name) for name in ids]

    def let_go(self, ids: Sequence[RecordId]) -> list[list[RecordId]]:
        """Return what is to be deleted for each, as this process has no use for it any more.

        For a part that lies in packs, those of which it needs no part. These stay known until they
        are gone.
        """
        with self._lock:
            held = [self._holding(name) for name in ids]
            for name, packs in zip(ids, held, strict=True):
                for pack in packs:
                    known = self._packs[pack]
                    self._residue += name not in known.gone
                    known.gone.add(name)
            return [
                list(filter(self._unused, packs)) if packs else [name]
                for name, packs in zip(ids, held, strict=True)
            ]

    def overdue(self) -> list[RecordId]:
        """Return packs that were let go before and whose deletion is to be tried again."""
        with self._lock:
            self._overdue = dict.fromkeys(filter(self._unused, self._overdue))
            return list(itertools.islice(self._overdue, _AGAIN))

    def stayed(self, packs: Iterable[RecordId]) -> None:
        """Take it that packs that were let go are not deleted."""
        with self._lock:
            self._overdue |= dict.fromkeys(filter(self._unused, packs))

    def ended(self, packs: Iterable[RecordId]) -> None:
        """Forget packs that were let go and are deleted; none that was written or met meanwhile."""
        with self._lock:
            for pack in filter(self._unused, packs):
                self._forget(pack)

    def _holding(self, member: RecordId) -> list[RecordId]:
        """Return all packs that are known to have a part."""
        place = self._places.get(member)
        return [place.pack, *self._others.get(member, ())] if place is not None else []

    @property
    def residue(self) -> int:
        """How many parts are still in packs although this process let them go."""
        return self._residue


def adjacent(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Yield runs of a batch that follow each other in one pack, each of a few MiB."""
    group: list[Member] = []
    size, pack, follows = 0, b"", 0
    for one in members:
        size += one.nbytes
        if group and not (
            one.place.before == follows and one.place.pack == pack and size <= _SPAN_BYTES
        ):
            yield group
            group, size = [], one.nbytes
        group.append(one)
        pack, follows = one.place.pack, one.place.before + 1
    if group:
        yield group
