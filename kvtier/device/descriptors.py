"""Runs of bytes between blocks and slots: what a copy kernel and a DMA engine take.

Whatever the layout of the KV, its copies end as rows of numbers (``spread``). So the kernel and the
batched copies of the driver know addresses and sizes, and nothing of blocks or chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import MisuseError

CUT_BYTES: Final = 64 << 10
"""The most that one block of threads copies in a row: few long runs still employ all of them."""

_VECTOR_BYTES: Final = 16  # one access of the kernel

Numbers = NDArray[np.uint64]
Ends = tuple[Numbers, Numbers, Numbers]
"""Where runs of bytes go to, where from, and how many bytes: three rows of a table."""
Room = Callable[[int], Numbers]
"""Returns memory for so many numbers."""


def allocated(count: int) -> Numbers:
    """Return fresh memory for so many numbers: a Room."""
    return np.empty(count, np.uint64)


class Runs:
    """Runs of bytes: where in the blocks, where in the slots, and how many; each uint64 [runs]."""

    __slots__ = ("nbytes", "pages", "slots")

    def __init__(self, pages: Numbers, slots: Numbers, nbytes: Numbers) -> None:
        self.pages = pages
        self.slots = slots
        self.nbytes = nbytes

    @classmethod
    def together(cls, several: Sequence[Runs]) -> Runs:
        """Return the runs of several, one after another."""
        rows = zip(*(one.ends(into_slot=False) for one in several), strict=True)
        return cls(*map(np.concatenate, rows)) if several else cls(*np.empty((3, 0), np.uint64))

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum())

    def some(self, which: slice | NDArray[np.bool_]) -> Runs:
        """Return some of the runs."""
        return Runs(self.pages[which], self.slots[which], self.nbytes[which])

    def ends(self, *, into_slot: bool) -> Ends:
        """Return where to, where from, and how many bytes."""
        ends = (self.slots, self.pages) if into_slot else (self.pages, self.slots)
        return (*ends, self.nbytes)

    def each(self, *, into_slot: bool) -> Iterator[tuple[int, int, int]]:
        """Yield of each run where to, where from, and how many bytes."""
        return zip(*(row.tolist() for row in self.ends(into_slot=into_slot)), strict=True)

    def table(self, *, into_slot: bool) -> Numbers:
        """Return what a batched copy takes: that, as uint64 [3, runs]."""
        return np.stack(self.ends(into_slot=into_slot))


def joined(runs: Runs) -> Runs:
    """Return the runs with neighbours joined that follow each other at both ends."""
    return begun(runs, starts(runs))


def begun(runs: Runs, at: NDArray[np.int64]) -> Runs:
    """Return the runs that begin where it is said, and go on with those behind them."""
    if len(at) == len(runs):
        return runs
    return Runs(runs.pages[at], runs.slots[at], np.add.reduceat(runs.nbytes, at))


def starts(runs: Runs) -> NDArray[np.int64]:
    """Return which runs do not go on, at both ends, where the one before ends."""
    pages, slots, nbytes = runs.pages, runs.slots, runs.nbytes
    begins = np.ones(len(runs), np.bool_)
    np.not_equal(pages[:-1] + nbytes[:-1], pages[1:], out=begins[1:])
    begins[1:] |= slots[:-1] + nbytes[:-1] != slots[1:]
    return begins.nonzero()[0]


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
    return Runs(
        np.repeat(runs.pages, pieces) + done,
        np.repeat(runs.slots, pieces) + done,
        np.minimum(left, np.uint64(most)),
    )
