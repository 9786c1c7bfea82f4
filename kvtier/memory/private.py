"""Host memory of one process: nobody else can map it, and the kernel has huge pages for it."""

from __future__ import annotations

import mmap
import os

from kvtier.memory.sealed import check_room


def private_memory(nbytes: int) -> mmap.mmap:
    """Return a mapping of `nbytes`, in whole pages, none of which is taken yet.

    Raises ConfigError where there is no room, and OSError where the system does not give it.
    """
    check_room(nbytes)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def fresh_id() -> int:
    """Return a number that no memfd and no other arena of this host has: of a file made for it."""
    fd = os.memfd_create("kvtier-number", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)
