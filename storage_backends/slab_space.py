"""Where slots come from: segments made and removed, and an index no larger than they need."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

from kvtier.clock import Clock
from kvtier.errors import Unavailable
from kvtier.events import note
from kvtier.storage_backends.slab import NO_ROOM, Segment
from kvtier.storage_backends.slab_files import SegmentFiles
from kvtier.storage_backends.slab_recovery import Recovered
from kvtier.storage_backends.slab_renewal import draft_bytes, renewed

__all__ = ["Log", "Space"]

_logger = logging.getLogger(__name__)
_LOG_SECONDS: Final = 60.0
_RETRY_SECONDS: Final = 30.0


class Log:
    """Warnings about one directory, at most one a minute."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._last = float("-inf")

    def warn(self, what: str, error: Exception) -> str:
        """Say what went wrong and why, unless something was said just now; return the words."""
        now, text = self._clock(), f"{self._path}: {what}: {error}"
        note(text)
        if now - self._last >= _LOG_SECONDS:
            self._last = now
            # As text: whoever keeps the record would keep the buffers of the error's traceback.
            _logger.warning("%s", text)
        return text


class Space:
    """The index and the segments of an open store, within its capacity. Thread-safe.

    `_lock` is held for microseconds and never during I/O on segments. `_committing` is taken
    before `_lock` by whoever commits, or makes or removes segments or the index.
    """

    def __init__(
        self, found: Recovered, files: SegmentFiles, log: Log, clock: Clock, *, synced: bool
    ) -> None:
        """Go on from what recovery found. synced: commits reach the disk."""
        self._directory = found.directory
        self._index = found.index
        self._slabs = found.slabs
        self._files = files
        self._log = log
        self._clock = clock
        self._synced = synced
        self._lock = threading.Lock()
        self._committing = threading.Lock()
        self._disk_full: OSError | None = None  # before the capacity is
        self._again = float("-inf")  # when an index that could not be written anew is tried again

    def _is_empty(self) -> bool:
        with self._lock:
            return all(segment.empty for segment in self._slabs.segments.values())

    def _extend(self, stride: int) -> tuple[Segment, int] | None:
        """Take a slot, of a new segment if the capacity allows one."""
        with self._lock:
            taken = self._slabs.take(stride, self._clock())
            segment = None if taken else self._slabs.plan(stride)
        if segment is None:
            return taken
        self._files.sweep()
        with self._lock:
            self._index.grow(self._slabs.index_for(segment))
        try:
            self._files.create(segment)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            # Slots that wait for a commit may still serve, and empty segments can go.
            self._log.warn("the disk is full below the capacity", error)
            self._disk_full = error
            return None
        self._disk_full = None
        with self._lock:
            self._slabs.add(segment)
            return self._slabs.take(stride, self._clock())

    def _reclaim(self, stride: int) -> None:
        """Remove empty segments until one of this stride can be made, on a full disk all."""
        with self._lock:
            for segment in self._slabs.empty_segments():
                if self._slabs.plan(stride) is not None and not self._disk_full:
                    break
                self._slabs.remove(segment)
                self._files.remove(segment)

    # --------------------------------------------------------------------------------- a new index

    def renew(self) -> bool:
        """Write the index anew, no larger than its slots need; say whether that was done.

        As long as there are two, both count: empty segments go for that. Without room for it
        nothing is done; the removal of records makes some. Blocks, and reading goes on.
        """
        with self._committing:
            return self._renew()

    def _slim(self) -> None:
        """Do so where it takes more than twice what it should, now that there is no other room."""
        too_large = self._slabs.index_bytes > 2 * self._slabs.index_wanted
        if too_large and self._clock() >= self._again:
            self._renew()

    def _renew(self) -> bool:
        with self._lock:
            size = self._make_room_for_two()
        if not size:
            return False
        try:
            self._files.sweep()
            new = renewed(self._directory, self._index, size, synced=self._synced)
        except (OSError, Unavailable) as error:
            self._log.warn("the index could not be written anew", error)
            self._again = self._clock() + _RETRY_SECONDS
            return False
        with self._lock:
            old, self._index = self._index, new
            self._slabs.index_bytes = self._slabs.index_wanted
            old.close()
        try:
            if self._synced:
                self._files.renamed()
                self._files.sync(())  # or the next commit does
            with self._lock:
                new.grow(self._slabs.index_bytes)
        except (OSError, Unavailable) as error:
            self._log.warn("a new index is not all it should be yet", error)
        return True

    def _make_room_for_two(self) -> int:
        """Return how large a new index may be beside the old one, 0 where there is no room."""
        slabs, empty = self._slabs, iter(self._slabs.empty_segments())
        while slabs.capacity - slabs.charged < draft_bytes(slabs.slots):
            segment = next(empty, None)
            if segment is None:
                return 0
            slabs.remove(segment)
            self._files.remove(segment)
        return min(slabs.index_wanted, slabs.capacity - slabs.charged)
