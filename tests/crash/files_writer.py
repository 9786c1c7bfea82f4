"""What the crash test of the files store kills: a process that writes, replaces and deletes.

``python files_writer.py FOLDER GUARD EVERY`` forks one writer after another. Writer N works in
FOLDER/N and kills itself with SIGKILL at its Nth step, until one comes to its end. Steps are
before and after every call that changes a file or a name, and a payload is written in pieces.
What each writer was told goes to FOLDER/N.log.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import structs

from kvtier.storage_backends.files import FilesStore
from kvtier.storage_backends.files_folder import Folder
from kvtier.storage_backends.files_usage import OVERHEAD, Usage
from kvtier.testing.dying import Steps, die_at_each, write_and_delete
from kvtier.testing.records import make_record
from kvtier.tiers.store import Write

CAPACITY = OVERHEAD + (240 << 10)
PIECE = 32 << 10
NAMES = 4
WRITES = 8


@functools.cache
def record_of(number: int, version: int) -> Write:
    """Return version `version` of name `number`; its depth tells both."""
    record = make_record(number, 50_000 + 30_000 * (version % 2), version=version)
    return Write(structs.replace(record.header, depth=NAMES * version + number), record.data)


class Stepping(Folder):
    """Does everything in steps."""

    def __init__(self, path: Path, at: int) -> None:
        super().__init__(path)
        self.step = Steps(at)

    def stepped(self, call: Callable[..., object], *arguments: object) -> None:
        self.step()
        call(*arguments)
        self.step()

    def write(self, descriptor: int, buffers: Sequence[memoryview]) -> None:
        offset = 0
        for buffer in buffers:
            for start in range(0, len(buffer), PIECE):
                self.step()
                offset += os.pwritev(descriptor, [buffer[start : start + PIECE]], offset)
        self.step()

    def extend(self, descriptor: int, length: int) -> None:
        self.stepped(super().extend, descriptor, length)

    def rename(self, old: str, new: str) -> None:
        self.stepped(super().rename, old, new)

    def unlink(self, name: str) -> None:
        self.stepped(super().unlink, name)


class InPlace(FilesStore):
    """Without a guard: a record is written under its own name."""

    def _begun(self, header, taken):
        draft = super()._begun(header, taken)
        if draft is not None:
            place = f"{draft.split('.')[0]}.kv"
            self._folder.rename(draft, place)
            return place
        return None


class Late(FilesStore):
    """Without a guard: bytes are counted after they were taken."""

    def __init__(self, *arguments, **how) -> None:
        super().__init__(*arguments, **how)
        self._usage.take = lambda _: True

    def _fill(self, draft, header, data):
        super()._fill(draft, header, data)
        Usage.take(self._usage, self.footprint(header.stored_bytes))


GUARDS = {"all": FilesStore, "in-place": InPlace, "late": Late}


def main(folder: Path, guard: str, at: int) -> None:
    """Do the work once, in `folder`."""
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    stepping = functools.partial(Stepping, at=at)
    store = GUARDS[guard](folder, CAPACITY, durability="none", folder=stepping)
    choose = random.Random(2)
    turns = ((choose.randrange(NAMES), version) for version in range(WRITES))
    write_and_delete(store, log, turns, record_of)
    store.close()


def fork_until_done(folder: Path, guard: str, every: int) -> None:
    """Let a writer die at each step, or at each `every`th."""
    for version in range(WRITES):
        for number in range(NAMES):
            record_of(number, version)
    die_at_each(lambda at: main(folder / str(at), guard, at), every)


if __name__ == "__main__":
    fork_until_done(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
