"""Opening a slab store: what the last owner left is checked, and only what is whole is kept."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ConfigError, Corrupt, Unavailable
from kvtier.identity.record import RecordId
from kvtier.storage_backends.slab import INDEX_FLOOR, PAGE, FileIO, Segment, Slabs
from kvtier.storage_backends.slab_directory import FIXED_BYTES, SlabDirectory, boot_id
from kvtier.storage_backends.slab_index import WHERE, Index, Page, check_length
from kvtier.units import format_bytes, format_least

__all__ = ["KEEP_SHARE", "LEAST_BYTES", "Recovered", "recover"]

LEAST_BYTES: Final = FIXED_BYTES + INDEX_FLOOR + 64 * PAGE
"""What a store takes before its first record, with some room for the index to grow."""

KEEP_SHARE: Final = 16
"""An unreadable index is kept if it takes at most this part of the capacity."""

_logger = logging.getLogger(__name__)
_PAGE_OF_ENTRIES = 4096
_INDEX_SHARE = 4  # the smallest slots need an eighth
_REFUSALS: Final = frozenset(  # of the system, which says nothing about what the index holds
    (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.EAGAIN)
)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a store starts with. sequence: the greatest of any entry."""

    index: Index
    slabs: Slabs
    sequence: int


def recover(directory: SlabDirectory, capacity: int, durability: str, io: FileIO) -> Recovered:
    """Open the index, rebuild the account of slots from it, and bring it within `capacity`.

    An index that is unreadable, or that was not synced before the machine went down, is put
    aside, and the store starts empty. Entries whose slot is not wholly there are dropped.
    Blocks, about 2 s for a million records. Raises ConfigError, OSError, Unavailable.
    """
    if capacity < LEAST_BYTES:
        raise ConfigError(
            f"capacity {format_bytes(capacity)} is too small for {directory.path}; "
            f"its index alone takes {format_bytes(INDEX_FLOOR)}: give at least "
            f"{format_least(LEAST_BYTES)}"
        )
    synced = durability != "none"
    _discard_what_cannot_be_used(directory, capacity)
    index = None
    try:
        index, entries = _load(directory, capacity, synced=synced)
        slabs, sequence = _account(directory, capacity, index, entries)
        _settle_sync(directory, index, slabs, io, synced=synced)
        directory.note(capacity, durability)
    except BaseException:
        if index is not None:
            index.close()
        raise
    return Recovered(index, slabs, sequence)


def _discard_what_cannot_be_used(directory: SlabDirectory, capacity: int) -> None:
    since = directory.unsynced_since()
    if not directory.index.exists() or directory.index.stat().st_size == 0:
        directory.discard()
    elif since is not None and (since != boot_id() or not since):
        _logger.warning(
            "%s was written with durability=none before the machine restarted; starting empty",
            directory.path,
        )
        directory.discard()
    elif directory.index.stat().st_size > INDEX_FLOOR + capacity // _INDEX_SHARE:
        _logger.warning(
            "the index of %s was made for a capacity far above %s; starting empty",
            directory.path,
            format_bytes(capacity),
        )
        directory.discard()


def _load(directory: SlabDirectory, capacity: int, *, synced: bool) -> tuple[Index, Page]:
    try:
        check_length(directory.index)
        return _read(directory, synced=synced)
    except (Corrupt, Unavailable) as error:
        refused = getattr(error.__cause__, "code", 0)  # LMDB's own are below zero
        if refused in _REFUSALS:
            raise OSError(refused, os.strerror(refused)) from error
        reason = str(error) if isinstance(error, Corrupt) else "unreadable"
        _logger.warning(
            "the index of %s cannot be used (%s); starting empty", directory.path, error
        )
        directory.discard(reason, capacity // KEEP_SHARE)
    return _read(directory, synced=synced)


def _read(directory: SlabDirectory, *, synced: bool) -> tuple[Index, Page]:
    size = directory.index.stat().st_size if directory.index.exists() else 0
    index = Index(directory.index, max(size, INDEX_FLOOR), synced=synced)
    names: list[RecordId] = []
    where = [np.empty(0, WHERE)]
    try:
        while (more := index.page(names[-1] if names else b"", _PAGE_OF_ENTRIES)).names:
            names += more.names
            where.append(more.where)
    except BaseException:
        index.close()
        raise
    return index, Page(names, np.concatenate(where))


def _account(
    directory: SlabDirectory, capacity: int, index: Index, entries: Page
) -> tuple[Slabs, int]:
    slabs = Slabs(capacity, FIXED_BYTES + directory.set_aside_bytes())
    slabs.index_bytes = index.size
    segments = {segment.number: segment for segment in directory.segments()}
    kept = _whole(entries, segments)
    used = _slots(entries, kept)
    surplus = _over(slabs, list(segments.values()), used)
    kept &= ~np.isin(entries.where["segment"], list(surplus))
    dropped = np.flatnonzero(~kept).tolist()
    if dropped:
        count = len(entries.names)
        _logger.warning("%s: %d of %d records lost", directory.path, len(dropped), count)
        index.commit(dict.fromkeys(entries.names[at] for at in dropped))
    for number, segment in segments.items():
        slabs.next_number = max(slabs.next_number, number + 1)
        if number in surplus:
            (directory.path / segment.name).unlink()
            continue
        os.truncate(directory.path / segment.name, segment.length)  # a tail was no whole slot
        segment.occupy(used.get(number, set()))
        slabs.add(segment)
    index.grow(slabs.index_bytes)
    return slabs, int(entries.where["sequence"].max(initial=0))


def _whole(entries: Page, segments: Mapping[int, Segment]) -> NDArray[np.bool_]:
    """Say which entries lead to a slot that is there, and that no entry before them leads to."""
    numbers, which = np.unique(entries.where["segment"], return_inverse=True)
    slots = np.array([segments[n].slots if n in segments else 0 for n in numbers.tolist()], "<u8")
    places = which.astype("<u8") << np.uint64(32) | entries.where["slot"]
    kept = np.zeros(len(entries.names), np.bool_)
    kept[np.unique(places, return_index=True)[1]] = True
    if len(slots):
        kept &= entries.where["slot"] < slots[which]
    return kept


def _slots(entries: Page, kept: NDArray[np.bool_]) -> dict[int, set[int]]:
    """Return the slots in use of each segment that has any."""
    where = entries.where[kept]
    where = where[np.argsort(where["segment"], kind="stable")]
    numbers, begin = np.unique(where["segment"], return_index=True)
    slots = np.split(where["slot"], begin[1:])
    return {n: set(each.tolist()) for n, each in zip(numbers.tolist(), slots, strict=False)}


def _over(slabs: Slabs, segments: Collection[Segment], used: Mapping[int, set[int]]) -> set[int]:
    """Return the segments that have to go: cut to nothing, or above the capacity.

    Empty ones go first, then the oldest.
    """
    over = {segment.number for segment in segments if segment.slots == 0}
    kept = [segment for segment in segments if segment.slots]
    kept.sort(key=lambda segment: (segment.number in used, segment.number))
    while kept and slabs.charge_of(kept) > slabs.capacity:
        over.add(kept.pop(0).number)
    return over


def _settle_sync(
    directory: SlabDirectory, index: Index, slabs: Slabs, io: FileIO, *, synced: bool
) -> None:
    """Leave the directory's word on what is synced in agreement with how it will be used."""
    if not synced:
        directory.mark()
    elif directory.unsynced_since() is not None:
        for segment in slabs.segments.values():
            descriptor = io.open(directory.path / segment.name, directory.flags)
            try:
                io.fdatasync(descriptor)
            finally:
                io.close(descriptor)
        index.sync()
        directory.unmark()
