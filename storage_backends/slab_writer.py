"""Records on their way into slots: those of one call together, each with a fate of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.errors import Unavailable
from kvtier.identity.record import RecordId
from kvtier.storage_backends.slab import Segment, stride_for
from kvtier.storage_backends.slab_batch import Batch, Known
from kvtier.storage_backends.slab_files import Placed, Run, SegmentFiles
from kvtier.storage_backends.slab_ledger import Ledger
from kvtier.storage_backends.slab_runs import runs
from kvtier.storage_backends.slab_space import Log
from kvtier.tiers.store import Status, Write

Outcome = tuple[Status, Batch | None]
"""What became of a record, and the batch that will commit it."""


class Lot:
    """The records of one call, each of another name.

    left: those whose slots are nobody's yet, by place in the call.
    """

    def __init__(self, records: Sequence[Write], known: Known, heads: Sequence[bytes]) -> None:
        self.records = records
        self.known = known
        self.heads = heads
        self.out: list[Outcome] = [(Status.FAILED, None)] * len(records)
        self.left: dict[int, Placed] = {}

    def put(self, at: int, free: list[tuple[Segment, int]]) -> bool:
        """Take the last of these slots for a record; say whether there was one."""
        if not free:
            return False
        segment, slot = free.pop()
        header, data = self.records[at]
        self.left[at] = Placed(at, segment, slot, self.heads[at], header.stored_bytes, data)
        return True


class Writer:
    """Writes records and publishes them. Thread-safe."""

    def __init__(self, files: SegmentFiles, ledger: Ledger, log: Log) -> None:
        self.files = files
        self.ledger = ledger
        self._log = log

    def write(self, names: Sequence[RecordId], records: Sequence[Write]) -> list[Outcome]:
        """Write records whose names differ. Blocks."""
        heads = [record.header.pack() for record in records]
        known, there = self.ledger.look(names, heads)
        lot = Lot(records, known, heads)
        try:
            self._place(lot, there)
            self.fill(lot)
        except BaseException as error:
            for one in lot.left.values():
                self.ledger.abandon(one.segment, one.slot, error)
            raise
        return lot.out

    def _place(self, lot: Lot, there: Mapping[int, Batch | None]) -> None:
        """Take a slot for each record that is not there yet: what is free first, as neighbours."""
        missing: list[tuple[int, int]] = []
        for at, (header, data) in enumerate(lot.records):
            if len(data) < header.stored_bytes:
                continue
            if at in there:
                lot.out[at] = Status.OK, there[at]
            else:
                missing.append((at, stride_for(header)))
        wanted: dict[int, int] = {}
        for _, stride in missing:
            wanted[stride] = wanted.get(stride, 0) + 1
        free = {stride: self.ledger.slots(stride, count)[::-1] for stride, count in wanted.items()}
        late = [one for one in missing if not lot.put(one[0], free[one[1]])]
        for at, stride in late:
            if not self.ledger.fits(stride):
                continue
            try:
                taken = self.ledger.slot(stride)
            except (OSError, Unavailable) as error:
                lot.out[at] = self._unwritten(error)
                continue
            if not lot.put(at, [taken] if taken else []):
                lot.out[at] = Status.FULL, None

    def fill(self, lot: Lot) -> None:
        """Write records into their slots, then publish them: in this order, whatever happens."""
        self._write(runs(lot.left.values()), lot)
        filled = [lot.left[at] for at in sorted(lot.left)]  # ancestors first
        lot.left.clear()
        outcome: Outcome
        try:
            outcome = Status.OK, self.ledger.publish(filled, lot.known)
        except (OSError, Unavailable) as error:
            for one in filled:
                self.ledger.abandon(one.segment, one.slot, error)
            outcome = self._unwritten(error)
        for one in filled:
            lot.out[one.at] = outcome

    def _write(self, todo: Sequence[Run], lot: Lot) -> None:
        """Write records run by run; those that fail together are written one by one."""
        for run, error in zip(todo, self.files.write(todo), strict=True):
            if error is None:
                continue
            if len(run) > 1:
                self._write([[one] for one in run], lot)
                continue
            one = lot.left.pop(run[0].at)
            self.ledger.abandon(one.segment, one.slot, error)
            lot.out[one.at] = self._unwritten(error)

    def _unwritten(self, error: Exception) -> Outcome:
        """Say that a write failed: not for want of room that the removal of records would give."""
        self._log.warn("a write failed", error)
        return Status.FAILED, None
