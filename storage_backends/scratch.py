"""Page-aligned memory for O_DIRECT: header pages, and the way of buffers that are not aligned."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import operator
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np

from kvtier.storage_backends.slab import PAGE

_SIZE: Final = operator.attrgetter("size")


class Scratch:
    """A page-aligned buffer of `size` bytes, private to this process."""

    __slots__ = ("size", "view")

    def __init__(self, size: int) -> None:
        self.size = size
        taken = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without; O_DIRECT pins page by page
            taken.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(taken)


class ScratchPool:
    """Buffers that were used before and are mapped already. Thread-safe; never waits.

    It keeps at most `limit` of them, the large ones first: as many as calls run at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._guard = threading.Lock()
        self._idle: list[Scratch] = []  # by size

    @contextlib.contextmanager
    def borrow(self, size: int) -> Iterator[memoryview]:
        """Lend a buffer of `size` bytes, the smallest that is large enough."""
        scratch = self.take(size)
        try:
            yield scratch.view[:size]
        finally:
            self.give(scratch)

    def take(self, size: int) -> Scratch:
        """Return a buffer of `size` bytes or more, the smallest there is, to be given back."""
        with self._guard:
            for at, idle in enumerate(self._idle):
                if idle.size >= size:
                    return self._idle.pop(at)
        return Scratch(size)

    def give(self, scratch: Scratch) -> None:
        """Take a buffer back."""
        with self._guard:
            bisect.insort(self._idle, scratch, key=_SIZE)
            if len(self._idle) > self._limit:
                del self._idle[0]


def is_aligned(buffer: memoryview) -> bool:
    """Say whether O_DIRECT can use a buffer: address and length are multiples of a page."""
    if len(buffer) % PAGE or not len(buffer):
        return False
    if buffer.readonly:
        address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    else:  # a fifth of the time
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return address % PAGE == 0


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes between views of one length, without the interpreter lock."""
    if len(source):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
