"""Slab segments: preallocated files cut into equal slots, and the account of their bytes.

A slot holds one record: a page with its header, then its payload rounded up to whole pages. All
slots of a segment have one stride. A segment changes its stride only by being removed once it is
empty; the bytes then serve another class.

Nothing in this module locks. The store guards it.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from kvtier.identity.record import CODEC_RAW, Header
from kvtier.units import format_bytes

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
"""What the system says when a disk, or the user's share of it, is full."""

PAGE: Final = 4096
"""Alignment of addresses, lengths and offsets: what O_DIRECT asks for on any common device."""

SLOT_CHARGE: Final = 1024
"""Index bytes charged for a slot. A B+tree of these entries takes 510 on average, 680 at worst;
the rest is room for the pages that a transaction copies."""

INDEX_FLOOR: Final = 512 * mmap.PAGESIZE
"""Index bytes charged whatever the slots: three generations of copied pages."""

_INDEX_STEP: Final = 16 * PAGE
_QUARANTINE: Final = 30.0  # seconds
_LONGEST_QUARANTINE: Final = 86_400.0
_MAX_SEGMENT: Final = 256 << 20
_SEGMENTS: Final = 128
_NAME: Final = re.compile(r"slab-(\d{8})-(\d{1,15})\.seg")


class FileIO:
    """The system calls on segments. Tests replace it to inject faults.

    Every method blocks, releases the GIL, and raises OSError.
    syncs: how many files of a commit are synced at a time; one at a time by the caller's thread.
    """

    syncs: int = 4

    def open(self, path: Path, flags: int) -> int:
        """Open a file, with mode 0600 if that creates it, and return its descriptor."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` from `offset`; return the bytes read, which may be fewer."""
        return os.preadv(descriptor, buffers, offset)

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write `buffers` at `offset`; return the bytes written, which may be fewer."""
        return os.pwritev(descriptor, buffers, offset)

    def fdatasync(self, descriptor: int) -> None:
        """Bring what was written to stable storage."""
        os.fdatasync(descriptor)

    def fallocate(self, descriptor: int, length: int) -> None:
        """Give a file `length` bytes that later writes cannot fail to find."""
        os.posix_fallocate(descriptor, 0, length)


def stride_of(stored_bytes: int) -> int:
    """Return the bytes of a slot for a payload of `stored_bytes`: header page and payload."""
    return PAGE + _pages(stored_bytes)


def stride_for(header: Header) -> int:
    """Return the bytes of a slot for a record.

    A raw record has a class of its size, which the records of its geometry share. What a codec
    leaves has any size: those classes are in steps of 1/16 of the power of two below.
    """
    if header.codec == CODEC_RAW:
        return stride_of(header.stored_bytes)
    return encoded_stride_of(header.stored_bytes)


def encoded_stride_of(stored_bytes: int) -> int:
    """Return the bytes of a slot for what a codec left."""
    if stored_bytes <= PAGE:
        return stride_of(stored_bytes)
    step = _pages((1 << (stored_bytes.bit_length() - 1)) >> 4)
    return PAGE + -(-stored_bytes // step) * step


def _pages(count: int) -> int:
    return -(-count // PAGE) * PAGE


class Segment:
    """One file of `slots` slots, each `stride` bytes.

    A slot that the device fails to write or read is in quarantine for a while once no entry leads
    to it: half a minute, twice as long after each further failure, a day at most. So a fault that
    passes is over soon, and a bad block costs few writes.
    """

    __slots__ = ("_bad", "_doomed", "_readers", "_resting", "free", "number", "slots", "stride")

    def __init__(self, number: int, stride: int, slots: int) -> None:
        self.number = number
        self.stride = stride
        self.slots = slots
        self.free = list(range(slots - 1, -1, -1))
        self._readers: dict[int, int] = {}
        self._doomed: set[int] = set()
        self._bad: dict[int, tuple[float, float]] = {}  # by slot: until when, and for how long
        self._resting: set[int] = set()  # in quarantine

    @classmethod
    def named(cls, name: str, length: int) -> Segment | None:
        """Return the segment that a file of this name and length is, None for a foreign file."""
        found = _NAME.fullmatch(name)
        if found is None or int(found[2]) < PAGE or int(found[2]) % PAGE:
            return None
        return cls(int(found[1]), int(found[2]), length // int(found[2]))

    @property
    def name(self) -> str:
        """The file's name: it tells number and stride, so that no other file has to."""
        return f"slab-{self.number:08d}-{self.stride}.seg"

    @property
    def length(self) -> int:
        """Bytes of the file."""
        return self.slots * self.stride

    @property
    def charge(self) -> int:
        """Bytes that the file may take on the disk, file system metadata included."""
        return self.cost(self.stride, self.slots)

    @staticmethod
    def cost(stride: int, slots: int) -> int:
        """Return the charge of a segment.

        Beyond its length: a directory entry and the blocks of its extent tree. Each slot written
        may split an extent in two, 12 bytes each, in blocks that may be half empty; a fragmented
        disk gives extents of its own.
        """
        length = stride * slots
        return length + _pages(2 * PAGE + 48 * slots + (length >> 14))

    @property
    def empty(self) -> bool:
        """No slot is live, being written, or read."""
        return len(self.free) + len(self._resting) == self.slots

    def is_at_rest(self, known: int) -> bool:
        """Say whether nobody reads in it, and all its taken slots are the `known` ones."""
        taken = self.slots - len(self.free) - len(self._resting)
        return not self._readers and taken == known

    def offset(self, slot: int) -> int:
        """Return where a slot begins in the file."""
        return slot * self.stride

    def occupy(self, used: set[int]) -> None:
        """Say which slots are live: all others are free."""
        self.free = [slot for slot in range(self.slots - 1, -1, -1) if slot not in used]

    def pin(self, slot: int) -> None:
        """Count a reader of a slot: it will not be reused while that one reads."""
        self._readers[slot] = self._readers.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        """A reader is done; a slot that was released meanwhile is free with its last reader."""
        self._readers[slot] -= 1
        if self._readers[slot]:
            return
        del self._readers[slot]
        if slot in self._doomed:
            self._doomed.remove(slot)
            self._give_back(slot)

    def release(self, slot: int) -> None:
        """Free a slot to which no index entry leads any more, at once or after its readers."""
        if slot in self._readers:
            self._doomed.add(slot)
        else:
            self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        if slot in self._bad:
            self._resting.add(slot)
        else:
            self.free.append(slot)

    def line_up(self) -> None:
        """Order the free slots, so that those taken after each other are neighbours."""
        self.free.sort(reverse=True)

    def fail(self, slot: int, now: float) -> None:
        """Note that the device failed a slot. now: seconds."""
        _, seconds = self._bad.get(slot, (0.0, _QUARANTINE / 2))
        seconds = min(2 * seconds, _LONGEST_QUARANTINE)
        self._bad[slot] = (now + seconds, seconds)

    def heal(self, slot: int) -> None:
        """Note that a slot was written."""
        self._bad.pop(slot, None)

    def end_quarantine(self, now: float) -> None:
        """Let slots be used whose time is over. Another failure makes it longer."""
        if not self._resting:
            return
        over = sorted(slot for slot in self._resting if self._bad[slot][0] <= now)
        self._resting.difference_update(over)
        self.free += over


class Slabs:
    """The segments of one store, within `capacity` bytes.

    fixed: bytes of everything that is neither a segment nor the index.
    """

    def __init__(self, capacity: int, fixed: int) -> None:
        self.capacity = capacity
        self.fixed = fixed
        self.index_bytes = INDEX_FLOOR
        self.segments: dict[int, Segment] = {}
        self.next_number = 1
        self._taken = 0
        self._slots = 0
        self._classes: dict[int, list[Segment]] = {}
        self._current: dict[int, Segment] = {}
        self._ranked: dict[int, list[Segment]] = {}  # those with free slots, the fullest last
        self._segment_bytes = min(_MAX_SEGMENT, capacity // _SEGMENTS)

    @property
    def charged(self) -> int:
        """Bytes charged to the capacity now."""
        return self.fixed + self.index_bytes + self._taken

    @property
    def index_wanted(self) -> int:
        """Bytes that the index needs for the slots that there are."""
        return index_bytes_for(self._slots)

    @property
    def slots(self) -> int:
        """Slots of all segments."""
        return self._slots

    def charge_of(self, segments: Collection[Segment]) -> int:
        """Return what would be charged if these were the segments."""
        index = max(self.index_bytes, index_bytes_for(sum(segment.slots for segment in segments)))
        return self.fixed + index + sum(segment.charge for segment in segments)

    def add(self, segment: Segment) -> None:
        """Take a segment into the account."""
        self.segments[segment.number] = segment
        self.next_number = max(self.next_number, segment.number + 1)
        self._classes.setdefault(segment.stride, []).append(segment)
        self._taken += segment.charge
        self._slots += segment.slots
        self.index_bytes = max(self.index_bytes, index_bytes_for(self._slots))

    def remove(self, segment: Segment) -> None:
        """Forget a segment whose file goes before another is made."""
        del self.segments[segment.number]
        self._classes[segment.stride].remove(segment)
        if self._current.get(segment.stride) is segment:
            del self._current[segment.stride]
        self._taken -= segment.charge
        self._slots -= segment.slots

    def take(self, stride: int, now: float) -> tuple[Segment, int] | None:
        """Return a free slot of this stride, from the fullest segment, so that others drain.

        now: seconds. Slots whose quarantine is over are used where there are no others.
        """
        segment = self._current.get(stride)
        if segment is None or not segment.free:
            segment = self._next(stride, now)
            if segment is None:
                return None
            self._current[stride] = segment
        return segment, segment.free.pop()

    def _next(self, stride: int, now: float) -> Segment | None:
        """Return the fullest segment with a free slot, as it was when they were looked through."""
        ranked = self._ranked.setdefault(stride, [])
        while ranked:
            segment = ranked.pop()
            if segment.free and self.segments.get(segment.number) is segment:
                return segment
        those = self._classes.get(stride, ())
        found = [one for one in those if one.free]
        if not found:
            for one in those:
                one.end_quarantine(now)
            found = [one for one in those if one.free]
        ranked += sorted(found, key=_free_slots, reverse=True)
        return ranked.pop() if ranked else None

    def freed(self, segments: Collection[Segment]) -> None:
        """Take it that slots of segments became free: they are put in order, and looked through."""
        for segment in segments:
            segment.line_up()
        self._ranked.clear()

    def plan(self, stride: int) -> Segment | None:
        """Return the segment of this stride that the capacity still allows, if any."""
        room = self.capacity - self.charged
        slots = min(max(1, self._segment_bytes // stride), max(0, room) // stride)
        while slots and self._price(stride, slots) > room:
            slots -= 1
        return Segment(self.next_number, stride, slots) if slots else None

    def fits(self, stride: int) -> bool:
        """Say whether an otherwise empty store would hold one slot of this stride."""
        floor = max(self.index_bytes, index_bytes_for(1))
        return self.fixed + floor + Segment.cost(stride, 1) <= self.capacity

    def empty_segments(self) -> list[Segment]:
        """Return the segments that can be removed, oldest first."""
        return [segment for segment in self.segments.values() if segment.empty]

    def index_for(self, segment: Segment) -> int:
        """Return the bytes that the index needs once `segment` is added."""
        return max(self.index_bytes, index_bytes_for(self._slots + segment.slots))

    def _price(self, stride: int, slots: int) -> int:
        index = max(self.index_bytes, index_bytes_for(self._slots + slots))
        return Segment.cost(stride, slots) + index - self.index_bytes

    def __str__(self) -> str:
        return f"{format_bytes(self.charged)} of {format_bytes(self.capacity)}"


def _free_slots(segment: Segment) -> int:
    return len(segment.free)


def index_bytes_for(slots: int) -> int:
    """Return the bytes of an index file for so many slots."""
    wanted = INDEX_FLOOR + slots * SLOT_CHARGE
    return -(-wanted // _INDEX_STEP) * _INDEX_STEP
