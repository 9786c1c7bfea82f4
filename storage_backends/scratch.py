"""Page-aligned memory for O_DIRECT: header pages, and the way of buffers that are not aligned."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator

import numpy as np

from kvtier.storage_backends.slab import PAGE

__all__ = ["Scratch", "ScratchPool", "copy", "is_aligned"]


class Scratch:
    """A page-aligned buffer of `size` bytes, private to this process."""

    __slots__ = ("size", "view")

    def __init__(self, size: int) -> None:
        self.size = size
        self.view = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


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
        with self._guard:
            fitting = (i for i, idle in enumerate(self._idle) if idle.size >= size)
            at = next(fitting, None)
            scratch = None if at is None else self._idle.pop(at)
        scratch = scratch or Scratch(size)
        try:
            yield scratch.view[:size]
        finally:
            with self._guard:
                self._idle.append(scratch)
                self._idle.sort(key=lambda idle: idle.size)
                del self._idle[: -self._limit]


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
