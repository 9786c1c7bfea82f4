"""A copy between blocks and slots, as runs of bytes: what a copy kernel and a DMA engine take.

Whatever the layout of the KV, its copies end as three rows of numbers. So the kernel and the
batched copies of the driver know addresses and sizes, and nothing of planes, blocks or chunks.

All copies of a call are planned together, and planes come last: a host that looks at each run
has a microsecond for each of thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, groupby, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.device.base import HOLE, Copy
from kvtier.errors import MisuseError

__all__ = [
    "CUT_BYTES",
    "Ends",
    "Numbers",
    "Room",
    "Runs",
    "allocated",
    "cut",
    "describe",
    "describe_groups",
    "joined",
]

CUT_BYTES: Final = 64 << 10
"""The most that one block of threads copies in a row: few long runs still employ all of them."""

_VECTOR_BYTES: Final = 16  # one access of the kernel

Numbers = NDArray[np.uint64]
Ends = tuple[Numbers, Numbers, Numbers]
"""Where runs of bytes go to, where from, and how many bytes: three rows of a table."""
_Signed = NDArray[np.int64]
Room = Callable[[int], Numbers]
"""Returns memory for so many numbers."""


def allocated(count: int) -> Numbers:
    """Return fresh memory for so many numbers: a Room."""
    return np.empty(count, np.uint64)


class Runs:
    """Runs of bytes: where in the blocks, where in the slots, and how many; each uint64 [runs].

    rows: the three of them, [3, runs].
    """

    __slots__ = ("nbytes", "pages", "rows", "slots")

    def __init__(self, rows: Numbers) -> None:
        self.rows = rows
        self.pages, self.slots, self.nbytes = rows

    @classmethod
    def of(cls, pages: Numbers, slots: Numbers, nbytes: Numbers) -> Runs:
        """Return the runs of three rows."""
        return cls(np.stack([pages, slots, nbytes]))

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum())

    def ends(self, *, into_slot: bool) -> Ends:
        """Return where to, where from, and how many bytes."""
        ends = (self.slots, self.pages) if into_slot else (self.pages, self.slots)
        return (*ends, self.nbytes)

    def table(self, *, into_slot: bool) -> Numbers:
        """Return what the kernel reads: that, as uint64 [3, runs]."""
        return np.stack(self.ends(into_slot=into_slot))


def describe(copies: Sequence[Copy]) -> Runs:
    """Return the runs of one group of copies. See ``describe_groups``."""
    return describe_groups([copies], allocated)[0]


def describe_groups(groups: Sequence[Sequence[Copy]], room: Room) -> list[Runs]:
    """Return for each group the runs of its copies, plane by plane.

    Blocks that follow each other are in one run. Where one run ends with what the next one begins
    with, at both ends, they are joined as well. room: what the runs may lie in. Raises MisuseError
    where blocks do not match their slot, or are not among the pages.
    """
    copies = list(chain.from_iterable(groups))
    planes, facts = _facts(copies)
    base, across, along, (size, among) = facts[0:2], facts[2:4], facts[4:6], facts[6:8]
    lengths = np.array([len(copy.blocks) for copy in copies], np.int64)
    every = chain.from_iterable(copy.blocks for copy in copies)
    ids = np.fromiter(every, np.int64, int(lengths.sum()))
    owner = np.repeat(np.arange(len(copies)), lengths)
    wrong = (ids < HOLE) | (ids >= among[owner])
    if wrong.any():
        bad = copies[owner[wrong.argmax()]]
        low, high = min(bad.blocks), max(bad.blocks)
        raise MisuseError(f"blocks {low} to {high} do not match pages of {bad.pages.shape[1]}")
    kept = ids != HOLE
    first = np.flatnonzero(kept & ~_follows(ids, owner, (across == size).all(axis=0)))
    mine = owner[first]
    counted = np.append(np.cumsum(kept)[first], kept.sum() + 1)
    blocks = counted[1:] - counted[:-1]
    places = first - (np.cumsum(lengths) - lengths)[mine]
    starts: _Signed = base[:, mine] + across[:, mine] * np.array([ids[first], places])
    counts = np.bincount(mine, minlength=len(copies)).tolist()
    shapes = list(zip(planes, counts, strict=True))
    rows = _on_all_planes(shapes, starts, along, blocks * size[mine], room)
    before = np.cumsum([0, *(planes * count for planes, count in shapes)])
    ends = before[np.cumsum([0, *map(len, groups)])].tolist()
    return [joined(Runs(rows[:, at:stop])) for at, stop in pairwise(ends)]


def _facts(copies: Sequence[Copy]) -> tuple[list[int], _Signed]:
    """Return how many planes each copy has, and numbers [8, copies].

    Where pages and slot begin, how far it is there from block to block, and from plane to plane; a
    block's bytes, and how many blocks there are.
    """
    pages = {id(copy.pages): copy.pages for copy in copies}
    places = {key: one.ctypes.data for key, one in pages.items()}  # once each: it takes a while
    planes, rows = [], []
    for copy in copies:
        (count, among, size), slot = copy.pages.shape, copy.slot
        if slot.shape != (count, len(copy.blocks), size):
            raise MisuseError(
                f"{len(copy.blocks)} blocks of {copy.pages.shape} do not match their slot "
                f"{slot.shape}"
            )
        (along, across, _), (slot_along, slot_across, _) = copy.pages.strides, slot.strides
        planes.append(count)
        steps = (across, slot_across, along, slot_along)
        rows.append((places[id(copy.pages)], slot.ctypes.data, *steps, size, among))
    return planes, np.array(rows, np.int64).reshape(-1, 8).T


def _follows(ids: _Signed, owner: _Signed, dense: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Say of each block whether it goes on where the one before it ended, in pages and slot."""
    found = np.zeros(len(ids), np.bool_)
    found[1:] = (ids[:-1] != HOLE) & (ids[1:] == ids[:-1] + 1) & (owner[1:] == owner[:-1])
    return found & dense[owner]


def _on_all_planes(
    shapes: Sequence[tuple[int, int]],
    starts: _Signed,
    along: _Signed,
    nbytes: _Signed,
    room: Room,
) -> Numbers:
    """Return the rows of the runs of all planes, from those of the first one.

    shapes: of each copy, how many planes and runs. starts: in pages and slots, [2, runs]. along:
    from plane to plane, [2, copies]. Neighbours of one shape are done at once.
    """
    numbers = room(3 * sum(planes * count for planes, count in shapes))
    rows = numbers.view(np.int64).reshape(3, -1)
    at = run = copy = 0
    for (planes, count), some in groupby(shapes):
        several = sum(1 for _ in some)
        stop = at + several * planes * count
        here = rows[:, at:stop].reshape(3, several, planes, count)
        these = slice(run, run + several * count)
        steps = along[:, copy : copy + several, None] * np.arange(planes)
        np.add(starts[:, these].reshape(2, several, 1, count), steps[..., None], out=here[:2])
        here[2] = nbytes[these].reshape(several, 1, count)
        at, run, copy = stop, these.stop, copy + several
    return rows.view(np.uint64)


def joined(runs: Runs) -> Runs:
    """Return the runs with neighbours joined that follow each other at both ends."""
    pages, slots, nbytes = runs.rows
    # Of pages few go on, if any: of the slots no more is looked at.
    last = np.flatnonzero(pages[:-1] + nbytes[:-1] == pages[1:])
    last = last[slots[last] + nbytes[last] == slots[last + 1]]
    if not len(last):
        return runs
    begins = np.ones(len(runs), np.bool_)
    begins[last + 1] = False
    at = np.flatnonzero(begins)
    return Runs.of(pages[at], slots[at], np.add.reduceat(nbytes, at))


def cut(runs: Runs, most: int = CUT_BYTES) -> Runs:
    """Return the runs in pieces of at most so many bytes, a multiple of a vector's."""
    if most <= 0 or most % _VECTOR_BYTES:
        raise MisuseError(f"pieces of {most} bytes would not stay aligned")
    if runs.nbytes.max(initial=0) <= most:
        return runs
    pieces = -(-runs.nbytes.astype(np.int64) // most)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    done = ((np.arange(pieces.sum()) - first) * most).view(np.uint64)
    left = np.repeat(runs.nbytes, pieces) - done
    return Runs.of(
        np.repeat(runs.pages, pieces) + done,
        np.repeat(runs.slots, pieces) + done,
        np.minimum(left, np.uint64(most)),
    )
