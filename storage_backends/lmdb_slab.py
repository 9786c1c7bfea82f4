"""``lmdb:DIR``: records on NVMe, payloads in slab segments by O_DIRECT, the index in LMDB.

What keeps a read exact or absent:

* a record is published after its payload is written, and a live slot is never written;
* an index entry is gone, as durably as the mode says, before its slot is free;
* a slot with a reader is free only when that reader is done;
* on each read the header page on the disk must equal the header in the index.

`durability` says when what was published or deleted is committed:

* ``each``: before a call returns OK; calls that wait at the same time share one commit;
* ``batch``: every 256 MiB or second, with the next call, which a Tier makes if nobody else does;
  when slots run out; at closing;
* ``none``: before a call returns, but nothing is synced. The records survive the process, and
  are discarded when the machine has restarted without a clean close.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, Self

from kvtier.clock import Clock, monotonic
from kvtier.errors import ConfigError, MisuseError, Unavailable, unknown
from kvtier.identity.record import Header, RecordId
from kvtier.storage_backends.slab import PAGE, SLOT_CHARGE, FileIO, encoded_stride_of, stride_of
from kvtier.storage_backends.slab_batch import Batch
from kvtier.storage_backends.slab_directory import SlabDirectory, config_error
from kvtier.storage_backends.slab_files import Placed, Run, SegmentFiles
from kvtier.storage_backends.slab_ledger import Ledger
from kvtier.storage_backends.slab_recovery import LEAST_BYTES, recover
from kvtier.storage_backends.slab_repair import purge, verify
from kvtier.storage_backends.slab_runs import headers, in_order, readable, runs, unrepeated
from kvtier.storage_backends.slab_space import Log
from kvtier.storage_backends.slab_stock import stock
from kvtier.storage_backends.slab_survey import survey
from kvtier.storage_backends.slab_writer import Outcome, Writer
from kvtier.tiers.stock import Stock
from kvtier.tiers.store import Capabilities, Option, Read, Status, Write
from kvtier.tiers.survey import Purged, Survey, Tell, Verdict

_DURABILITY: Final = ("none", "batch", "each")
_BATCH_BYTES: Final = 256 << 20
_BATCH_SECONDS: Final = 1.0
_SCAN_STEP: Final = 512


def _durability(text: str) -> str:
    if text not in _DURABILITY:
        raise unknown("durability", text, _DURABILITY)
    return text


def _directory(location: str) -> Path:
    """Return a path that the system and LMDB take; ``~`` is a home directory, as in a shell."""
    try:
        path = Path(location).expanduser()
        usable = "\0" not in str(path) and bool(str(path).encode())
    except (ValueError, RuntimeError):  # a name that is no text; the home of nobody
        usable = False
    if not usable:
        raise ConfigError(f"lmdb:{location!r} names no directory that can be used")
    return path


class LmdbSlabStore:
    """A durable, bounded Store in one directory, which one process has open at a time.

    All methods may be called from several threads; after a fork only by the parent: the child
    gets MisuseError.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "durability": Option(
            _durability,
            "batch",
            "what survives a power loss: none, batch (all but about the last second), each",
        ),
    }
    THREADS: ClassVar[int] = 4
    PROMISES: ClassVar[Capabilities] = Capabilities(
        durable=True, bounded=True, overhead=LEAST_BYTES
    )
    ALIGNMENT: ClassVar[int] = PAGE

    @classmethod
    def open(cls, location: str, capacity: int | None, options: Mapping[str, object]) -> Self:
        """Open the directory `location`, creating it if need be. See Store.open."""
        if not location:
            raise ConfigError("lmdb needs a directory; write lmdb:/var/lib/kvtier?capacity=200GiB")
        if capacity is None:
            raise ConfigError(f"lmdb:{location} needs a capacity; add ?capacity=200GiB, say")
        durability = options.get("durability", cls.OPTIONS["durability"].default)
        return cls(_directory(location), capacity, durability=_durability(str(durability)))

    def __init__(
        self,
        directory: Path,
        capacity: int,
        *,
        durability: str = "batch",
        io: FileIO | None = None,
        clock: Clock = monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Open a directory. capacity: bytes. io, clock, wall: the seams; wall tells records' age.

        Blocks. Raises ConfigError.
        """
        self._durability = durability
        self._clock = clock
        self._pid = os.getpid()
        self._closed = False
        self._log = Log(directory, clock)
        synced = durability != "none"
        io = io or FileIO()
        self._directory = SlabDirectory(directory, io)
        try:
            found = recover(self._directory, capacity, durability, io)
        except OSError as error:
            self._directory.release()
            raise config_error(error, directory) from error
        except Unavailable as error:
            self._directory.release()
            raise ConfigError(f"{directory}: {error}; choose another directory") from error
        except BaseException:
            self._directory.release()
            raise
        self._files = SegmentFiles(self._directory, io)
        self._ledger = Ledger(found, self._files, self._log, clock, wall, synced=synced)
        self._writer = Writer(self._files, self._ledger, self._log)

    @property
    def capabilities(self) -> Capabilities:
        """Durable and bounded."""
        return self.PROMISES

    @staticmethod
    def footprint(stored_bytes: int) -> int:
        """Return slot and index bytes of a raw payload. Segments add about 1 in 10,000."""
        return stride_of(stored_bytes) + SLOT_CHARGE

    def encoded_footprint(self, stored_bytes: int) -> int:
        """Return the same of what a codec left, whose slots come in fewer sizes."""
        return encoded_stride_of(stored_bytes) + SLOT_CHARGE

    # -------------------------------------------------------------------------- without opening it

    @classmethod
    def survey(cls, location: str, tell: Tell) -> Survey:
        """Say what lies in a directory. See Surveyed."""
        return survey(_directory(location), tell)

    @classmethod
    def verify(cls, location: str, tell: Tell, *, repair: bool = False) -> Verdict:
        """Compare every record of a directory with its checksums. See Surveyed."""
        return verify(_directory(location), tell, monotonic, repair=repair)

    @classmethod
    def purge(cls, location: str, namespace: str, tell: Tell) -> Purged:
        """Remove a namespace from a directory that nobody has open. See Surveyed."""
        return purge(_directory(location), namespace, tell)

    # ------------------------------------------------------------------------------------ reading

    def contains_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """Say for each record OK or ABSENT, from memory or the page cache."""
        self._check_usable()
        return [Status.ABSENT if entry is None else Status.OK for entry in self._ledger.find(ids)]

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """Fill each buffer with a record, aligned ones without a copy. See Store.read_many."""
        self._check_usable()
        out = [Read(Status.ABSENT)] * len(ids)
        pinned = self._ledger.pin(ids)
        try:
            placed: list[Placed] = []
            found: dict[int, Header] = {}
            for at, where in enumerate(pinned):
                if where is None:
                    continue
                segment, entry = where
                header = readable(ids[at], segment, entry, into[at])
                if isinstance(header, Header):
                    size = header.stored_bytes
                    placed.append(Placed(at, segment, entry.slot, entry.head, size, into[at]))
                    found[at] = header
                else:
                    out[at] = Read(header)
            self._read(runs(placed), found, out)
        finally:
            self._ledger.unpin(pinned)
        return out

    def _read(self, lot: Sequence[Run], found: Mapping[int, Header], out: list[Read]) -> None:
        """Read records run by run; those that fail together are read one by one."""
        for run, pages in zip(lot, self._files.read(lot), strict=True):
            first = run[0]
            if not isinstance(pages, OSError):
                for one, page in zip(run, pages, strict=True):
                    whole = page == one.head
                    out[one.at] = Read(Status.OK, found[one.at]) if whole else Read(Status.CORRUPT)
            elif len(run) > 1:
                self._read([[one] for one in run], found, out)
            else:
                self._ledger.blame(first.segment, first.slot, pages)
                self._log.warn("a read failed", pages)
                out[first.at] = Read(Status.FAILED)

    def scan(self) -> Iterator[Header]:
        """Yield the header of each record, oldest write first.

        The names are collected first, about 100 bytes of memory a record. No lock is held and
        no transaction open between two steps; what comes or goes meanwhile may be there or not.
        """
        self._check_usable()
        names = in_order(self._ledger)
        for start in range(0, len(names), _SCAN_STEP):
            self._check_usable()
            step = names[start : start + _SCAN_STEP]
            yield from headers(step, self._ledger.find(step))

    def stock(self) -> Stock:
        """Return what `scan` would yield. See StockedStore."""
        self._check_usable()
        return stock(self._ledger)

    # ------------------------------------------------------------------------------------ writing

    def write_many(self, records: Sequence[Write]) -> list[Status]:
        """Write records in order; OK means durable with ``durability=each`` only."""
        self._check_usable()
        wrote: list[Outcome] = []
        names = [record.header.id for record in records]
        for part in unrepeated(names):
            wrote += self._writer.write(names[part], records[part])
        self._settle([batch for _, batch in wrote])
        return [Status.FAILED if batch and batch.failed else status for status, batch in wrote]

    def delete_many(self, ids: Sequence[RecordId]) -> list[Status]:
        """Remove records: OK, FAILED or ABSENT. Their slots are free after the next commit."""
        self._check_usable()
        was, batch = self._ledger.remove(ids)
        self._settle([batch])
        present = Status.FAILED if batch.failed else Status.OK
        return [present if there else Status.ABSENT for there in was]

    def _settle(self, batches: Sequence[Batch | None]) -> None:
        """Commit what the mode wants committed before the call returns."""
        if self._durability == "batch":
            pending = self._ledger.pending
            full = pending.bytes >= _BATCH_BYTES
            if pending.operations and (full or self._clock() - pending.since >= _BATCH_SECONDS):
                self._ledger.commit(pending)
            return
        for batch in batches:
            if batch is not None and batch.operations:
                self._ledger.commit(batch)

    # ---------------------------------------------------------------------------------------- life

    def close(self) -> None:
        """Commit what is pending, and release the directory. Idempotent.

        Waits for a commit under way. Another call under way ends with FAILED or Unavailable.
        """
        self._check_process()
        if self._closed:
            return
        self._closed = True
        try:
            whole = self._ledger.close()
            if whole and self._durability == "none":
                self._directory.unmark()
        except OSError as error:
            self._log.warn("closing did not reach the disk", error)
        finally:
            self._directory.release()

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise MisuseError(f"{self._directory.path} is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise MisuseError(
                f"{self._directory.path} was opened by process {self._pid} and is used in its "
                f"fork {os.getpid()}; open stores after forking"
            )
