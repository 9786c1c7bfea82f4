"""The arena: one sealed memfd of host memory, cut into extents, each cut into equal slots.

The DRAM tier and the staging for slower tiers are the same slots. The memory is taken when the
arena opens, whole and exact, so that nothing can fail for want of it later.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ConfigError, MisuseError
from kvtier.units import format_bytes, format_least

__all__ = ["PAGE_BYTES", "Arena", "Memory", "Slot", "available_bytes", "slot_bytes_for"]

PAGE_BYTES: Final = 4096

_EXTENT_BYTES: Final = 64 << 20
_EXTENTS: Final = 64  # at least as many, where they are not below one slot
_MADV_POPULATE_WRITE: Final = 23  # linux/mman.h; absent from the mmap module of 3.11
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_log = logging.getLogger("kvtier")


class Slot(NamedTuple):
    """A place in the arena. `serial` differs each time the place is handed out."""

    offset: int
    nbytes: int
    serial: int


class Memory(Protocol):
    """An arena as copies see it: its bytes [n], n 0 once it is closed."""

    memory: NDArray[np.uint8]


def slot_bytes_for(part_bytes: int) -> int:
    """Return the bytes of a slot for a part: whole pages, for O_DIRECT."""
    return -(-part_bytes // PAGE_BYTES) * PAGE_BYTES


class _Extent:
    """A run of the arena, cut for one slot size while any of its slots is in use."""

    __slots__ = ("first", "free", "nbytes", "serials", "slot_bytes", "used")

    def __init__(self, first: int, nbytes: int) -> None:
        self.first = first
        self.nbytes = nbytes
        self.slot_bytes = PAGE_BYTES
        self.free = array("q")  # numbers of slots
        self.serials = array("q")  # of each slot, 0 for a free one
        self.used = 0

    def cut(self, slot_bytes: int) -> None:
        """Cut the empty extent anew."""
        self.slot_bytes = slot_bytes
        count = self.nbytes // slot_bytes
        self.free = array("q", reversed(range(count)))
        self.serials = array("q", bytes(8 * count))


class Arena:
    """Host memory for slots. Not thread-safe: the Catalog calls it under its lock.

    capacity: bytes, cut down to whole pages and never exceeded. part_bytes: of each part of one
    chunk; extents are cut so that the largest wastes least, and so many that sizes can mix.
    """

    def __init__(self, capacity: int, part_bytes: Sequence[int]) -> None:
        self.nbytes = capacity // PAGE_BYTES * PAGE_BYTES
        sizes = [slot_bytes_for(size) for size in part_bytes]
        if self.nbytes < sum(sizes):
            raise ConfigError(
                f"dram capacity {format_bytes(capacity)} is below one chunk of "
                f"{format_least(sum(sizes))}; give it at least that, better a hundred times as much"
            )
        available = available_bytes()
        if self.nbytes > available:
            raise ConfigError(
                f"dram capacity {format_bytes(capacity)} is more than the "
                f"{format_bytes(available)} of memory available here; ask for less"
            )
        self.fd = os.memfd_create("kvtier-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.fd, self.nbytes)
            self._map.madvise(mmap.MADV_DONTFORK)
            self.memory: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
            self.pinned = self._take()
        except OSError as error:
            os.close(self.fd)
            raise ConfigError(
                f"cannot take {format_bytes(self.nbytes)} of memory for dram "
                f"({error.strerror}; {format_bytes(available)} available); ask for less"
            ) from error
        self._view = memoryview(self._map)
        step = max(1, min(_EXTENT_BYTES, self.nbytes // _EXTENTS) // max(sizes)) * max(sizes)
        self._extents = [
            _Extent(first, min(step, self.nbytes - first)) for first in range(0, self.nbytes, step)
        ]
        self._step = step
        self._empty = dict.fromkeys(range(len(self._extents)))  # extents with no slot in use
        self._open: dict[int, dict[int, None]] = {}  # by slot size, extents with a free slot
        self._serial = 0
        self.used_bytes = 0

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
        return slot_bytes_for(nbytes) <= self._extents[0].nbytes

    def holds(self, slot: Slot) -> bool:
        """Say whether this very hand-out of the slot is still in use."""
        if not 0 <= slot.offset < self.nbytes:
            return False
        extent = self._extents[slot.offset // self._step]
        at, odd = divmod(slot.offset - extent.first, extent.slot_bytes)
        if odd or slot.nbytes != extent.slot_bytes or at >= len(extent.serials):
            return False
        return slot.serial == extent.serials[at] != 0

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the writable bytes at `offset`, without a copy."""
        return self._view[offset : offset + nbytes]

    @property
    def slots_in_use(self) -> int:
        """Slots handed out and not taken back."""
        return sum(extent.used for extent in self._extents)

    def close(self) -> None:
        """Give the memory back once the last view of it is gone. Idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._view.release()
        self.memory = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # a view is still held: the mapping goes with it
            self._map.close()
        del self._map

    def _cut_empty(self, slot_bytes: int) -> bool:
        """Cut an extent with no slot in use for this size; False when there is none."""
        fits = (number for number in self._empty if self._extents[number].nbytes >= slot_bytes)
        number = next(fits, None)  # only the last extent may be too short
        if number is None:
            return False
        extent = self._extents[number]
        self._open.get(extent.slot_bytes, {}).pop(number, None)
        extent.cut(slot_bytes)
        self._open[slot_bytes][number] = None
        return True

    def _take(self) -> bool:
        """Fault all pages in, locked where the limit allows it. Raises OSError."""
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self.memory.ctypes.data)
        if libc.mlock(address, ctypes.c_size_t(self.nbytes)) == 0:
            return True
        _log.warning(
            "dram is not pinned (mlock of %s: %s); raise the limit with `ulimit -l` or "
            "LimitMEMLOCK= to keep it out of swap",
            format_bytes(self.nbytes),
            os.strerror(ctypes.get_errno()),
        )
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.memory[::PAGE_BYTES] = 0  # Linux before 5.14
        return False


def available_bytes(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that a new arena may take: of the host, of this cgroup and those above."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    inside = ""
    with contextlib.suppress(OSError):
        inside = (proc / "self" / "cgroup").read_text().partition("0::/")[2].strip()
    for folder in (root / inside, *(root / inside).parents):
        if folder.is_relative_to(root):
            with contextlib.suppress(OSError, ValueError, KeyError):  # no limit, or no cgroup v2
                available = min(available, _cgroup_room(folder))
    return max(available, 0)


def _cgroup_room(folder: Path) -> int:
    """Return what a cgroup may still take; the page cache that counts in it can be taken back."""
    limit = int((folder / "memory.max").read_text())
    lines = (folder / "memory.stat").read_text().splitlines()
    stat = {name: int(value) for name, value in map(str.split, lines)}
    used = int((folder / "memory.current").read_text())
    return limit - used + stat["inactive_file"] + stat["active_file"]
