"""A Store whose reads are as slow as is wanted: for what must be decided by what a tier costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from kvtier.deadline import current
from kvtier.identity.record import RecordId
from kvtier.tiers.store import Read, Status, Store

_NEVER: Final = float("inf")


class Slowed:
    """Gives the reads of an open Store `bytes_per_s` in sum, and each call `latency`.

    Where that Store heeds a Deadline, a read that would take longer fails then.

    Both may be changed at any time. Safe from any thread: reads at once queue, as on one wire.
    """

    def __init__(self, store: Store, bytes_per_s: float = _NEVER, latency: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency = latency
        self._read = store.read_many
        self._deadlines = store.capabilities.deadlines
        self._lock = threading.Lock()
        self._free = 0.0  # when the wire is
        store.read_many = self._read_slowly  # type: ignore[method-assign]

    def _read_slowly(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        now = time.monotonic()
        reads = self._read(ids, into)
        nbytes = sum(read.header.stored_bytes for read in reads if read.header is not None)
        with self._lock:
            self._free = max(self._free, now) + nbytes / self.bytes_per_s
            until = self._free + self.latency
        left = current().left(time.monotonic()) if self._deadlines else _NEVER
        pause = max(until - time.monotonic(), 0.0)
        time.sleep(max(min(pause, left), 0.0))
        return reads if pause <= left else [Read(Status.FAILED)] * len(reads)
