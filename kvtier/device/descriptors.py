"""A copy between blocks and slots, as runs of bytes: what a copy kernel and a DMA engine take.

Whatever the layout of the KV, its copies end as three rows of numbers. So the kernel and the
batched copies of the driver know addresses and sizes, and nothing of planes, blocks or chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.device.base import HOLE, Copy
from kvtier.errors import MisuseError

__all__ = ["CUT_BYTES", "Numbers", "Runs", "cut", "describe", "joined"]

CUT_BYTES: Final = 64 << 10
"""The most that one block of threads copies in a row: few long runs still employ all of them."""

_VECTOR_BYTES: Final = 16  # one access of the kernel

Numbers = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of bytes: where in the blocks, where in the slots, and how many; each uint64 [runs]."""

    pages: Numbers
    slots: Numbers
    nbytes: Numbers

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum())

    def table(self, *, into_slot: bool) -> Numbers:
        """Return what the kernel reads: uint64 [3, runs], where to, where from, how many bytes."""
        ends = (self.slots, self.pages) if into_slot else (self.pages, self.slots)
        return np.stack([*ends, self.nbytes])


def describe(copies: Sequence[Copy]) -> Runs:
    """Return the runs of copies, one for each plane and block that is no hole.

    Raises MisuseError where blocks do not match their slot, or are not among the pages.
    """
    each = [_placed(copy) for copy in copies]
    runs = Runs(*np.empty((3, sum(pages.size for pages, _, _ in each)), np.uint64))
    at = 0
    for pages, slots, size in each:
        here = slice(at, at + pages.size)
        runs.pages[here], runs.slots[here], runs.nbytes[here] = pages.ravel(), slots.ravel(), size
        at = here.stop
    return runs


def _placed(copy: Copy) -> tuple[Numbers, Numbers, int]:
    """Return where a copy's blocks are, in the pages and in the slot, and their bytes.

    Addresses [planes, blocks].
    """
    count, among, size = copy.pages.shape
    blocks = copy.blocks
    if copy.slot.shape != (count, len(blocks), size):
        raise MisuseError(
            f"{len(blocks)} blocks of {copy.pages.shape} do not match their slot {copy.slot.shape}"
        )
    low, high = min(blocks, default=HOLE), max(blocks, default=HOLE)
    if not HOLE <= low <= high < among:
        raise MisuseError(f"blocks {low} to {high} do not match pages of {among}")
    ids = np.array(blocks, np.int64)
    places = np.flatnonzero(ids != HOLE)
    return _addresses(copy.pages, ids[places]), _addresses(copy.slot, places), size


def _addresses(array: NDArray[np.uint8], places: NDArray[np.int64]) -> Numbers:
    along, across, _ = array.strides
    base = int(array.__array_interface__["data"][0])
    starts = np.arange(len(array)) * along + base
    return (starts[:, None] + places * across).view(np.uint64)


def joined(runs: Runs) -> Runs:
    """Return the runs with neighbours joined that follow each other at both ends."""
    begins = np.ones(len(runs), np.bool_)
    begins[1:] = runs.pages[:-1] + runs.nbytes[:-1] != runs.pages[1:]
    begins[1:] |= runs.slots[:-1] + runs.nbytes[:-1] != runs.slots[1:]
    if begins.all():
        return runs
    at = np.flatnonzero(begins)
    return Runs(runs.pages[at], runs.slots[at], np.add.reduceat(runs.nbytes, at))


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
