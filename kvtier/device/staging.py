"""Copies through the GPU's own memory: what of them goes at once, and where it lies meanwhile.

Each part of a slot lies there as it does in the slot. So the kernel has the same planes at both
ends, and so has the link: what lies together on a plane goes over it for all planes at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from kvtier.device.descriptors import CUT_BYTES, Numbers, Runs, begun, starts
from kvtier.device.spread import Spread

_ALIGNED: Final = 16  # bytes, that copies begin at: no access of the kernel is smaller for it


class Lot(NamedTuple):
    """Copies that are in the place between together. stop: the run behind their last.

    What of them goes over the link: its `pages` are in the place between. whole: what is in one
    piece on all planes, neighbours joined. parts: what is not, on the first plane, if any.
    """

    stop: int
    whole: Runs
    parts: Runs | None


class Stage(NamedTuple):
    """Copies through one place, lot after lot.

    inner: runs between blocks and that place, which is what their slots are. lots: of each group of
    planes, by the first of it; all planes may be one. step: how many bytes planes lie apart, in the
    place and in slots.
    """

    inner: Spread
    lots: dict[int, list[Lot]]
    step: int


class Staged:
    """What of a copy's slots lies together, to be copied over the link."""

    def __init__(self, spread: Spread) -> None:
        planes = spread.planes[1]
        self._spread = spread
        self._begins, ends = spread.whole.extents
        self._sizes = [end - begin for begin, end in zip(self._begins, ends, strict=True)]
        self._widest = max(self._sizes)  # of a copy, on a plane
        self._slots, self._nbytes, first = spread.whole.pieces
        self._counts, self._first = first[1:] - first[:-1], first.tolist()
        self._step = int(planes[1] - planes[0]) if len(planes) > 1 else 0
        # So long, it is all of a copy: its planes lie together, and are one piece.
        whole = self._nbytes == np.uint64(self._step)
        self._whole = whole if self._step else ~whole
        self._parts = len(whole) - int(np.count_nonzero(self._whole))

    def pieces(self, planes: int) -> int:
        """Return how many pieces it is on so many planes, before those are joined that follow."""
        return len(self._slots) + (planes - 1) * self._parts

    def stages(self, staging: int, most: int, planes: int, runs: int) -> Iterator[Stage]:
        """Yield what goes through `most` bytes at an address, of at most so many planes.

        Lots are of as many copies as fit, of at most so many runs; copies that do not fit are cut
        by their planes, or else by their runs.
        """
        most -= most % _ALIGNED
        spread = self._spread.cut(min(CUT_BYTES, most))
        widest = self._widest
        if widest > most or _longest(spread) > runs:
            for half in _halves(spread):
                yield from Staged(half).stages(staging, most, planes, runs)
            return
        fits = min((most - widest) // (self._step or 1) + 1, planes)
        each = len(spread.planes[1])
        at_once = -(-each // -(-each // fits))  # as many each time: else the last may be short
        for at in range(0, each, at_once):
            some = Spread(spread.planes[:, at : at + at_once], spread.runs, spread.first)
            yield self._stage(some, [range(len(some.planes[1]))], staging, most, runs)

    def grouped(self, groups: Sequence[range], staging: int, most: int, runs: int) -> Stage | None:
        """Return how groups of its planes go through `most` bytes at an address, one at a time.

        All by the same table of at most so many runs.
        None where a group does not fit, or where a plane is in two of them, with two places.
        """
        spread = self._spread.cut()
        placed = _places(tuple(groups), len(spread.planes[0]), self._step)
        above = _above(groups, self._step)
        if placed is None or self._widest + above > most or _longest(spread) > runs:
            return None
        planes = spread.planes.copy()
        np.add(planes[1, 0], placed, out=planes[1])
        some = Spread(planes, spread.runs, spread.first)
        return self._stage(some, groups, staging, most, runs)

    def _stage(
        self, spread: Spread, groups: Sequence[range], staging: int, most: int, runs: int
    ) -> Stage:
        """Return how copies on some of the planes go, each of which fits; groups one at a time."""
        first, low = spread.first.tolist(), int(spread.planes[1, 0])
        above = _above(groups, self._step)
        stops, shifts, used, begun = [0], [], 0, 0
        # By Python: of a few dozen numbers, numpy would take three times as long.
        for copy, (begin, size) in enumerate(zip(self._begins, self._sizes, strict=True)):
            nbytes = size + above
            if used + nbytes > most or first[copy + 1] - begun > runs:
                stops.append(copy)
                used, begun = 0, first[copy]
            shifts.append(staging + used - begin - low)
            used += nbytes + -nbytes % _ALIGNED
        stops.append(len(shifts))
        moved = np.array(shifts, np.int64).view(np.uint64)
        places = spread.runs.slots + moved.repeat(spread.counts)
        inner = Runs(spread.runs.pages, places, spread.runs.nbytes)
        slots = self._slots + spread.planes[1, 0]
        link = Runs(slots + moved.repeat(self._counts), slots, self._nbytes)
        bounds, stop = [self._first[at] for at in stops], [first[at] for at in stops[1:]]
        lots = self._lots(link, bounds, stop, groups)
        return Stage(Spread(spread.planes, inner, spread.first), lots, self._step)

    def _lots(
        self, link: Runs, bounds: Sequence[int], stops: Sequence[int], groups: Sequence[range]
    ) -> dict[int, list[Lot]]:
        """Return the lots of groups. link: of the first plane; of each lot between two bounds."""
        begins = np.array([[group.start * self._step] for group in groups], np.uint64)
        planes = np.array([[len(group)] for group in groups], np.uint64)
        rest, parts = bounds, None
        if self._parts:
            mine, theirs = self._whole.nonzero()[0], (~self._whole).nonzero()[0]
            link, parts = link.some(self._whole), link.some(~self._whole)
            bounds, rest = mine.searchsorted(bounds), theirs.searchsorted(bounds).tolist()
            others = parts.slots + begins
        at = starts(Runs(link.pages, link.slots, link.nbytes * planes[0]))
        link, bounds = begun(link, at), at.searchsorted(bounds).tolist()
        slots, sizes = link.slots + begins, link.nbytes * planes
        found: dict[int, list[Lot]] = {}
        for row, group in enumerate(groups):
            lots = found[group.start] = []
            for lot, stop in enumerate(stops):
                some, more = slice(*bounds[lot : lot + 2]), slice(*rest[lot : lot + 2])
                whole = Runs(link.pages[some], slots[row, some], sizes[row, some])
                if parts is None:
                    lots.append(Lot(stop, whole, None))
                    continue
                left = Runs(parts.pages[more], others[row, more], parts.nbytes[more])
                lots.append(Lot(stop, whole, left))
        return found


def _above(groups: Sequence[range], step: int) -> int:
    """Return how far the last plane of the widest group is beyond its first."""
    return (max(map(len, groups)) - 1) * step


@lru_cache
def _places(groups: tuple[range, ...], planes: int, step: int) -> Numbers | None:
    """Return how far planes are beyond the first of their group; None where one is in two."""
    places = [-1] * planes
    for group in groups:
        mine = slice(group.start, group.stop)
        if max(places[mine]) >= 0:
            return None
        places[mine] = range(len(group))
    found = np.array([max(at, 0) * step for at in places], np.uint64)
    found.flags.writeable = False  # it is everyone's
    return found


def _longest(spread: Spread) -> int:
    """Return how many runs the copy with the most has on a plane."""
    bounds: list[int] = spread.first.tolist()
    return max(stop - begin for begin, stop in pairwise(bounds))


def _halves(spread: Spread) -> Iterator[Spread]:
    """Yield half of the copies and the others, or else of one copy's runs."""
    first, several = spread.first, len(spread.first) > 2  # noqa: PLR2004
    middle = len(first) // 2
    at = int(first[middle]) if several else len(spread.runs) // 2
    bounds = (first[: middle + 1], first[middle:] - at) if several else (None, None)
    for some, mine in zip((slice(at), slice(at, None)), bounds, strict=True):
        yield Spread(spread.planes, spread.runs.some(some), mine)
