"""What the crash tests kill: a process that writes, replaces and deletes records in a loop.

``python lmdb_writer.py FOLDER DURABILITY GUARD`` forks one writer after another. Writer N works in
FOLDER/N and kills itself with SIGKILL at its Nth step, until one comes to its end. Steps are every
call on a segment, a payload being written in pieces, and the moments before and after the index
is committed and a record is published. What each writer was told goes to FOLDER/N.log.
With step 0 nothing is killed from within: the test kills from outside.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import FileIO
from kvtier.storage_backends.slab_batch import Batch
from kvtier.storage_backends.slab_index import Index
from kvtier.storage_backends.slab_ledger import Ledger
from kvtier.storage_backends.slab_writer import Lot, Writer
from kvtier.testing.dying import Steps, die_at_each, write_and_delete
from kvtier.testing.records import make_record
from kvtier.tiers.store import Status, Write

CAPACITY = 3 << 20
PIECE = 64 << 10
SIZES = (90_000, 150_000)
NAMES = 7
WRITES = 16


@functools.cache
def record_of(number: int, version: int) -> Write:
    """Return the record that is version `version` of name `number`; its depth tells both."""
    size = SIZES[(number + version // 12) % len(SIZES)]
    record = make_record(number, size, version=version)
    return Write(structs.replace(record.header, depth=NAMES * version + number), record.data)


class SteppingIO(FileIO):
    """Does everything in steps, and writes in pieces, as a kernel may under load."""

    syncs = 1  # steps are counted on one thread

    def __init__(self, step: Steps) -> None:
        self.step = step

    def fallocate(self, descriptor: int, length: int) -> None:
        self.step()
        super().fallocate(descriptor, length)
        self.step()

    def fdatasync(self, descriptor: int) -> None:
        self.step()
        super().fdatasync(descriptor)
        self.step()

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = 0
        for buffer in buffers:
            for start in range(0, len(buffer), PIECE):
                self.step()
                piece = buffer[start : start + PIECE]
                done += super().pwrite(descriptor, [piece], offset + done)
        self.step()
        return done


class SteppingStore(LmdbSlabStore):
    """The store, with its guards."""


class PublishFirst(Writer):
    """Without a guard: a record is in the index before its payload is on the disk."""

    def fill(self, lot: Lot) -> None:
        filled = list(lot.left.values())
        if filled:
            self.ledger.commit(self.ledger.publish(filled, lot.known))
        super().fill(lot)


class OverwriteLive(Writer):
    """Without a guard: a record is replaced in its own slot."""

    def fill(self, lot: Lot) -> None:
        for one in list(lot.left.values()):
            (old,) = self.ledger.find([lot.known.names[one.at]])
            live = old and self.ledger._slabs.segments.get(old.segment)
            if old and live and live.stride == one.segment.stride:
                self.files.write([[structs.replace(one, segment=live, slot=old.slot)]])
        super().fill(lot)


class WithoutGuard(SteppingStore):
    """A store with another writer."""

    def __init__(self, writer: type[Writer], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._writer = writer(self._files, self._ledger, self._log)


class FreeFirst(LmdbSlabStore):
    """Without a guard: a slot is free before the index has forgotten what was in it.

    The deletion is committed together with the write that reuses the slot.
    """

    def delete_many(self, ids: Sequence[bytes]) -> list[Status]:
        statuses = self.contains_many(ids)
        with self._ledger._lock:
            for name in ids:
                (old,) = self._ledger._find([name])
                self._ledger._enter(name, None, old)
            for segment, slot in self._ledger._pending.releases:
                segment.release(slot)
            self._ledger._pending.releases.clear()
        return statuses


GUARDS = {
    "all": SteppingStore,
    "publish-first": functools.partial(WithoutGuard, PublishFirst),
    "overwrite-live": functools.partial(WithoutGuard, OverwriteLive),
    "free-first": FreeFirst,
}


def turns(count: int) -> Iterator[tuple[int, int]]:
    """Yield names and versions: some replace what is there, some what was evicted."""
    choose = random.Random(2)
    for version in range(count):
        yield choose.randrange(NAMES), version


def stepping(at: int) -> SteppingIO:
    """Return an IO that steps, and let the ledger step with it."""
    step = Steps(at)
    commit, publish = Index.commit, Ledger.publish

    def commit_in_steps(self: Index, operations: object) -> None:
        step()
        commit(self, operations)
        step()

    def publish_in_steps(self: Ledger, *arguments: object) -> Batch:
        step()
        batch = publish(self, *arguments)
        step()
        return batch

    Index.commit, Ledger.publish = commit_in_steps, publish_in_steps
    return SteppingIO(step)


def main(folder: Path, durability: str, guard: str, at: int) -> None:
    """Do the work once, in `folder`."""
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    store = GUARDS[guard](folder, CAPACITY, durability=durability, io=stepping(at))
    rounds = WRITES if at else 1 << 30
    write_and_delete(store, log, turns(rounds), record_of)
    store.close()


def fork_until_done(folder: Path, durability: str, guard: str, every: int) -> None:
    """Let a writer die at each step, or at each `every`th."""
    for number, version in turns(WRITES):
        record_of(number, version)
    die_at_each(lambda at: main(folder / str(at), durability, guard, at), every)


if __name__ == "__main__":
    where, mode, which, stride = sys.argv[1:5]
    if stride == "0":
        main(Path(where), mode, which, 0)
    else:
        fork_until_done(Path(where), mode, which, int(stride))
