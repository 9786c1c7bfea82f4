"""Opening a slab store: what the last owner left is checked, and only what is whole is kept."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ConfigError, Corrupt, Unavailable
from kvtier.identity.record import RecordId
from kvtier.storage_backends.slab import INDEX_FLOOR, PAGE, FileIO, Segment, Slabs, index_bytes_for
from kvtier.storage_backends.slab_directory import FIXED_BYTES, SlabDirectory, boot_id
from kvtier.storage_backends.slab_index import Index, IndexFull, Page
from kvtier.storage_backends.slab_renewal import SPARE_BYTES, lots_of, remake
from kvtier.storage_backends.slab_sound import read_sound
from kvtier.units import format_bytes, format_least

LEAST_BYTES: Final = FIXED_BYTES + INDEX_FLOOR + 64 * PAGE
"""What a store takes before its first record, with some room for the index to grow."""

KEEP_SHARE: Final = 16
"""An unreadable index is kept if it takes at most this part of the capacity."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a store starts with. sequence: the greatest of any entry."""

    directory: SlabDirectory
    index: Index
    slabs: Slabs
    sequence: int


def recover(directory: SlabDirectory, capacity: int, durability: str, io: FileIO) -> Recovered:
    """Open the index, rebuild the account of slots from it, and bring all within `capacity`.

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
    directory.remove_draft()
    _discard_what_cannot_be_used(directory)
    index = None
    try:
        index, entries = _load(directory, capacity, synced=synced)
        slabs, sequence, dropped = _account(directory, capacity, index, entries)
        try:
            index = _without(dropped, directory, index, slabs.index_bytes, synced=synced)
        except IndexFull:  # even for deletions: it has to grow, and segments to go for that
            slabs, sequence, dropped = _account(directory, capacity, index, entries, SPARE_BYTES)
            index = _without(dropped, directory, index, slabs.index_bytes, synced=synced)
        _settle_sync(directory, index, slabs, io, synced=synced)
        directory.note(capacity, durability)
    except BaseException:
        if index is not None:
            index.close()
        raise
    return Recovered(directory, index, slabs, sequence)


def _discard_what_cannot_be_used(directory: SlabDirectory) -> None:
    since = directory.unsynced_since()
    if not directory.index.exists() or directory.index.stat().st_size == 0:
        if directory.segments():
            _logger.warning("%s has segments, and no index of them; starting empty", directory.path)
        directory.discard()
    elif since is not None and (since != boot_id() or not since):
        _logger.warning(
            "%s was written with durability=none before the machine restarted; starting empty",
            directory.path,
        )
        directory.discard()


def _load(directory: SlabDirectory, capacity: int, *, synced: bool) -> tuple[Index, Page]:
    try:
        return _read(directory, synced=synced)
    except (Corrupt, Unavailable) as error:
        refused = getattr(error.__cause__, "code", 0)
        if _is_errno(refused):
            raise OSError(refused, os.strerror(refused)) from error
        reason = str(error) if isinstance(error, Corrupt) else "unreadable"
        _logger.warning(
            "the index of %s cannot be used (%s); starting empty",
            directory.path,
            error.__cause__ or error,
        )
        directory.discard(reason, capacity // KEEP_SHARE)
    return _read(directory, synced=synced)


def _is_errno(code: int) -> bool:
    """Say whether the system refused, which says nothing of the index; LMDB's are below zero."""
    return code > 0


def _read(directory: SlabDirectory, *, synced: bool) -> tuple[Index, Page]:
    entries = read_sound(directory.index)
    size = directory.index.stat().st_size if directory.index.exists() else 0
    return Index(directory.index, max(size, INDEX_FLOOR), synced=synced), entries


def _account(
    directory: SlabDirectory, capacity: int, index: Index, entries: Page, spare: int = 0
) -> tuple[Slabs, int, list[RecordId]]:
    """Return the account, the greatest sequence, and the names of entries that have to go.

    spare: bytes by which the index has to grow.
    """
    slabs = Slabs(capacity, FIXED_BYTES + directory.set_aside_bytes())
    segments = {segment.number: segment for segment in directory.segments()}
    kept = _whole(entries, segments)
    used = _slots(entries, kept)
    ages = _ages(entries, kept)
    if spare:
        size = slabs.index_bytes = index.size + spare
        surplus = _over(slabs, list(segments.values()), ages)
    else:
        surplus, size = _fitted(slabs, list(segments.values()), ages, index.size)
    kept &= ~np.isin(entries.where["segment"], list(surplus))
    slabs.index_bytes = size
    for number, segment in segments.items():
        slabs.next_number = max(slabs.next_number, number + 1)
        if number in surplus:
            (directory.path / segment.name).unlink()
            continue
        os.truncate(directory.path / segment.name, segment.length)  # a tail was no whole slot
        segment.occupy(used.get(number, set()))
        slabs.add(segment)
    dropped = [entries.names[at] for at in np.flatnonzero(~kept).tolist()]
    return slabs, int(entries.where["sequence"].max(initial=0)), dropped


def _without(
    dropped: Sequence[RecordId], directory: SlabDirectory, index: Index, size: int, *, synced: bool
) -> Index:
    """Return the index without some entries, at the size that it is charged for.

    It is the same one if that is not too large.
    """
    if dropped:
        _logger.warning("%s: %d records lost", directory.path, len(dropped))
    if size >= index.size:
        index.grow(size)
        index.commit(dict.fromkeys(dropped))
        return index
    gone = frozenset(dropped)
    lots = ([one for one in lot if one[0] not in gone] for lot in lots_of(index))
    try:
        remake(directory, size, lots)
    finally:
        index.close()
    return Index(directory.index, size, synced=synced)


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


def _ages(entries: Page, kept: NDArray[np.bool_]) -> dict[int, int]:
    """Return the last write into each segment that has records."""
    where = entries.where[kept]
    numbers, which = np.unique(where["segment"], return_inverse=True)
    last = np.zeros(len(numbers), np.uint64)
    np.maximum.at(last, which, where["sequence"])
    return dict(zip(numbers.tolist(), last.tolist(), strict=True))


def _fitted(
    slabs: Slabs, segments: Sequence[Segment], ages: Mapping[int, int], index_bytes: int
) -> tuple[set[int], int]:
    """Return the segments that have to go, and how large the index should be.

    An index that was made for more slots than there are is made anew where records would have to
    go for it, or where it takes more than twice what it should and there is room for both.
    """
    slabs.index_bytes = index_bytes
    surplus = _over(slabs, segments, ages)
    kept = [segment for segment in segments if segment.number not in surplus]
    if surplus.isdisjoint(ages) and slabs.charge_of(kept) <= slabs.capacity:
        wanted = index_bytes_for(sum(segment.slots for segment in kept))
        fits = slabs.charge_of(kept) + wanted <= slabs.capacity
        return surplus, wanted if fits and index_bytes > 2 * wanted else index_bytes
    slabs.index_bytes = INDEX_FLOOR
    surplus = _over(slabs, segments, ages)
    slots = sum(segment.slots for segment in segments if segment.number not in surplus)
    return surplus, min(index_bytes, index_bytes_for(slots))


def _over(slabs: Slabs, segments: Sequence[Segment], ages: Mapping[int, int]) -> set[int]:
    """Return the segments that have to go: cut to nothing, or above the capacity.

    Empty ones go first, then those that were last written to the longest ago.
    """
    over = {segment.number for segment in segments if segment.slots == 0}
    kept = [segment for segment in segments if segment.slots]
    kept.sort(key=lambda segment: (ages.get(segment.number, -1), segment.number))
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
