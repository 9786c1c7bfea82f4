"""Filling an empty catalog with all that a tier has, at once. Called under the Catalog's lock.

It ends in the state in which taking the parts one by one would, heads first, and takes a tenth of
the time: no part is looked at alone. Only parts whose whole line is there are dealt with so.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.catalog.below import Part
from kvtier.catalog.index import NO_ROW
from kvtier.catalog.shelf import Room
from kvtier.identity.record import RECORD_ID_BYTES, RecordId

_NAME: Final = struct.Struct(f"{RECORD_ID_BYTES}s")
_NO_PARENT: Final = bytes(RECORD_ID_BYTES)


class Parts(NamedTuple):
    """Parts that a tier has, an item each, those first that were used or written first.

    parents: their names one behind the other, zeros for a part without one. depths: int32.
    nbytes: raw, int64. owners: uint16. charged: bytes of the tier's budget, int64.
    """

    names: list[RecordId]
    parents: bytes
    depths: NDArray[np.int32]
    nbytes: NDArray[np.int64]
    owners: NDArray[np.uint16]
    charged: NDArray[np.int64]

    def part(self, at: int) -> Part:
        """Return one of them."""
        parent = self.parents[at * RECORD_ID_BYTES : (at + 1) * RECORD_ID_BYTES]
        above = None if parent == _NO_PARENT else parent
        depth, nbytes, owner = int(self.depths[at]), int(self.nbytes[at]), int(self.owners[at])
        return Part(self.names[at], above, depth, nbytes, owner)

    def heads_first(self) -> list[int]:
        """Return the order in which ``fill`` takes them."""
        order: list[int] = _heads_first(self)[0].tolist()
        return order


def fill(room: Room, parts: Parts, tier: int) -> list[int]:
    """Take parts into a tier; return which of them have to be taken one by one, in that order.

    Each comes where it stands, but behind its parent. All are left over where the catalog has
    any part already, and otherwise those last whose line to the first chunk is not there.
    """
    order, above, headed = _heads_first(parts)
    if not room.index.blank:
        headed = 0
    _fill(room, parts, tier, order[:headed], above)
    left: list[int] = order[headed:].tolist()
    return left


def _heads_first(parts: Parts) -> tuple[NDArray[np.intp], NDArray[np.intp], int]:
    """Return the order in which parts are taken, where each one's parent stands, and how many.

    So many from the first have all their ancestors before them.
    """
    count = len(parts.names)
    places = np.arange(count)
    at = dict(zip(parts.names, range(count), strict=True))
    if len(at) < count:  # no Store names a record twice
        return places, np.full(count, NO_ROW), 0
    find = at.get
    found = [find(name, NO_ROW) for (name,) in _NAME.iter_unpack(parts.parents)]
    above = np.array(found, np.intp)
    named = np.frombuffer(parts.parents, np.uint8).reshape(-1, RECORD_ID_BYTES).any(axis=1)
    linked = (above != NO_ROW) & (parts.depths[above] == parts.depths - 1)
    headless = named & ~linked
    turn = places.copy()  # of a part, or of its last ancestor
    higher = np.where(linked, above, places)
    while True:  # each time twice as far up
        turn = np.maximum(turn, turn[higher])
        headless |= headless[higher]
        further = higher[higher]
        if (further == higher).all():
            break
        higher = further
    turn[headless] = places[headless]
    order = np.lexsort((parts.depths, turn, headless))
    return order, above, count - int(np.count_nonzero(headless))


def _fill(
    room: Room, parts: Parts, tier: int, order: NDArray[np.intp], above: NDArray[np.intp]
) -> None:
    """Make rows of parts in this order, each of which has its parent before it or none."""
    row_of = np.empty(len(above) + 1, np.intp)
    row_of[order] = np.arange(len(order))
    row_of[NO_ROW] = NO_ROW
    parents = row_of[above[order]]
    owners, charged = parts.owners[order], parts.charged[order]
    names = [parts.names[at] for at in order.tolist()]
    numbers = parts.depths[order], owners, parts.nbytes[order]
    room.index.fill(names, parents, *numbers, tier, charged)
    shelf = room.shelves[tier]
    shares = np.array(room.owners.shares)[owners]
    for share in dict.fromkeys(shares.tolist()):
        mine = shares == share
        rows = np.flatnonzero(mine)
        shelf.order.fill(rows, parents)
        for other in room.shelves:  # shares have their turns in the order in which they came
            other.order.expends(int(rows[0]))
        nbytes = int(charged[mine].sum())
        shelf.used += nbytes
        shelf.used_by[share] += nbytes
