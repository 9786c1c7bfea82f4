"""A disk that fails on purpose: the I/O seam of the NVMe store, for tests of it and above it."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from kvtier.storage_backends.slab import PAGE, FileIO

Kind = Literal["open", "read", "write", "sync", "allocate", "any"]
Fault = int | Literal["short", "hang"]
KINDS: Final = ("open", "read", "write", "sync", "allocate")


class FaultyIO(FileIO):
    """Fails what it is told to; does all else. Thread-safe.

    calls: how many of each kind there were. hits: how many of them failed.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.hits = 0
        self._guard = threading.Lock()
        self._released = threading.Event()
        self._kind: str | None = None
        self._fault: Fault = 0
        self._left = 0.0
        self._times = 0.0

    def fail(self, kind: Kind, fault: Fault, at: int = 1, times: float = math.inf) -> None:
        """Let the `at`-th call of a kind from now on fail, and as many as `times` in a row.

        fault: an errno; ``short``, which moves a page or less and says so; or ``hang``, which does
        not return before `heal`. A short count is of reads and writes only.
        """
        with self._guard:
            self._kind, self._fault, self._left, self._times = kind, fault, at - 1, times
            self._released = threading.Event()

    def heal(self) -> None:
        """Let everything work again; calls that hang go on."""
        with self._guard:
            self._kind = None
        self._released.set()

    @property
    def armed(self) -> bool:
        """Say whether a fault is still to come."""
        with self._guard:
            return self._kind is not None and self._times > 0

    def open(self, path: Path, flags: int) -> int:
        """See FileIO."""
        self._enter("open")
        return super().open(path, flags)

    def pread(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See FileIO."""
        cut = self._enter("read")
        return super().pread(descriptor, _first(buffers) if cut else buffers, offset)

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See FileIO."""
        cut = self._enter("write")
        return super().pwrite(descriptor, _first(buffers) if cut else buffers, offset)

    def fdatasync(self, descriptor: int) -> None:
        """See FileIO."""
        self._enter("sync")
        super().fdatasync(descriptor)

    def fallocate(self, descriptor: int, length: int) -> None:
        """See FileIO."""
        self._enter("allocate")
        super().fallocate(descriptor, length)

    def _enter(self, kind: str) -> bool:
        """Fail if it is time to; say whether the call is to be short."""
        with self._guard:
            self.calls[kind] += 1
            fault, released = self._fault, self._released
            if not self._due(kind):
                return False
            self.hits += 1
        if fault == "short":
            return True
        if fault == "hang":
            released.wait()
            return False
        raise OSError(fault, os.strerror(fault))

    def _due(self, kind: str) -> bool:
        if self._kind not in (kind, "any") or self._times <= 0:
            return False
        if self._fault == "short" and kind not in ("read", "write"):
            return False
        if self._left:
            self._left -= 1
            return False
        self._times -= 1
        return True


def _first(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return the first page of more than one, or nothing."""
    total = sum(map(len, buffers))
    return [buffers[0][:PAGE]] if total > PAGE else [buffers[0][:0]]
