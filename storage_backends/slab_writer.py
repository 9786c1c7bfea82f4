"""Records on their way into slots: those of one call together, each with a fate of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.errors import Unavailable
from kvtier.storage_backends.slab import Segment, stride_for
from kvtier.storage_backends.slab_batch import Batch, Known
from kvtier.storage_backends.slab_files import SegmentFiles
from kvtier.storage_backends.slab_ledger import Ledger
from kvtier.storage_backends.slab_runs import Placed, runs
from kvtier.storage_backends.slab_space import Log
from kvtier.tiers.store import Status, Write

__all__ = ["Outcome", "Writer"]

Outcome = tuple[Status, Batch | None]
"""What became of a record, and the batch that will commit it."""


class _Missing(NamedTuple):
    """A record that is not there yet: its place in the call, and what is to be known of it."""

    at: int
    stride: int
    head: bytes
    known: Known


class _Lot:
    """The records of one call, each of another name.

    left: those whose slots are nobody's yet, by place in the call.
    """

    def __init__(self, records: Sequence[Write]) -> None:
        self.records = records
        self.out: list[Outcome] = [(Status.FAILED, None)] * len(records)
        self.known: dict[int, Known] = {}
        self.left: dict[int, Placed] = {}


class Writer:
    """Writes records and publishes them. Thread-safe."""

    def __init__(self, files: SegmentFiles, ledger: Ledger, log: Log) -> None:
        self.files = files
        self.ledger = ledger
        self._log = log

    def write(self, records: Sequence[Write]) -> list[Outcome]:
        """Write records whose names differ. Blocks."""
        lot = _Lot(records)
        try:
            self._place(lot)
            for run in runs(lot.left.values()):
                if len(run) == 1 or not self._fill_together(run, lot):
                    self._fill_each(run, lot)
        except BaseException as error:
            for one in lot.left.values():
                self.ledger.abandon(one.segment, one.slot, error)
            raise
        return lot.out

    def _place(self, lot: _Lot) -> None:
        """Take a slot for each record that is not there yet: what is free first, as neighbours.

        In the records' order, as runs are published in that of the slots, and ancestors come first.
        """
        missing = self._missing(lot)
        wanted = Counter([one.stride for one in missing])
        late: list[_Missing] = []
        taken_at_once = {stride: self.ledger.slots(stride, wanted[stride]) for stride in wanted}
        free = {stride: iter(sorted(of, key=_where)) for stride, of in taken_at_once.items()}
        for one in missing:
            taken = next(free[one.stride], None)
            if taken is None:
                late.append(one)
            else:
                lot.left[one.at] = Placed(one.at, *taken, one.head)
        for one in late:
            try:
                taken = self.ledger.slot(one.stride)
            except (OSError, Unavailable) as error:
                lot.out[one.at] = self._unwritten(error)
                continue
            if taken is None:
                lot.out[one.at] = Status.FULL, None
            else:
                lot.left[one.at] = Placed(one.at, *taken, one.head)

    def _missing(self, lot: _Lot) -> list[_Missing]:
        """Return the records that are to be written; of those that are there, note the batch."""
        fitting: list[tuple[int, int, bytes]] = []
        for at, (header, data) in enumerate(lot.records):
            stride = stride_for(header)
            if len(data) >= header.stored_bytes and self.ledger.fits(stride):
                fitting.append((at, stride, header.pack()))
        names = [lot.records[at].header.id for at, _, _ in fitting]
        missing: list[_Missing] = []
        looked = self.ledger.look(names, [head for _, _, head in fitting])
        for one, known in zip(fitting, looked, strict=True):
            lot.known[one[0]] = known
            if known.there:
                lot.out[one[0]] = Status.OK, known.batch
            else:
                missing.append(_Missing(*one, known))
        return missing

    def _fill_together(self, run: Sequence[Placed], lot: _Lot) -> bool:
        """Write records into adjacent slots; say whether the device took them together."""
        segment = run[0].segment
        payloads = [lot.records[one.at].data for one in run]
        try:
            self.files.write_run(segment, run[0].slot, [one.head for one in run], payloads)
        except OSError:
            return False
        for one in run:
            del lot.left[one.at]
        outcome: Outcome
        try:
            filled = [(one.slot, one.head, lot.known[one.at]) for one in run]
            outcome = Status.OK, self.ledger.publish(segment, filled)
        except Unavailable as error:
            for one in run:
                self.ledger.abandon(segment, one.slot, error)
            outcome = self._unwritten(error)
        for one in run:
            lot.out[one.at] = outcome
        return True

    def _fill_each(self, run: Sequence[Placed], lot: _Lot) -> None:
        for one in run:
            del lot.left[one.at]
            try:
                data = lot.records[one.at].data
                lot.out[one.at] = Status.OK, self.fill(one, lot.known[one.at], data)
            except (OSError, Unavailable) as error:
                lot.out[one.at] = self._unwritten(error)

    def fill(self, one: Placed, known: Known, data: memoryview) -> Batch:
        """Write a record into its slot, then publish it: in this order, whatever happens."""
        try:
            self.files.write(one.segment, one.slot, one.head, data)
            return self.ledger.publish(one.segment, [(one.slot, one.head, known)])
        except BaseException as error:
            self.ledger.abandon(one.segment, one.slot, error)
            raise

    def _unwritten(self, error: Exception) -> Outcome:
        """Say that a write failed: not for want of room that the removal of records would give."""
        self._log.warn("a write failed", error)
        return Status.FAILED, None


def _where(place: tuple[Segment, int]) -> tuple[int, int]:
    segment, slot = place
    return segment.number, slot
