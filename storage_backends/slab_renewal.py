"""A new index in the place of the old one: dense, no larger than its slots need.

It is written beside the old one, synced, and renamed. Whatever ends the process, or cuts its power,
there is the old one or the new one; a draft that was not finished goes at the next opening. Both
have the same entries, but for those of segments that went because a full one had no other room:
the old one has them still, and they lead nowhere.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from typing import Final

from kvtier.identity.record import RecordId
from kvtier.storage_backends.slab import PAGE
from kvtier.storage_backends.slab_batch import Batch
from kvtier.storage_backends.slab_directory import SlabDirectory
from kvtier.storage_backends.slab_index import Index, unpack_entry

_LOT: Final = 4096
_DENSE_BYTES: Final = 400
"""Of an entry in pages that are filled one after the other: twelve a page, and what leads there."""

SPARE_BYTES: Final = 64 * PAGE
"""For the pages that each transaction copies."""

_Lots = Iterable[list[tuple[RecordId, bytes]]]


def draft_bytes(entries: int) -> int:
    """Return how large a new index for so many entries has to be while it is written."""
    return SPARE_BYTES + -(-entries * _DENSE_BYTES // PAGE) * PAGE


def lots_of(
    index: Index, there: Container[int] | None = None
) -> Iterator[list[tuple[RecordId, bytes]]]:
    """Yield the entries of an index, a lot at a time, in the order of their names.

    there: the numbers of the segments that entries may lead to, if they may not lead anywhere.
    """
    after = b""
    while lot := index.lot(after, _LOT):
        after = lot[-1][0]
        if there is not None:
            lot = [one for one in lot if unpack_entry(one[1]).segment in there]
        yield lot


def by_age(index: Index, full: Batch) -> list[tuple[int, int]]:
    """Return segments that could make room for a batch, and how many slots of each are taken.

    Those first whose records it deletes; then those that were last written to the longest ago.
    The batch's own are not among them.
    """
    taken = Counter(segment.number for segment, _ in full.releases)
    last: Counter[int] = Counter()
    for name, value in itertools.chain.from_iterable(lots_of(index)):
        if name not in full.operations:  # or its slot is among the releases
            entry = unpack_entry(value)
            taken[entry.segment] += 1
            last[entry.segment] = max(last[entry.segment], entry.sequence)
    for segment in full.dirty:
        del taken[segment.number]
    return sorted(taken.items(), key=lambda one: (last[one[0]], one[0]))


def _draft(directory: SlabDirectory, size: int, lots: _Lots) -> None:
    """Write an index beside the one that there is, whole on the disk, or leave nothing of it."""
    directory.remove_draft()
    try:
        index = Index(directory.draft, size, synced=False)
        try:
            for lot in lots:
                index.extend(lot)
            index.sync()
        finally:
            index.close()
    except BaseException:
        directory.remove_draft()
        raise


def remake(directory: SlabDirectory, size: int, lots: _Lots) -> None:
    """Write entries, in the order of their names, into a new index that replaces a closed one.

    For a moment there are two. Of a failure nothing remains but the old one. Raises OSError,
    Unavailable.
    """
    _draft(directory, size, lots)
    try:
        directory.draft.replace(directory.index)
    except BaseException:
        directory.remove_draft()
        raise
    directory.sync()


def renewed(directory: SlabDirectory, size: int, lots: _Lots, *, synced: bool) -> Index:
    """Do the same with one that is open and that nobody writes to; return the new one, open.

    Its name has reached the disk once the directory is synced. Raises OSError, Unavailable; then
    the old one goes on.
    """
    _draft(directory, size, lots)
    new = None
    try:
        new = Index(directory.draft, size, synced=synced)
        directory.draft.replace(directory.index)
    except BaseException:
        if new is not None:
            new.close()
        directory.remove_draft()
        raise
    new.moved(directory.index)
    return new
