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
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec import structs

from kvtier.storage_backends.files import FilesStore
from kvtier.storage_backends.files_folder import Folder
from kvtier.storage_backends.files_usage import OVERHEAD, Usage
from kvtier.testing.crash.steps import Steps
from kvtier.testing.records import make_record
from kvtier.tiers.store import Status, Store, Write

CAPACITY = OVERHEAD + (240 << 10)
PIECE = 32 << 10
NAMES = 4
WRITES = 8
GONE = -1
"""Stands for the version of what is not there."""


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


def write_and_delete(store: Store, log: int, turns: Iterable[tuple[int, int]]) -> None:
    """Write versions of names; where there is no room, delete what was written first.

    log: a descriptor that gets each intention (small letter) and each OK (capital). turns: number
    of a name, and version. Raises SystemExit where a record is not written.
    """
    there: list[int] = []
    for number, version in turns:
        record = record_of(number, version)
        os.write(log, b"w %d %d\n" % (number, version))
        (status,) = store.write_many([record])
        while status is Status.FULL and there:
            victim = there.pop(0)
            os.write(log, b"d %d %d\n" % (victim, GONE))
            if store.delete_many([record_of(victim, 0).header.id]) == [Status.OK]:
                os.write(log, b"D %d %d\n" % (victim, GONE))
            (status,) = store.write_many([record])
        if status is not Status.OK:
            raise SystemExit(f"a record was not written: {status}")
        os.write(log, b"W %d %d\n" % (number, version))
        there = [other for other in there if other != number] + [number]


def promised(log: str) -> dict[int, set[int]]:
    """Return for each name the versions that may be there, by a log of ``write_and_delete``.

    An acknowledged change leaves one; an intention that was not acknowledged adds another.
    """
    allowed: dict[int, set[int]] = {number: {GONE} for number in range(NAMES)}
    for line in log.splitlines():
        verb, number, version = line.split()
        if verb in "WD":
            allowed[int(number)] = {int(version)}
        else:
            allowed[int(number)] |= {int(version)}
    return allowed


def main(folder: Path, guard: str, at: int) -> None:
    """Do the work once, in `folder`."""
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    stepping = functools.partial(Stepping, at=at)
    store = GUARDS[guard](folder, CAPACITY, durability="none", folder=stepping)
    choose = random.Random(2)
    turns = ((choose.randrange(NAMES), version) for version in range(WRITES))
    write_and_delete(store, log, turns)
    store.close()


def fork_until_done(folder: Path, guard: str, every: int) -> None:
    """Let a writer die at its first step, the next at `every` more, until one ends.

    Raises SystemExit for one that dies otherwise.
    """
    for version in range(WRITES):
        for number in range(NAMES):
            record_of(number, version)
    at = 1
    while True:
        child = os.fork()
        if child == 0:
            main(folder / str(at), guard, at)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        if os.WTERMSIG(status) != signal.SIGKILL:
            raise SystemExit(f"the writer of step {at} died otherwise: {status}")
        at += every


if __name__ == "__main__":
    fork_until_done(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
