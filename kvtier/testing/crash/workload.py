"""What is written to the store that is crashed, and what may be found there afterwards.

A writer notes each intention with a small letter before it calls the store, and each OK with a
capital one after it: ``w 3 17`` begins to write version 17 of name 3, ``W 3 17`` is its OK, ``d``
and ``D`` are deletions. ``C`` says that by the mode's word all before it is durable. On a disk
that fails, ``x 3 17`` says that the store did not take it, and ``F`` that a commit was given up:
what was acknowledged before it, and was not durable by then, is lost. ``x 3 -1`` also says that the
store lets a record go for a new index.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec import structs

from kvtier.errors import ConfigError, Unavailable
from kvtier.identity.record import Header
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import FileIO, Segment
from kvtier.storage_backends.slab_batch import Batch
from kvtier.storage_backends.slab_files import SegmentFiles
from kvtier.storage_backends.slab_index import IndexFull, unpack_entry
from kvtier.testing.hands import Hands
from kvtier.testing.records import make_record
from kvtier.tiers.store import Status, Write

CAPACITY: Final = 3 << 20
NAMES: Final = 24
GONE: Final = -1
HEALED: Final = b"H\n"
_QUARANTINE: Final = 30.0
_SIZES: Final = (5_000, 90_000, 30_000, 5_000)
_BATCH: Final = 3


@functools.cache
def record_of(number: int, version: int) -> Write:
    """Return the record that is version `version` of name `number`; its depth tells both.

    All versions of a name have one size, and bytes of their own.
    """
    record = make_record(number, _SIZES[number % len(_SIZES)] + number, version=version)
    return Write(structs.replace(record.header, depth=NAMES * version + number), record.data)


def log_of(folder: Path) -> Path:
    """Return where the notes of the writer of a folder are."""
    return folder.with_suffix(".log")


def open_store(
    folder: Path,
    durability: str,
    io: FileIO | None = None,
    clock: Hands | None = None,
    capacity: int = CAPACITY,
) -> LmdbSlabStore:
    """Open the store of a folder."""
    io = io or FileIO()
    io.syncs = 1  # on this thread, which is traced
    return LmdbSlabStore(folder, capacity, durability=durability, io=io, clock=clock or Hands(0.0))


# ---- writing


def work(
    folder: Path,
    durability: str,
    turns: int,
    seed: int,
    io: FileIO | None = None,
    *,
    fills: bool = False,
) -> None:
    """Open a store, write, replace and delete in it, and close it; note it in its log.

    It is the writer that gets killed, so it starts no threads. fills: some commits find the index
    full, so that records go for a new one.
    """
    with _noted(folder) as log:
        clock = Hands(0.0)
        writer = _Writer(open_store(folder, durability, io, clock), log, clock, seed)
        for turn in range(turns):
            if fills and turn % 4 == 1:
                writer.fill()
            writer.turn(turn)
        writer.store.close()
        os.write(log, b"C\n")


def work_on_a_bad_disk(folder: Path, durability: str, turns: int, seed: int) -> None:
    """Do the same where calls fail; after the note HEALED they do not, and all has to work."""
    with _noted(folder) as log:
        clock = Hands(0.0)
        try:
            writer = _Writer(open_store(folder, durability, None, clock), log, clock, seed)
        except ConfigError:
            return  # it says why, and the next one may try
        ledger = writer.store._ledger
        withdraw = ledger._withdraw

        def telling(batch: Batch) -> None:
            withdraw(batch)
            os.write(log, b"F\n")

        vars(ledger)["_withdraw"] = telling
        for turn in range(turns):
            writer.turn(turn)
        os.write(log, HEALED)
        clock.now += _QUARANTINE
        failed = writer.failed
        for turn in range(turns, turns + 6):
            writer.turn(turn)
        assert writer.failed == failed, "it does not heal"
        writer.store.close()
        os.write(log, b"C\n")


@contextlib.contextmanager
def _noted(folder: Path) -> Iterator[int]:
    log = os.open(log_of(folder), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        yield log
    finally:
        os.close(log)


def prefill(folder: Path, durability: str) -> None:
    """Make a store that is nearly full, so that later writers find something to lose."""
    work(folder, durability, 16, 0)


class _Writer:
    def __init__(self, store: LmdbSlabStore, log: int, clock: Hands, seed: int) -> None:
        self.store = store
        self._log = log
        self._clock = clock
        self._choose = random.Random(seed)
        self._there = [header.depth % NAMES for header in store.scan()]
        self._version = 1000 * seed
        self.failed = 0

    def turn(self, turn: int) -> None:
        """Write one record, or several at once; delete one, or renew the index, in some turns."""
        count = _BATCH if turn % 5 == 2 else 1
        numbers = self._choose.sample(range(NAMES), count)
        self._write(numbers)
        if turn % 4 == 3 and self._there:
            self._delete(self._choose.choice(self._there))
        if turn % 10 == 8:
            self._renew()
        self._clock.now += 0.1
        if turn % 3 == 2:
            self._clock.now += 1.0  # longer than ``batch`` lets anything wait
            self._settle()
            os.write(self._log, b"C\n")

    def fill(self) -> None:
        """Let the next commit find the index full; note which records go for that, beforehand."""
        ledger, files = self.store._ledger, self.store._files
        index = ledger._index

        def full(_: object) -> None:
            del vars(index)["commit"]
            raise IndexFull("injected")

        def remove(segment: Segment) -> None:
            entries = [unpack_entry(value) for _, value in ledger._index.lot(b"", NAMES)]
            heads = [one.head for one in entries if one.segment == segment.number]
            self._note("x", [Header.unpack(head).depth % NAMES for head in heads], GONE)
            SegmentFiles.remove(files, segment)

        vars(index)["commit"] = full
        vars(files)["remove"] = remove

    def _renew(self) -> None:
        """Let the index be made anew, by the removal of records where that needs room."""
        while not self.store._ledger.renew() and self._there:
            self._delete(self._there[0])
            self._clock.now += 1.0
            self._settle()

    def _settle(self) -> None:
        with contextlib.suppress(Unavailable):
            self.store.delete_many([])

    def _write(self, numbers: Sequence[int]) -> None:
        self._version += 1
        version, left = self._version, list(numbers)
        while left:
            self._note("w", left, version)
            try:
                said = self.store.write_many([record_of(number, version) for number in left])
            except Unavailable:
                said = [Status.FAILED] * len(left)
            of: dict[Status, list[int]] = {status: [] for status in Status}
            for number, status in zip(left, said, strict=True):
                of[status].append(number)
            self._note("W", of[Status.OK], version)
            self._note("x", of[Status.FAILED], version)
            self.failed += len(of[Status.FAILED])
            changed = [number for number in left if number not in of[Status.FULL]]
            self._there = [other for other in self._there if other not in changed]
            self._there += of[Status.OK]
            left = of[Status.FULL]
            if left and not self._there:
                return  # nothing is left to make room with
            if left:
                self._delete(self._there[0])

    def _delete(self, number: int) -> None:
        self._note("d", [number], GONE)
        try:
            (said,) = self.store.delete_many([record_of(number, 0).header.id])
        except Unavailable:
            said = Status.FAILED
        self._note("x" if said is Status.FAILED else "D", [number], GONE)
        self.failed += said is Status.FAILED
        self._there.remove(number)

    def _note(self, verb: str, numbers: Sequence[int], version: int) -> None:
        if numbers:
            lines = "".join(f"{verb} {number} {version}\n" for number in numbers)
            os.write(self._log, lines.encode())


# ---- judging


@dataclass(slots=True)
class Told:
    """What the notes of a writer promise. durable: what must be found of a name, one of these.

    written: every version that may ever be found. acked: acknowledged changes that are durable.
    """

    durable: dict[int, set[int]] = field(
        default_factory=lambda: {number: {GONE} for number in range(NAMES)}
    )
    written: dict[int, set[int]] = field(
        default_factory=lambda: {number: set() for number in range(NAMES)}
    )
    acked: int = 0


def told(log: str, durability: str) -> Told:
    """Read the notes of a writer that was killed, or whose disk has failed."""
    found = Told()
    last: dict[int, int] = dict.fromkeys(range(NAMES), GONE)
    fresh: set[int] = set()  # acknowledged since the last C
    loose: set[int] = set()  # of which an acknowledgement, or a failure, was given up
    at_once = durability != "batch"  # ``none`` says so of a kill, and nothing of a power loss
    for verb, number, version in _lines(log):
        if verb == "C":
            for name in set(range(NAMES)) - loose:
                found.durable[name] = {last[name]}
            found.acked += 0 if at_once else len(fresh)
            fresh.clear()
        elif verb == "F" and not at_once:
            for name in fresh:
                found.durable[name] |= {GONE}
            loose |= fresh
            fresh.clear()
        elif verb == "x":
            found.durable[number] |= {GONE}
            loose.add(number)
        elif verb in "wd":
            found.durable[number] |= {version}
            found.written[number] |= {version} - {GONE}
        elif verb in "WD":
            last[number] = version
            loose.discard(number)
            fresh.add(number)
            if at_once:
                found.durable[number] = {version}
                found.acked += 1
    return found


def _lines(log: str) -> Iterator[tuple[str, int, int]]:
    for line in log.splitlines(keepends=True):
        if line.endswith("\n"):  # or the writer was killed while it noted it
            verb, *numbers = line.split()
            yield verb, *(map(int, numbers) if numbers else (0, 0))
