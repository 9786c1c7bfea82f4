"""Who owns which slot: the index, what is to be committed to it, and the free slots.

Publications and deletions are collected in a `Batch`, which readers look into before the index.
To commit a batch is to sync the segments that it wrote, then the index, and then to free the
slots that it made superfluous. Only so is an index entry gone, as durably as the mode says,
before its slot is written again.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Final

from kvtier.clock import Clock
from kvtier.errors import Unavailable
from kvtier.events import note
from kvtier.identity.record import RecordId
from kvtier.storage_backends.slab import Segment
from kvtier.storage_backends.slab_batch import Batch, Known
from kvtier.storage_backends.slab_files import Placed, SegmentFiles
from kvtier.storage_backends.slab_index import Entry, IndexFull, Page
from kvtier.storage_backends.slab_recovery import Recovered
from kvtier.storage_backends.slab_space import Log, Space

_BAD_SLOT: Final = (errno.EIO, errno.EREMOTEIO, errno.EILSEQ, errno.ENODATA)
"""What Linux makes of an error of a medium at one place (blk_status_to_errno)."""
_LATEST: Final = 1 << 62  # whatever the machine's clock says, there are numbers left above it


class Ledger(Space):
    """The records of an open store and its slots. Thread-safe.

    Methods raise Unavailable when the index does not answer.
    """

    def __init__(
        self,
        found: Recovered,
        files: SegmentFiles,
        log: Log,
        clock: Clock,
        wall: Callable[[], float],
        *,
        synced: bool,
    ) -> None:
        """Go on from what recovery found. synced: commits reach the disk."""
        super().__init__(found, files, log, clock, synced=synced)
        self._sequence = found.sequence
        self._wall = wall
        self._pending = Batch()
        self._in_commit = Batch()
        self._commits = 0  # that have ended

    # ------------------------------------------------------------------------------------ reading

    @property
    def pending(self) -> Batch:
        """The batch that collects now."""
        return self._pending

    def fits(self, stride: int) -> bool:
        """Say whether a slot of this stride could ever be had."""
        return self._slabs.fits(stride)

    def find(self, names: Sequence[RecordId]) -> list[Entry | None]:
        """Return the entries in force whose records are still there."""
        with self._lock:
            return self._still_there(self._find(names))

    def pin(self, names: Sequence[RecordId]) -> list[tuple[Segment, Entry] | None]:
        """Find records and keep their slots from being reused until they are unpinned."""
        with self._lock:
            pinned: list[tuple[Segment, Entry] | None] = []
            for entry in self._find(names):
                segment = self._slabs.segments.get(entry.segment) if entry else None
                if entry is None or segment is None:
                    pinned.append(None)
                    continue
                segment.pin(entry.slot)
                pinned.append((segment, entry))
        return pinned

    def unpin(self, pinned: Sequence[tuple[Segment, Entry] | None]) -> None:
        """End what `pin` began."""
        with self._lock:
            for segment, entry in filter(None, pinned):
                segment.unpin(entry.slot)

    def page(self, after: RecordId, limit: int) -> Page:
        """Return the next `limit` committed entries by name, after `after`."""
        with self._lock:
            return self._index.page(after, limit)

    def lot(self, after: RecordId, limit: int) -> list[tuple[RecordId, bytes]]:
        """Return the same with all that the index has of each."""
        with self._lock:
            return self._index.lot(after, limit)

    def changes(self) -> dict[RecordId, Entry | None]:
        """Return what no commit has brought into the index yet: None where an entry goes."""
        with self._lock:
            return self._in_commit.operations | self._pending.operations

    def uncommitted(self) -> dict[RecordId, Entry]:
        """Return the entries that no commit has brought into the index yet."""
        return {name: entry for name, entry in self.changes().items() if entry}

    def look(
        self, names: Sequence[RecordId], heads: Sequence[bytes]
    ) -> tuple[Known, dict[int, Batch | None]]:
        """Say what is known of records that are to be written; names: each once.

        Also which of them, by place, are there just so, and the batch that will commit each.
        """
        with self._lock:
            known = Known(names, self._index.find(names), self._commits)
            there: dict[int, Batch | None] = {}
            entries = self._still_there(self._in_force(names, known.indexed))
            for at, entry in enumerate(entries):
                if entry is not None and entry.head == heads[at]:
                    there[at] = self._batch_of(names[at])
            return known, there

    def _batch_of(self, name: RecordId) -> Batch | None:
        """Return the batch that says what is in force under a name, None where the index does."""
        if name in self._pending.operations:
            return self._pending
        return self._in_commit if name in self._in_commit.operations else None

    def _find(self, names: Sequence[RecordId]) -> list[Entry | None]:
        return self._in_force(names, self._index.find(names))

    def _in_force(
        self, names: Sequence[RecordId], indexed: list[Entry | None]
    ) -> list[Entry | None]:
        """Return the entries in force, of which the index has these."""
        pending, in_commit = self._pending.operations, self._in_commit.operations
        if not pending and not in_commit:
            return indexed
        return [
            pending[name] if name in pending else in_commit.get(name, entry)
            for name, entry in zip(names, indexed, strict=True)
        ]

    def _still_there(self, entries: Sequence[Entry | None]) -> list[Entry | None]:
        """Return None in place of those whose segment went for a new index that is yet to come."""
        segments = self._slabs.segments
        return [one if one is not None and one.segment in segments else None for one in entries]

    # ------------------------------------------------------------------------------------ changes

    def publish(self, placed: Sequence[Placed], known: Known) -> Batch:
        """Make records of a call visible, in this order. known: of all that it may write.

        Their payloads are written. All of them are visible, or Unavailable is raised.
        """
        with self._lock:
            now = min(int(self._wall() * 1e6), _LATEST)
            olds = self._replaced(known)
            batch = self._pending
            for one in placed:
                segment = one.segment
                self._sequence = max(self._sequence + 1, now)
                entry = Entry(segment.number, one.slot, self._sequence, one.head)
                self._enter(known.names[one.at], entry, olds[one.at])
                segment.heal(one.slot)
                batch.dirty[segment] = None
                batch.bytes += segment.stride
            return batch

    def _replaced(self, known: Known) -> list[Entry | None]:
        """Return the entries in force: looked up once more only if there was a commit meanwhile."""
        if known.commits != self._commits:
            return self._find(known.names)
        return self._in_force(known.names, known.indexed)

    def remove(self, names: Sequence[RecordId]) -> tuple[list[bool], Batch]:
        """Make records invisible; say which there were. Their slots wait for the commit."""
        with self._lock:
            there = dict(zip(names, self._find(names), strict=True))
            was = []
            for name in names:
                old = there.pop(name, None)
                was.append(old is not None)
                if old is not None:
                    self._enter(name, None, old)
            return was, self._pending

    def _enter(self, name: RecordId, entry: Entry | None, old: Entry | None) -> None:
        """Let an entry, or None, be in force in place of `old`."""
        batch = self._pending
        if not batch.operations:
            batch.since = self._clock()
        batch.operations.pop(name, None)  # the order of operations is the order of writes
        batch.operations[name] = entry
        segment = self._slabs.segments.get(old.segment) if old else None
        if old and segment:
            batch.releases.append((segment, old.slot))

    def abandon(self, segment: Segment, slot: int, error: BaseException) -> None:
        """Give back a slot that was taken and not published, for that reason."""
        with self._lock:
            if _is_bad(error):
                segment.fail(slot, self._clock())
            segment.release(slot)

    def blame(self, segment: Segment, slot: int, error: OSError) -> None:
        """Note why a slot could not be read: it may be bad, and is not used again for a while."""
        if _is_bad(error):
            with self._lock:
                segment.fail(slot, self._clock())

    # ---------------------------------------------------------------------------------- committing

    def commit(self, batch: Batch) -> None:
        """Commit a batch, unless another thread did while this one waited for its turn."""
        with self._committing:
            if not batch.settled:
                self._commit()
        if batch.failed:
            note(batch.cause)  # of this thread's call, too

    def _commit(self) -> None:
        with self._lock:
            batch = self._in_commit = self._pending
            self._pending = Batch()
        failed, unsynced = True, self._synced
        try:
            if self._synced:
                self._files.sync(batch.dirty)
            unsynced = False
            self._put(batch)
            failed = False
        except (OSError, Unavailable) as error:
            batch.cause = self._log.warn("a commit failed; the writes that it held are lost", error)
        finally:
            with self._lock:
                self._in_commit = Batch()
                self._commits += 1
                batch.failed = failed  # not before: a writer that does not wait may look meanwhile
                if unsynced:
                    self._withdraw_later(batch)
                if failed:
                    self._withdraw(batch)
                else:
                    for segment, slot in batch.releases:
                        segment.release(slot)
                    self._slabs.freed(dict(batch.releases))
                batch.settled = True

    def _put(self, batch: Batch) -> None:
        """Bring a batch into the index, into a new one if this one is full."""
        try:
            self._index.commit(batch.operations)
        except IndexFull as error:
            if self._clock() < self._again or not self._renew(batch):
                raise
            self._log.warn("made anew, without some records where there was no other room", error)
            if self._synced:
                self._files.sync(())  # unless the name of the new one is on the disk already
            self._index.commit(batch.operations)

    def _withdraw_later(self, batch: Batch) -> None:
        """Give up what was written meanwhile to segments whose sync has failed.

        The system tells of a page that it could not write only once: the next sync would succeed.
        """
        later = self._pending
        if later.dirty.keys() & batch.dirty.keys():
            self._pending = Batch()
            later.failed, later.cause = True, batch.cause
            self._withdraw(later)
            later.settled = True

    def _withdraw(self, batch: Batch) -> None:
        """Turn a batch that failed into deletions, to be committed with the next one.

        It may be in force in part, so its slots and those it replaced must wait for that too.
        """
        pending = self._pending
        for name, entry in batch.operations.items():
            if name in pending.operations:
                continue  # whoever entered that has released this entry's slot
            pending.operations[name] = None
            segment = self._slabs.segments.get(entry.segment) if entry else None
            if entry and segment:
                pending.releases.append((segment, entry.slot))
        pending.releases += batch.releases
        pending.since = self._clock()

    # ---------------------------------------------------------------------------------------- room

    def slots(self, stride: int, count: int) -> list[tuple[Segment, int]]:
        """Return up to `count` slots, those that are free at once: neighbours where there are."""
        taken: list[tuple[Segment, int]] = []
        with self._lock:
            now = self._clock()
            while len(taken) < count and (one := self._slabs.take(stride, now)):
                taken.append(one)
        return taken

    def slot(self, stride: int) -> tuple[Segment, int] | None:
        """Return a slot, removing no record; None if there is no room before one is removed.

        Raises OSError, also for a disk that others have filled when there is none to remove.
        """
        with self._lock:
            taken = self._slabs.take(stride, self._clock())
        if taken is not None:
            return taken
        with self._committing:
            taken = self._extend(stride)
            if taken is None and self._pending.releases:
                self._commit()
                taken = self._extend(stride)
            if taken is None:
                self._slim()
                self._reclaim(stride)
                taken = self._extend(stride)
            if taken is None and self._disk_full is not None and self._is_empty():
                raise self._disk_full
        return taken

    # ---------------------------------------------------------------------------------------- life

    def close(self) -> bool:
        """Commit what is pending, sync everything; say whether all of it reached the disk."""
        with self._committing:
            self._commit()
            whole = not self._pending.operations
            try:
                if not self._synced:
                    self._files.sync(self._slabs.segments.values())
                    self._index.sync()
            except (OSError, Unavailable) as error:
                self._log.warn("closing did not reach the disk", error)
                whole = False
            finally:
                self._files.close()
                with self._lock:
                    self._index.close()
        return whole


def _is_bad(error: BaseException) -> bool:
    """Say whether an error is of the device, at that place."""
    return isinstance(error, OSError) and error.errno in _BAD_SLOT
