"""Places: where parts lie in packs, as far as it is known. Values, without a lock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvtier.identity.record import RecordId
from kvtier.tiers.pack import member_at, order_of, sized_at

__all__ = ["KnownPack", "Member", "Place", "adjacent"]

_SPAN_BYTES: Final = 4 << 20  # read by one request; a longer one is several in parallel


class Place(NamedTuple):
    """A pack, and how many of its parts come before this one."""

    pack: RecordId
    before: int


class Member(NamedTuple):
    """A part of a batch that lies in a pack: which of the batch, where, and its stored bytes."""

    at: int
    place: Place
    start: int
    nbytes: int


class KnownPack:
    """The parts of a pack that is there, and of how many this process has no use any more.

    lengths: of its parts, none for one of version 1; None as long as nobody has looked.
    """

    __slots__ = ("gone", "lengths", "members", "nbytes")

    def __init__(
        self, members: tuple[RecordId, ...], nbytes: int, lengths: tuple[int, ...] | None
    ) -> None:
        self.members = members
        self.nbytes = nbytes
        self.lengths = lengths
        self.gone: set[RecordId] = set()

    def member(self, at: int, place: Place) -> Member:
        """Return where a part lies."""
        order, before = order_of(place.pack), place.before
        if self.lengths:
            start = sized_at(before, order, self.lengths)
            return Member(at, place, start, self.lengths[before])
        return Member(at, place, member_at(before, order, self.nbytes), self.nbytes)


def adjacent(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Yield runs of a batch that follow each other in one pack, each of a few MiB."""
    group: list[Member] = []
    size = 0
    for one in members:
        size += one.nbytes
        if group and not (
            one.place == Place(group[-1].place.pack, group[-1].place.before + 1)
            and size <= _SPAN_BYTES
        ):
            yield group
            group, size = [], one.nbytes
        group.append(one)
    if group:
        yield group
