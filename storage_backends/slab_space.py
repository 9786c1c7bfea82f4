"""Where slots come from: segments made and removed, and an index no larger than they need."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvtier.clock import Clock
from kvtier.errors import Unavailable
from kvtier.events import note
from kvtier.storage_backends.slab import NO_ROOM, Segment
from kvtier.storage_backends.slab_batch import Batch
from kvtier.storage_backends.slab_files import SegmentFiles
from kvtier.storage_backends.slab_recovery import Recovered
from kvtier.storage_backends.slab_renewal import by_age, draft_bytes, lots_of, renewed

_logger = logging.getLogger(__name__)
_LOG_SECONDS: Final = 60.0
_RETRY_SECONDS: Final = 15.0


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
    before `_lock` by whoever commits, or makes or removes segments or the index. So the bytes of a
    segment that is no longer in the account are given to nobody before its file is gone.
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
        going = self._going(())
        while self._disk_full or self._slabs.plan(stride) is None:
            if not self._let_go(going):
                break

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

    def _renew(self, full: Batch | None = None) -> bool:
        """See `renew`. full: what finds no place in the index, not even to delete.

        Then records go where there is no other room, those of whole segments.
        """
        going = self._going(by_age(self._index, full) if full else ())
        size = self._make_room_for_two(going)
        while size:
            try:
                self._files.sweep()
                there = self._slabs.segments if full else None
                lots = lots_of(self._index, there)
                new = renewed(self._directory, size, lots, synced=self._synced)
                break
            except (OSError, Unavailable) as error:
                no_room = isinstance(error, OSError) and error.errno in NO_ROOM
                if no_room and self._let_go(going):
                    size = self._make_room_for_two(going)
                    continue
                self._log.warn("the index could not be written anew", error)
                self._again = self._clock() + _RETRY_SECONDS
                return False
        else:
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

    def _make_room_for_two(self, going: Iterator[Segment]) -> int:
        """Return how large a new index may be beside the old one, 0 where there is no room."""
        slabs = self._slabs
        while slabs.capacity - slabs.charged < draft_bytes(slabs.slots):
            if not self._let_go(going):
                return 0
        return min(slabs.index_wanted, slabs.capacity - slabs.charged)

    def _let_go(self, going: Iterator[Segment]) -> bool:
        """Remove the next segment that can go; say whether there was one."""
        with self._lock:
            segment = next(going, None)
            if segment is None:
                return False
            self._slabs.remove(segment)
        self._files.remove(segment)
        return True

    def _going(self, others: Sequence[tuple[int, int]]) -> Iterator[Segment]:
        """Yield, under the lock, segments that can go: empty ones, then those of `others` at rest.

        others: their numbers, and how many slots of each nobody would miss.
        """
        for empty in self._slabs.empty_segments():
            if empty.empty:  # still, whoever had the lock meanwhile
                yield empty
        for number, known in others:
            segment = self._slabs.segments.get(number)
            if segment is not None and segment.is_at_rest(known):
                yield segment
