"""Copies through the GPU's own memory: what of them goes at once, and where it lies meanwhile.

Each part of a slot lies there as it does in the slot. So the kernel has the same planes at both
ends, and so has the link: what lies together on a plane goes over it for all planes at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from kvtier.device.descriptors import CUT_BYTES, Runs
from kvtier.device.spread import Spread

_ALIGNED: Final = 16  # bytes, that copies begin at: no access of the kernel is smaller for it

Piece = tuple[int, int, int, int]
"""Bytes that go over the link at once: where they lie in the place between and where in slots, both
on the first plane; how many on a plane, and on how many planes."""


class Lot(NamedTuple):
    """Copies that are in the place between together. stop: the run behind their last.

    pieces: what lies together on the first plane: how many bytes, where in the place between, and
    where in slots.
    """

    stop: int
    pieces: list[tuple[int, int, int]]


class Stage(NamedTuple):
    """Copies through one place, lot after lot.

    inner: runs between blocks and that place, which is what their slots are. step: how many bytes
    planes lie apart, in the place and in slots.
    """

    inner: Spread
    lots: list[Lot]
    step: int

    def link(self, lot: Lot, first: int, planes: int) -> list[Piece]:
        """Return what of a lot goes over the link, on so many planes from one of them on."""
        found: list[Piece] = []
        above = first * self.step
        for nbytes, there, slot in lot.pieces:
            size, over = nbytes, planes
            if nbytes == self.step:
                size, over = nbytes * planes, 1
            _append(found, (there + above, slot + above, size, over))
        return found


class Staged:
    """What of a copy's slots lies together, to be copied over the link.

    runs: how many it is on all planes, before those are joined that follow each other.
    """

    def __init__(self, spread: Spread) -> None:
        planes = spread.planes[1]
        self._spread = spread
        self._extents = spread.whole.extents
        self._slots, self._nbytes, self._first = spread.whole.pieces
        self._step = int(planes[1] - planes[0]) if len(planes) > 1 else 0
        # So long, it is all of a copy: its planes lie together, and are one run.
        whole = int((self._nbytes == self._step).sum())
        self.runs = len(planes) * (len(self._slots) - whole) + whole

    def stages(self, staging: int, most: int, planes: int, runs: int) -> Iterator[Stage]:
        """Yield what goes through `most` bytes at an address, of at most so many planes.

        Lots are of as many copies as fit, of at most so many runs; copies that do not fit are cut
        by their planes, or else by their runs.
        """
        most -= most % _ALIGNED
        spread = self._spread.cut(min(CUT_BYTES, most))
        widest = max(end - begin for begin, end in zip(*self._extents, strict=True))
        longest = max(stop - begin for begin, stop in pairwise(spread.first.tolist()))
        if widest > most or longest > runs:
            for half in _halves(spread):
                yield from Staged(half).stages(staging, most, planes, runs)
            return
        at_once = min((most - widest) // (self._step or 1) + 1, planes)
        for at in range(0, len(spread.planes[1]), at_once):
            some = spread.planes[:, at : at + at_once]
            yield self._stage(Spread(some, spread.runs, spread.first), staging, most, runs)

    def _stage(self, spread: Spread, staging: int, most: int, runs: int) -> Stage:
        """Return how copies on some of the planes go, each of which fits."""
        planes, first = spread.planes[1], spread.first.tolist()
        low, above = int(planes[0]), int(planes[-1] - planes[0])
        slots, sizes, pieces = (one.tolist() for one in (self._slots, self._nbytes, self._first))
        lots: list[Lot] = []
        found: list[tuple[int, int, int]] = []
        shifts, used, begun = [], 0, 0
        # By Python: of a few dozen numbers, numpy would take three times as long.
        for copy, (begin, end) in enumerate(zip(*self._extents, strict=True)):
            nbytes = end - begin + above
            if used + nbytes > most or first[copy + 1] - begun > runs:
                lots.append(Lot(first[copy], found))
                found, used, begun = [], 0, first[copy]
            shift = staging + used - begin - low
            shifts.append(shift)
            for piece in range(pieces[copy], pieces[copy + 1]):
                slot = slots[piece] + low
                found.append((sizes[piece], slot + shift, slot))
            used += nbytes + -nbytes % _ALIGNED
        lots.append(Lot(first[-1], found))
        moved = np.array(shifts, np.int64).view(np.uint64).repeat(spread.counts)
        inner = Runs(spread.runs.pages, spread.runs.slots + moved, spread.runs.nbytes)
        return Stage(Spread(spread.planes, inner, spread.first), lots, self._step)


def _append(link: list[Piece], piece: Piece) -> None:
    """Add a piece, or let the last go on with it."""
    there, slot, nbytes, planes = piece
    if planes == 1 and link:
        begin, before, size, _ = link[-1]  # of one plane if it goes on: others are there behind it
        if begin + size == there and before + size == slot:
            link[-1] = (begin, before, size + nbytes, 1)
            return
    link.append(piece)


def _halves(spread: Spread) -> Iterator[Spread]:
    """Yield half of the copies and the others, or else of one copy's runs."""
    first, several = spread.first, len(spread.first) > 2  # noqa: PLR2004
    middle = len(first) // 2
    at = int(first[middle]) if several else len(spread.runs) // 2
    bounds = (first[: middle + 1], first[middle:] - at) if several else (None, None)
    for some, mine in zip((slice(at), slice(at, None)), bounds, strict=True):
        yield Spread(spread.planes, spread.runs.some(some), mine)
