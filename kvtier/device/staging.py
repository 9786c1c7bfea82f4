"""What of a copy goes through the GPU's own memory at once, and where it lies there meanwhile.

Each part of a slot lies as it does in the slot. So the kernel has the same planes at both ends, and
where a slot is copied whole, what goes over the link is one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.device.descriptors import Runs, cut, joined
from kvtier.device.spread import Signed, Spread

__all__ = ["Lot", "lots"]

_ALIGNED: Final = 16  # bytes, that copies begin at: no access of the kernel is smaller for it


class Lot(NamedTuple):
    """Runs that go through staging memory at once.

    spread: between blocks and slots. inner: between blocks and staging, which is what its slots
    are. pieces: what of slots lies together on the first plane, between staging, which is what
    their pages are, and slots. whole: of each, whether plane after plane lies together with it.
    """

    spread: Spread
    inner: Spread
    pieces: Runs
    whole: NDArray[np.bool_]

    @property
    def link_runs(self) -> int:
        """How many runs go over the link, before those are joined that follow each other."""
        planes = len(self.spread.planes[0])
        return planes * len(self.whole) - (planes - 1) * int(self.whole.sum())

    def link(self) -> Runs:
        """Return what goes over the link, as pieces have it, on all planes; neighbours joined."""
        planes, pieces = self.spread.planes[1], self.pieces
        counts = np.where(self.whole, 1, len(planes))
        which = np.repeat(np.arange(len(counts)), counts)
        begins = planes[np.arange(len(which)) - (np.cumsum(counts) - counts)[which]]
        nbytes = np.where(self.whole, pieces.nbytes * np.uint64(len(planes)), pieces.nbytes)
        ends = (pieces.pages[which] + begins, pieces.slots[which] + begins)
        return joined(Runs(*ends, nbytes[which]))


def lots(spread: Spread, staging: int, most: int) -> Iterator[Lot]:
    """Yield the runs in lots that fit into `most` bytes, a multiple of 16, at an address.

    As many copies as fit are in one; one that does not is cut by its planes, or else by its runs.
    """
    low, sizes = _extents(spread)
    ends = np.cumsum(sizes)
    at, before = 0, 0
    while at < len(sizes):
        stop = max(int(np.searchsorted(ends, before + most, "right")), at + 1)
        some, end = _copies(spread, at, stop), int(ends[stop - 1])
        if end - before > most:
            for part in _parts(some, most):
                yield from lots(part, staging, most)
        else:
            starts = ends[at:stop] - sizes[at:stop] - before + staging
            yield _lot(some, starts - low[at:stop])
        at, before = stop, end


def _extents(spread: Spread) -> tuple[Signed, Signed]:
    """Return of each copy where it begins in its slot, on its lowest plane, and its bytes there."""
    (begins, ends), planes = spread.extents, spread.planes[1].view(np.int64)
    low, high = planes.min(), planes.max()
    return begins + low, -(-(ends - begins + high - low) // _ALIGNED) * _ALIGNED


def _copies(spread: Spread, at: int, stop: int) -> Spread:
    """Return some of the copies."""
    first = spread.first[at : stop + 1]
    runs = spread.runs.some(slice(first[0], first[-1]))
    return Spread(spread.planes, runs, first - first[0])


def _parts(spread: Spread, most: int) -> Iterator[Spread]:
    """Yield halves of one copy: of its planes, or of its runs, or of what its runs are cut into."""
    planes, runs = spread.planes, spread.runs
    middle = len(planes[0]) // 2
    if middle:
        yield Spread(planes[:, :middle], runs, spread.first)
        yield Spread(planes[:, middle:], runs, spread.first)
        return
    pieces = cut(runs, most)
    middle = len(pieces) // 2
    for some in (pieces.some(slice(middle)), pieces.some(slice(middle, None))):
        yield Spread(planes, some)


def _lot(spread: Spread, shift: Signed) -> Lot:
    """Return the runs with each copy so far from its slot."""
    planes, runs, first = spread.planes[1], spread.runs, spread.first
    staged = runs.slots + np.repeat(shift.view(np.uint64), np.diff(first))
    inner = Spread(spread.planes, Runs(runs.pages, staged, runs.nbytes), first)
    ends = runs.slots + runs.nbytes
    apart = ends[:-1] != runs.slots[1:]
    apart[first[1:-1] - 1] = True
    last = np.append(np.flatnonzero(apart), len(runs) - 1)
    at = np.append(0, last[:-1] + 1)
    pieces = Runs(staged[at], runs.slots[at], ends[last] - runs.slots[at])
    # So long, it is all of a copy, which lies in staging as it does in the slot.
    whole = pieces.nbytes == (planes[1] - planes[0] if len(planes) > 1 else 0)
    return Lot(spread, inner, pieces, whole)
