"""The daemon's arena, mapped into this process by its descriptor."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ProtocolError

_MADV_POPULATE_WRITE: Final = 23  # linux/mman.h; absent from the mmap module of 3.11
_STEP_BYTES: Final = 64 << 20
_NONE: Final = (0, 0, np.empty(0, np.uint8))
_libc: Final = ctypes.CDLL(None)


class MappedArena:
    """See Memory. One arena at a time, or none: then `id` is 0.

    A forked child has no such memory. Copies in flight keep what they copy from mapped: an arena
    that is let go leaves with the last of them. `map` and `unmap` come from one thread; what they
    set may be read from any.
    """

    def __init__(self) -> None:
        self._mapped: tuple[int, int, NDArray[np.uint8]] = _NONE  # one word: readers take no lock

    @property
    def id(self) -> int:
        """See Memory."""
        return self._mapped[0]

    def of(self, arena: int, plan: int) -> NDArray[np.uint8] | None:
        """See Memory."""
        here, first, memory = self._mapped
        return memory if here == arena and plan >= first else None

    def map(self, fd: int, first: int = 0) -> None:
        """Map an arena, in place of the one before; `fd` is taken over.

        first: of the plans that may be executed; the slots of earlier ones may be others' by now.

        Blocks while the pages are entered, without the GIL. Raises ProtocolError for memory that
        could be taken back, and OSError.
        """
        self.unmap()
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK:
                raise ProtocolError("the daemon's arena may shrink while it is mapped: not sealed")
            status = os.fstat(fd)
            mapping = mmap.mmap(fd, status.st_size)
        finally:
            os.close(fd)
        mapping.madvise(mmap.MADV_DONTFORK)
        memory = np.frombuffer(mapping, np.uint8)
        for start in range(0, memory.size, _STEP_BYTES):
            address = ctypes.c_void_p(memory.ctypes.data + start)
            count = ctypes.c_size_t(min(_STEP_BYTES, memory.size - start))
            if _libc.madvise(address, count, _MADV_POPULATE_WRITE):
                break  # Linux before 5.14: the first touch enters each page
        self._mapped = (status.st_ino, first, memory)

    def unmap(self) -> bool:
        """Let the arena go; say whether there was one. Idempotent."""
        had = bool(self.id)
        self._mapped = _NONE
        return had
