"""The arena: host memory of one piece, cut into extents, each cut into equal slots.

The DRAM tier and the staging for slower tiers are the same slots. The memory is taken when the
arena opens, whole and exact, so that nothing can fail for want of it later. It is this process's
own, or a sealed memfd that others map too.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import logging
import mmap
import os
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ConfigError, MisuseError, ProtocolError
from kvtier.memory.numa import chosen_nodes, interleave
from kvtier.memory.private import fresh_id, private_memory
from kvtier.memory.sealed import PAGE_BYTES, no_memory, sealed_size
from kvtier.units import format_bytes, format_least

N = TypeVar("N", int, NDArray[np.int64])

_EXTENT_BYTES: Final = 64 << 20
_EXTENTS: Final = 64  # at least as many, where they are not below one slot
_BLOCK_BYTES: Final = 512  # stat(2), st_blocks
_MLOCK_ONFAULT: Final = 1  # mman-linux.h
_MADV_POPULATE_WRITE: Final = 23  # linux/mman.h; absent from the mmap module of 3.11
_log = logging.getLogger("kvtier")


class Slot(NamedTuple):
    """A place in the arena. `serial` differs each time the place is handed out."""

    offset: int
    nbytes: int
    serial: int


class Memory(Protocol):
    """An arena as copies see it."""

    @property
    def id(self) -> int:
        """What plans name it by; 0 for none."""
        ...

    def of(self, arena: int, plan: int) -> NDArray[np.uint8] | None:
        """Return the bytes [n] of the arena that a plan names, n 0 once it is closed.

        None where such an arena may have been, or may come, or where that plan's slots may be
        others' by now. Raises ProtocolError where a plan of it can only be a mistake.
        """
        ...


def slot_bytes_for(part_bytes: N) -> N:
    """Return the bytes of a slot for a part, or of many: whole pages, for O_DIRECT."""
    return -(-part_bytes // PAGE_BYTES) * PAGE_BYTES


class _Extent:
    """A run of the arena, cut for one slot size while any of its slots is in use.

    foreign: ranges inside it, from and to, that were handed out before this arena was opened.
    """

    __slots__ = ("first", "foreign", "free", "nbytes", "serials", "slot_bytes", "used")

    def __init__(self, first: int, nbytes: int) -> None:
        self.first = first
        self.nbytes = nbytes
        self.slot_bytes = PAGE_BYTES
        self.free = array("q")  # numbers of slots
        self.serials = array("q")  # of each slot, 0 for a free one
        self.used = 0
        self.foreign: dict[int, int] = {}

    def cut(self, slot_bytes: int) -> None:
        """Cut the empty extent anew."""
        self.slot_bytes = slot_bytes
        count = self.nbytes // slot_bytes
        self.free = array("q", filter(self.clear, reversed(range(count))))
        self.serials = array("q", bytes(8 * count))

    def clear(self, at: int) -> bool:
        """Say whether a slot lies outside of all foreign ranges."""
        start = self.first + at * self.slot_bytes
        stop = start + self.slot_bytes
        return not any(low < stop and start < high for low, high in self.foreign.items())

    def covered(self, slot_bytes: int) -> bool:
        """Say whether it is cut for this size, and foreign ranges leave no slot of it."""
        return bool(self.foreign and self.serials) and (
            self.slot_bytes == slot_bytes and not self.free
        )

    def regain(self, start: int) -> bool:
        """End a foreign range; say whether it gave slots back."""
        stop = self.foreign.pop(start)
        first = max(start - self.first, 0) // self.slot_bytes
        last = min(-(-(stop - self.first) // self.slot_bytes), len(self.serials))
        gained = [at for at in range(first, last) if self.clear(at)]
        self.free.extend(gained)
        return bool(gained)


class Arena:
    """Host memory for slots. Not thread-safe: the Catalog calls it under its lock.

    capacity: bytes, cut down to whole pages and never exceeded. part_bytes: see ``cut_for``;
    with none, no slot can be had before that is called.
    fd: of memory that ``sealed_memory`` took, which others may have open; its size is what counts
    then, and the Arena closes it. Without, the memory is private: the kernel gives a process huge
    pages of its own where it gives none of a memfd, and O_DIRECT pins those at less cost.
    nodes: of the host's memory, that pages come from; all, where none is named.
    """

    def __init__(
        self,
        capacity: int,
        part_bytes: Sequence[int] = (),
        fd: int | None = None,
        nodes: Sequence[int] = (),
    ) -> None:
        if fd is None:
            _check_chunk(capacity, part_bytes)
        spread = chosen_nodes(nodes)
        self.fd = -1 if fd is None else fd
        self.closed = False
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_file)
            self.id = fresh_id() if fd is None else os.fstat(fd).st_ino
            wanted = capacity if fd is None else sealed_size(fd)
            self.nbytes = wanted // PAGE_BYTES * PAGE_BYTES
            try:
                self._map = (
                    private_memory(self.nbytes) if fd is None else mmap.mmap(fd, self.nbytes)
                )
                self._map.madvise(mmap.MADV_DONTFORK)
                with contextlib.suppress(OSError):  # a kernel without; it is advice, no more
                    self._map.madvise(mmap.MADV_HUGEPAGE)
                self.memory: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
                self._spread(spread, chosen=bool(nodes))
                self.pinned = self._take()
            except OSError as error:
                raise no_memory(self.nbytes, error) from error
            undo.pop_all()
        self._view = memoryview(self._map)
        self._extents: list[_Extent] = []
        self._step = self.nbytes
        self._empty: dict[int, None] = {}  # extents with no slot in use
        self._open: dict[int, dict[int, None]] = {}  # by slot size, extents with a free slot
        self._adopted: dict[int, Slot] = {}  # by offset
        self._taken: list[tuple[int, int]] = []  # where they lie, sorted, until extents are cut
        self._serial = 0
        self.used_bytes = 0
        self.cut_for(part_bytes)

    def cut_for(self, part_bytes: Sequence[int]) -> None:
        """Cut extents for the parts of one chunk, unless it is so cut that they fit.

        part_bytes: of each part. The largest wastes least, and extents are so many that sizes can
        mix. Raises ConfigError where the memory is below one chunk, and where slots are in use
        and the largest part does not fit.
        """
        if not part_bytes or self.fits(max(part_bytes)):
            return
        _check_chunk(self.nbytes, part_bytes)
        if any(extent.used for extent in self._extents):
            raise ConfigError(
                f"parts of {format_bytes(max(part_bytes))} do not fit this cache's memory, which "
                "was cut for smaller ones; open the cache with the namespace that has the largest "
                "first, or clear dram"
            )
        largest = slot_bytes_for(max(part_bytes))
        step = max(1, min(_EXTENT_BYTES, self.nbytes // _EXTENTS) // largest) * largest
        self._step = step
        self._extents = [
            _Extent(first, min(step, self.nbytes - first)) for first in range(0, self.nbytes, step)
        ]
        self._empty = dict.fromkeys(range(len(self._extents)))
        self._open = {}
        for slot in self._adopted.values():
            for number in self._across(slot):
                self._extents[number].foreign[slot.offset] = slot.offset + slot.nbytes

    def adopt(self, slot: Slot) -> None:
        """Take it that a slot was handed out by an earlier Arena of this memory: it is in use.

        Raises MisuseError for what lies outside, or across another such slot, and once extents
        are cut.
        """
        start, stop = slot.offset, slot.offset + slot.nbytes
        inside = 0 <= start < stop <= self.nbytes and slot.serial > 0
        if not inside or start % PAGE_BYTES or slot.nbytes % PAGE_BYTES:
            raise MisuseError(f"{slot} is no slot of this memory")
        if self._extents:
            raise MisuseError("extents are cut already; adopt slots before that")
        at = bisect.bisect(self._taken, (start, stop))
        around = self._taken[max(at - 1, 0) : at + 1]
        if any(low < stop and start < high for low, high in around):
            raise MisuseError(f"{slot} lies across another that is in use")
        self._taken.insert(at, (start, stop))
        self._adopted[start] = slot
        self._serial = max(self._serial, slot.serial)
        self.used_bytes += slot.nbytes

    def allocate(self, nbytes: int) -> Slot | None:
        """Return a slot for a part of `nbytes`, or None when no place is free.

        It looks at two extents at most, however many there are.
        """
        size = slot_bytes_for(nbytes)
        extents = self._open.setdefault(size, {})
        if not extents and not self._cut_empty(size):
            return None
        number = next(reversed(extents))
        extent = self._extents[number]
        at = extent.free.pop()
        extent.used += 1
        self._empty.pop(number, None)
        if not extent.free:
            del extents[number]
        self._serial += 1
        extent.serials[at] = self._serial
        self.used_bytes += size
        return Slot(extent.first + at * size, size, self._serial)

    def free(self, slot: Slot) -> None:
        """Take a slot back. Raises MisuseError for one that is not in use."""
        if not self.holds(slot):
            raise MisuseError(f"{slot} is not in use")
        if slot.offset in self._adopted:
            self._give_back(slot)
            return
        number = slot.offset // self._step
        extent = self._extents[number]
        at = (slot.offset - extent.first) // slot.nbytes
        extent.serials[at] = 0
        extent.free.append(at)
        extent.used -= 1
        self.used_bytes -= slot.nbytes
        self._open[slot.nbytes][number] = None
        if not extent.used:
            self._empty[number] = None

    def fits(self, nbytes: int) -> bool:
        """Say whether a part of `nbytes` could have a slot, were the arena empty."""
        return bool(self._extents) and slot_bytes_for(nbytes) <= self._extents[0].nbytes

    def holds(self, slot: Slot) -> bool:
        """Say whether this very hand-out of the slot is still in use."""
        if slot.offset in self._adopted:
            return self._adopted[slot.offset] == slot
        if not 0 <= slot.offset < self.nbytes or not self._extents:
            return False
        extent = self._extents[slot.offset // self._step]
        at, odd = divmod(slot.offset - extent.first, extent.slot_bytes)
        if odd or slot.nbytes != extent.slot_bytes or at >= len(extent.serials):
            return False
        return slot.serial == extent.serials[at] != 0

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the writable bytes at `offset`, without a copy."""
        return self._view[offset : offset + nbytes]

    def of(self, arena: int, plan: int) -> NDArray[np.uint8]:
        """See Memory."""
        del plan
        if arena != self.id:
            raise ProtocolError("the plan belongs to another arena")
        return self.memory

    @property
    def slots_in_use(self) -> int:
        """Slots handed out and not taken back."""
        return sum(extent.used for extent in self._extents) + len(self._adopted)

    def close(self) -> None:
        """Give the memory back once the last view of it is gone. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._close_file()
        self._view.release()
        self.memory = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # a view is still held: the mapping goes with it
            self._map.close()
        del self._map

    def _close_file(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _cut_empty(self, slot_bytes: int) -> bool:
        """Cut an extent with no slot in use for this size; False when there is none."""
        for number in self._empty:
            extent = self._extents[number]
            if extent.nbytes < slot_bytes or extent.covered(slot_bytes):
                continue  # only the last may be too short
            self._open.get(extent.slot_bytes, {}).pop(number, None)
            extent.cut(slot_bytes)
            if extent.free:
                self._open[slot_bytes][number] = None
                return True
        return False

    def _across(self, slot: Slot) -> range:
        """Return the numbers of the extents in which an adopted slot lies."""
        if not self._extents:
            return range(0)
        return range(slot.offset // self._step, (slot.offset + slot.nbytes - 1) // self._step + 1)

    def _give_back(self, slot: Slot) -> None:
        """End the use of an adopted slot; what it kept of extents is free."""
        del self._adopted[slot.offset]
        self.used_bytes -= slot.nbytes
        for number in self._across(slot):
            extent = self._extents[number]
            if extent.regain(slot.offset):
                self._open.setdefault(extent.slot_bytes, {})[number] = None

    def _spread(self, nodes: Sequence[int], *, chosen: bool) -> None:
        """Spread the pages over memory nodes, where there are several or one was chosen."""
        if len(nodes) < 2 and not chosen:  # noqa: PLR2004  (the only one has them all)
            return
        try:
            interleave(self.memory.ctypes.data, self.nbytes, nodes)
        except OSError as error:
            _log.warning(
                "dram is not spread over the NUMA nodes %s (%s); allow mbind, which containers "
                "may do by CAP_SYS_NICE",
                ", ".join(map(str, nodes)),
                error.strerror,
            )

    def _take(self) -> bool:
        """Take all pages, locked where the limit allows it. Raises OSError.

        Where another arena has taken them, they are not touched: mapping them page by page would
        keep a server from its clients for seconds, and somebody may be copying there.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self.memory.ctypes.data)
        taken = self.fd >= 0 and _all_taken(self.fd)
        flags = ctypes.c_uint(_MLOCK_ONFAULT if taken else 0)
        if libc.mlock2(address, ctypes.c_size_t(self.nbytes), flags) == 0:
            return True
        _log.warning(
            "dram is not pinned (mlock of %s: %s); raise the limit with `ulimit -l` or "
            "LimitMEMLOCK= to keep it out of swap",
            format_bytes(self.nbytes),
            os.strerror(ctypes.get_errno()),
        )
        if taken:
            return False
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.memory[::PAGE_BYTES] = 0  # Linux before 5.14
        return False


def _all_taken(fd: int) -> bool:
    """Say whether all pages of a memfd have been taken before."""
    found = os.fstat(fd)
    return found.st_blocks * _BLOCK_BYTES >= found.st_size


def _check_chunk(capacity: int, part_bytes: Sequence[int]) -> None:
    """Refuse memory that would never hold one chunk."""
    need = max(sum(map(slot_bytes_for, part_bytes)), PAGE_BYTES)
    if capacity // PAGE_BYTES * PAGE_BYTES < need:
        raise ConfigError(
            f"dram capacity {format_bytes(capacity)} is below one chunk of {format_least(need)}; "
            "give it at least that, better a hundred times as much"
        )
