"""Scattered blocks in a CPU's memory, copied by one call a tensor, or by one a plane of it.

numpy does so for items of one row. What lies in a tensor is seen as one, of items as long as a
block: planes and blocks are so many items apart, and what lies between them is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import sub
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvtier.device.base import Copy
from kvtier.device.stack import Bytes, Planes, Stack

_FEW: Final = 8  # blocks of a run, on all planes, whose copy takes no longer than a call for it


class Row(NamedTuple):
    """The memory that a tensor's blocks lie in, as one row of places, some of them nobody's.

    memory: [places], each of as many bytes as a block. planes: the place where each plane begins,
    [planes, 1]; the same array for all that lie alike. across: places from a block to the next.
    """

    memory: NDArray[np.void]
    planes: NDArray[np.int64]
    across: int


_kept: Final[WeakKeyDictionary[Stack, tuple[Row, ...]]] = WeakKeyDictionary()


def scattered(copy: Copy) -> bool:
    """Say whether one call a tensor for all blocks is faster than one for each run of them.

    So it is for runs of few blocks on all planes of a tensor, and for single ones on however many.
    Not for holes; and what is wrong is left to the copy by runs.
    """
    pages, blocks, (planes, count, size) = copy.pages, copy.blocks, copy.pages.shape
    tensors = len(pages.tensors) if isinstance(pages, Stack) else 1
    runs = len(blocks) - list(map(sub, blocks[1:], blocks)).count(1)
    few = planes * len(blocks) <= _FEW * tensors * runs
    return (
        runs > 1
        and (few or 2 * runs > len(blocks))
        and copy.slot.shape == (planes, len(blocks), size)
        and copy.slot.size > 0
        and 0 <= min(blocks) <= max(blocks) < count
    )


def rows_of(pages: Planes) -> tuple[Row, ...]:
    """Return the row that each tensor lies in; none, unless all have one. See ``row``.

    Those of several tensors are made once, as long as the Stack is there: 400 bytes for each.
    """
    if not isinstance(pages, Stack):
        found = row(pages)
        return () if found is None else (found,)
    rows = _kept.get(pages)
    if rows is None:
        each = [one for one in map(row, pages.tensors) if one is not None]
        rows = _kept[pages] = tuple(each) if len(each) == len(pages.tensors) else ()
    return rows


def row(tensor: Bytes) -> Row | None:
    """Return the row that a tensor's blocks lie in; None: not whole blocks apart, or backwards.

    tensor: [planes, blocks, bytes of a block], none of them 0.
    """
    planes, count, size = tensor.shape
    blocks = tensor.view(f"V{size}")[..., 0]
    along, across = count, 1
    if tensor.flags.c_contiguous:
        memory = blocks.reshape(-1)
    else:
        along = blocks.strides[0] if planes > 1 else 0
        across = blocks.strides[1] if count > 1 else 0
        if along % size or across % size or min(along, across) < 0:
            return None
        along, across = along // size, across // size
        memory = as_strided(blocks, ((planes - 1) * along + (count - 1) * across + 1,), (size,))
    return Row(memory, _begins(planes, along), across)


def copy_rows(rows: Sequence[Row], copy: Copy, *, into_slot: bool) -> None:
    """Copy blocks that ``scattered`` said yes to. rows: of the copy's pages.

    ``take`` would first copy all of what it takes from, or into, that is not in one piece, and
    ``np.take`` is a microsecond slower. ``put`` is no faster than to assign, and where slot and
    pages overlap it would write all pages anew.
    """
    ids, at = np.array(copy.blocks), 0
    slot = copy.slot.view(f"V{copy.slot.shape[2]}")[..., 0]
    once, before = slot.flags.c_contiguous, None
    for memory, planes, across in rows:
        if planes is not before:  # those of a stack mostly lie alike
            before = planes
            places = planes + (ids if across == 1 else ids * across)
        part = slot[at : at + len(planes)]
        at += len(planes)
        for to, of in [(part, places)] if once else zip(part, places, strict=True):
            if into_slot:
                memory.take(of, 0, to, "clip")  # in range, and "raise" would copy twice
            else:
                memory[of] = to


@lru_cache(maxsize=64)
def _begins(planes: int, along: int) -> NDArray[np.int64]:
    found = np.arange(planes)[:, None] * along
    found.flags.writeable = False
    return found
