"""Scattered blocks in a CPU's memory, copied by one call a tensor, or by one a plane of it.

numpy does so for items of one row. What lies in a tensor is seen as one, of items as long as a
block: planes and blocks are so many items apart, and what lies between them is never touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby, repeat
from operator import sub
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvtier.device.base import Copy
from kvtier.device.stack import Bytes, Planes, Stack

_FEW: Final = 8  # blocks of a run, on all planes, whose copy takes no longer than a call for it


class Rows(NamedTuple):
    """The memory that blocks of tensors lie in, a row of places each, some of which are nobody's.

    The tensors are neighbours, and their planes lie alike. memories: of each tensor [places], which
    have as many bytes as a block. planes: the place where each plane of one begins, [planes, 1].
    across: places from a block to the next.
    """

    memories: tuple[NDArray[np.void], ...]
    planes: NDArray[np.int64]
    across: int


_Row = tuple[NDArray[np.void], int, int, int]
_kept: Final[WeakKeyDictionary[Stack, list[Rows]]] = WeakKeyDictionary()


def copy_scattered(copy: Copy, *, into_slot: bool) -> bool:
    """Copy blocks if one call a tensor is faster than one for each run; say whether that is done.

    ``take`` would first copy all of what it takes from, or into, that is not in one piece, and
    ``np.take`` is a microsecond slower. ``put`` is no faster than to assign, and where slot and
    pages overlap it would write all pages anew.
    """
    if not _scattered(copy):
        return False
    pages, ids, item = copy.pages, np.array(copy.blocks), f"V{copy.slot.shape[2]}"
    slot = copy.slot.view(item)[..., 0]
    once = slot.flags.c_contiguous
    if once and not isinstance(pages, Stack) and pages.flags.c_contiguous:  # with least Python
        blocks = pages.view(item)[..., 0]
        if into_slot:
            blocks.take(ids, 1, slot, "clip")  # in range, and "raise" would copy twice
        else:
            blocks[:, ids] = slot
        return True
    rows = rows_of(pages)
    for memory, of, to in _pieces(rows, ids, slot, once=once):
        if into_slot:
            memory.take(of, 0, to, "clip")
        else:
            memory[of] = to
    return bool(rows)


def _scattered(copy: Copy) -> bool:
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


def rows_of(pages: Planes) -> list[Rows]:
    """Return the rows that tensors lie in; none, where one lies in none: see ``_row``.

    Those of several tensors are made once, as long as the Stack is there: 250 bytes for each.
    """
    if not isinstance(pages, Stack):
        row = _row(pages)
        return [] if row is None else [Rows((row[0],), _begins(*row[1:3]), row[3])]
    found = _kept.get(pages)
    if found is None:
        found = _kept[pages] = _rows(pages.tensors)
    return found


def _pieces(
    rows: Sequence[Rows], ids: NDArray[np.int64], slot: NDArray[np.void], *, once: bool
) -> Iterator[tuple[NDArray[np.void], NDArray[np.int64], NDArray[np.void]]]:
    """Yield memories, places in it, and their part of a slot, [planes, blocks].

    once: for each tensor, which takes a slot in one piece; or for each plane.
    """
    at = 0
    for memories, planes, across in rows:
        places = planes + (ids if across == 1 else ids * across)
        many = len(memories)
        part = slot[at : at + many * len(planes)]
        at += many * len(planes)
        if once:
            yield from zip(memories, repeat(places.ravel()), part.reshape(many, -1), strict=False)
            continue
        for memory, some in zip(memories, part.reshape(many, *places.shape), strict=True):
            for of, to in zip(places, some, strict=True):
                yield memory, of, to


def _rows(tensors: Sequence[Bytes]) -> list[Rows]:
    rows = [row for row in map(_row, tensors) if row is not None]
    if len(rows) < len(tensors):
        return []
    return [
        Rows(tuple(row[0] for row in some), _begins(planes, along), across)
        for (planes, along, across), some in groupby(rows, lambda row: row[1:])
    ]


@lru_cache(maxsize=64)
def _begins(planes: int, along: int) -> NDArray[np.int64]:
    found = np.arange(planes)[:, None] * along
    found.flags.writeable = False
    return found


def _row(tensor: Bytes) -> _Row | None:
    """Return a tensor's memory, [places], its planes, and how far planes and blocks lie apart.

    tensor: [planes, blocks, bytes of a block], none of them 0. None: it is not in whole places,
    or backwards.
    """
    planes, count, size = tensor.shape
    blocks = tensor.view(f"V{size}")[..., 0]
    if tensor.flags.c_contiguous:
        return blocks.reshape(-1), planes, count, 1
    along = blocks.strides[0] if planes > 1 else 0
    across = blocks.strides[1] if count > 1 else 0
    if along % size or across % size or min(along, across) < 0:
        return None
    along, across = along // size, across // size
    places = (planes - 1) * along + (count - 1) * across + 1
    return as_strided(blocks, (places,), (size,)), planes, along, across
