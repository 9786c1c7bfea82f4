"""Copies through the GPU's own memory: what of them goes at once, and where it lies meanwhile.

Each part of a slot lies there as it does in the slot. So the kernel has the same planes at both
ends, and where a slot is copied whole, what goes over the link is one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from kvtier.device.descriptors import CUT_BYTES, Numbers, Runs, begun, starts
from kvtier.device.spread import Spread

__all__ = ["Stage", "Staged"]

_ALIGNED: Final = 16  # bytes, that copies begin at: no access of the kernel is smaller for it


class Stage(NamedTuple):
    """Copies through one place, lot after lot.

    inner: runs between blocks and that place, which is what their slots are. link: runs between
    that place, which is what their pages are, and slots. lots: of each its first run in both, and
    at last how many there are, [2, lots + 1].
    """

    inner: Spread
    link: Runs
    lots: list[tuple[int, int]]


class Staged:
    """What of a copy's slots lies together, to be copied over the link.

    runs: how many it is, before those are joined that follow each other.
    """

    def __init__(self, spread: Spread) -> None:
        runs, first, planes = spread.runs, spread.first, spread.planes[1]
        ends = runs.slots + runs.nbytes
        begins = np.ones(len(runs) + 1, np.bool_)
        np.not_equal(ends[:-1], runs.slots[1:], out=begins[1:-1])
        begins[first] = True
        bounds = np.flatnonzero(begins)
        at, last = bounds[:-1], bounds[1:] - 1
        self._spread = spread
        self._planes = len(planes)
        self._extents = [one.tolist() for one in spread.extents]
        self._slots = runs.slots[at]
        self._nbytes = ends[last] - self._slots
        self._first = np.searchsorted(at, first)
        # So long, it is all of a copy: its planes lie together, and go over the link at once.
        self._whole = self._nbytes == (planes[1] - planes[0] if len(planes) > 1 else 0)
        self.runs = len(planes) * len(at) - (len(planes) - 1) * int(self._whole.sum())

    def stages(self, staging: int, most: int, planes: int, runs: int) -> Iterator[Stage]:
        """Yield what goes through `most` bytes at an address, of at most so many planes.

        Lots are of as many copies as fit, of at most so many runs; copies that do not fit are cut
        by their planes, or else by their runs.
        """
        most -= most % _ALIGNED
        spread = self._spread.cut(min(CUT_BYTES, most))
        widest = max(end - begin for begin, end in zip(*self._extents, strict=True))
        first = spread.first.tolist()
        longest = max(stop - begin for begin, stop in pairwise(first))
        if widest > most or longest > runs:
            for half in _halves(spread):
                yield from Staged(half).stages(staging, most, planes, runs)
            return
        step = int(spread.planes[1, 1] - spread.planes[1, 0]) if self._planes > 1 else 1
        at_once = min((most - widest) // step + 1, planes)
        for at in range(0, self._planes, at_once):
            some = spread.planes[:, at : at + at_once]
            yield self._stage(Spread(some, spread.runs, spread.first), staging, most, runs)

    def _stage(self, spread: Spread, staging: int, most: int, runs: int) -> Stage:
        """Return how copies on some of the planes go, each of which fits."""
        planes, first = spread.planes[1], spread.first.tolist()
        low, above = int(planes[0]), int(planes[-1] - planes[0])
        lots, used, shifts = [0], 0, []
        # By Python: of a few dozen numbers, numpy would take three times as long.
        for copy, (begin, end) in enumerate(zip(*self._extents, strict=True)):
            nbytes = end - begin + above
            if used + nbytes > most or first[copy + 1] - first[lots[-1]] > runs:
                lots.append(copy)
                used = 0
            shifts.append(staging + used - begin - low)
            used += nbytes + -nbytes % _ALIGNED
        lots.append(len(shifts))
        shift = np.array(shifts, np.int64).view(np.uint64)
        staged = spread.runs.slots + np.repeat(shift, spread.counts)
        inner = Spread(
            spread.planes, Runs(spread.runs.pages, staged, spread.runs.nbytes), spread.first
        )
        link, before = self._link(planes, shift)
        at = starts(link)
        of_link = np.searchsorted(at, [before[self._first[copy]] for copy in lots])
        of_runs = [first[copy] for copy in lots]
        return Stage(inner, begun(link, at), list(zip(of_runs, of_link.tolist(), strict=True)))

    def _link(self, planes: Numbers, shift: Numbers) -> tuple[Runs, Sequence[int]]:
        """Return what goes over the link, and how many runs of it come before each piece."""
        counts = np.where(self._whole, 1, len(planes))
        stops = np.cumsum(counts)
        which = np.repeat(np.arange(len(counts)), counts)
        begins = planes[np.arange(len(which)) - (stops - counts)[which]]
        nbytes = np.where(self._whole, self._nbytes * np.uint64(len(planes)), self._nbytes)
        slots, shift = (
            self._slots[which] + begins,
            np.repeat(shift, self._first[1:] - self._first[:-1]),
        )
        return Runs(slots + shift[which], slots, nbytes[which]), [0, *stops.tolist()]


def _halves(spread: Spread) -> Iterator[Spread]:
    """Yield half of the copies and the others, or else of one copy's runs."""
    first, several = spread.first, len(spread.first) > 2  # noqa: PLR2004
    middle = len(first) // 2
    at = int(first[middle]) if several else len(spread.runs) // 2
    bounds = (first[: middle + 1], first[middle:] - at) if several else (None, None)
    for some, mine in zip((slice(at), slice(at, None)), bounds, strict=True):
        yield Spread(spread.planes, spread.runs.some(some), mine)
