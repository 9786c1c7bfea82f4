"""``kvtier purge`` and ``kvtier verify --repair``, killed at each step, and cut off from power.

Whatever was done of it, the records that are right and were not to be purged are there afterwards;
what was purged does not come back; running it again finishes it; the capacity holds all the while.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.clock import monotonic
from kvtier.errors import Corrupt
from kvtier.identity.record import RecordId
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import PAGE
from kvtier.storage_backends.slab_pages import IndexPages, Torn
from kvtier.storage_backends.slab_repair import purge, verify
from kvtier.storage_backends.slab_verify import check
from kvtier.storage_backends.slab_view import View
from kvtier.testing.crash import disk, kills, workload
from kvtier.testing.crash.judge import Findings, Verdict, in_child, read_all, weigh
from kvtier.testing.crash.steps import Steps, stepping
from kvtier.testing.crash.workload import GONE, NAMES, Told
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.tiers.store import Status, Write

_CAPACITY: Final = 6 << 20
_STRANGER: Final = hashlib.sha256(b"kvtier.testing.stranger").digest()
_STRANGER_BYTES: Final = 5000
_FEW: Final = 40
_MANY: Final = 400  # more than there is room for
_AT_THE_END: Final = 3
_DONE: Final = b"P\n"
"""What is noted when it has returned."""


class Tool(NamedTuple):
    """What is run on a directory. strangers: how many records of another namespace lie there.

    harm: what was done to the directory before. opens: a store may open it half-way, and loses
    nothing by that. durable: what is right stays, all of it. purges: the strangers go.
    """

    run: Callable[[Path], object]
    harm: Callable[[Path], None]
    strangers: int = _FEW
    opens: bool = True
    durable: bool = True
    purges: bool = False


def _quiet(text: str, done: int, count: int) -> None:
    """Tell nobody."""


def _purge(folder: Path) -> object:
    return purge(folder, _STRANGER.hex(), _quiet)


def _repair(folder: Path) -> object:
    return verify(folder, _quiet, monotonic, repair=True)


# ---- what is wrong with the directory


def _unharmed(_: Path) -> None:
    """Do nothing."""


def _flip_payloads(folder: Path) -> None:
    """Flip a bit of every fourth record."""
    segments = View(folder).segments()
    with IndexPages(folder / "index.lmdb") as pages:
        entries = sorted(entry[:2] for lot in pages.pages() for _, entry in lot)
    for number, slot in entries[::4]:
        segment = segments[number]
        with (folder / segment.name).open("r+b", buffering=0) as file:
            at = segment.offset(slot) + PAGE
            (byte,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ 16]), at)


def _tear(folder: Path) -> None:
    """Overwrite the head of one leaf that is in use."""
    index = folder / "index.lmdb"
    before = _readable(index)
    for page in range(2, index.stat().st_size // PAGE):
        with index.open("r+b", buffering=0) as file:
            head = os.pread(file.fileno(), 64, page * PAGE)
            os.pwrite(file.fileno(), bytes(64), page * PAGE)
            if 0 < _readable(index) < before:
                return
            os.pwrite(file.fileno(), head, page * PAGE)
    raise AssertionError("no leaf is in use")


def _readable(index: Path) -> int:
    torn: set[Torn] = set()
    with IndexPages(index) as pages:
        return sum(map(len, pages.pages(torn=torn)))


def _overwrite_index(folder: Path) -> None:
    """Leave nothing of the index that could be read."""
    with (folder / "index.lmdb").open("r+b") as file:
        file.write(random.Random(1).randbytes(8 * PAGE))


TOOLS: Final = {
    "purge": Tool(_purge, _unharmed, purges=True),
    "repair": Tool(_repair, _flip_payloads),
    "new index": Tool(_repair, _tear, opens=False),
    "new index, no room": Tool(_repair, _tear, _MANY, opens=False, durable=False),
    "no index": Tool(_repair, _overwrite_index, durable=False),
}


# ---- one case


class _Case:
    """A directory before a tool is run in it, and a copy in which it is ended."""

    def __init__(self, base: Path, durability: str, name: str) -> None:
        self.tool = TOOLS[name]
        self.durability = durability
        self.start = base.with_name(f"start-{os.getpid()}")
        self.folder = base.with_name(f"case-{os.getpid()}")
        kills.copied(base, self.start)
        self._fill()
        self.tool.harm(self.start)
        self.promised = self._promised()

    def _fill(self) -> None:
        """Write records of another namespace, too."""
        store = self._opened(self.start)
        count = self.tool.strangers
        said = store.write_many([_stranger(number) for number in range(count)])
        store.close()
        assert set(said) == ({Status.OK} if count == _FEW else {Status.OK, Status.FULL})

    def _promised(self) -> Told:
        """Return what the notes promise, where it was not damaged afterwards."""
        promised = workload.told(workload.log_of(self.start).read_text(), self.durability)
        good = _good(self.start)
        for number in range(NAMES):
            if workload.record_of(number, 0).header.id not in good:
                promised.durable[number] |= {GONE}
        return promised

    def _opened(self, folder: Path) -> LmdbSlabStore:
        return workload.open_store(folder, self.durability, capacity=_CAPACITY)

    def again(self) -> None:
        """Begin anew."""
        kills.copied(self.start, self.folder)

    def work(self) -> None:
        """Run the tool, and note its return."""
        log = os.open(workload.log_of(self.folder), os.O_WRONLY | os.O_APPEND)
        self.tool.run(self.folder)
        os.write(log, _DONE)
        os.close(log)

    def judge(self) -> Verdict:
        """Say what is left where the tool was ended, and when it is run once more."""
        return in_child(self._look)

    def _look(self) -> Verdict:
        found = Verdict()
        weigh(self.folder, _CAPACITY, found)
        done = workload.log_of(self.folder).read_bytes().endswith(_DONE)
        if self.tool.opens or done:
            first = self._read(found)
            second = self._read(found)
            if second - first or (done and self.tool.purges and first):
                found.lost += 1
                found.notes.append(f"purged records came back: {first}, {second}")
        self.tool.run(self.folder)
        if not verify(self.folder, _quiet, monotonic, repair=False).whole:
            found.notes.append("it is not whole after it was run again")
        weigh(self.folder, _CAPACITY, found)
        if self._read(found) and self.tool.purges:
            found.notes.append("something is left after it was run again")
        return found

    def _read(self, found: Verdict) -> set[int]:
        """Open a store and read everything; return which of the strangers are there."""
        store = self._opened(self.folder)
        read_all(store, self.promised, found, durable=self.tool.durable)
        there = set()
        for number in range(self.tool.strangers):
            read, buffer = fetch(store, _stranger(number).header.id, 2 * PAGE)
            if read.status is Status.OK:
                there.add(number)
                exact = is_exact(read, buffer)
                found.hits += 1
                found.wrong += not exact and self.tool.harm is not _flip_payloads
        store.close()
        return there


def _stranger(number: int) -> Write:
    return make_record(number, _STRANGER_BYTES, namespace=_STRANGER)


def _good(folder: Path) -> set[RecordId]:
    """Return the names of the records that are right."""
    view = View(folder)
    try:
        with view.entries() as index:
            return {record.name for record in check(view, index, _quiet).good}
    except Corrupt:
        return set()


# ---- how it is ended


def at_calls(base: Path, durability: str, most: int, offset: int, stride: int) -> Findings:
    """Kill each tool at up to `most` of its system calls, and judge what that leaves."""
    findings = Findings()
    for name in TOOLS:
        case = _Case(base, durability, name)
        case.again()
        calls = kills.points(case.work)
        for at in kills.spread(len(calls), most, offset, stride):
            case.again()
            kills.kill_at(case.work, at)
            findings.counts["tool_points"] += 1
            findings.add(f"{durability}, {name}, call {at} ({calls[at - 1]})", case.judge())
    return findings


def at_steps(base: Path, durability: str, most: int, offset: int, stride: int) -> Findings:
    """Let each tool kill itself at up to `most` of its named steps, and judge what that leaves."""
    findings = Findings()
    for name in TOOLS:
        case = _Case(base, durability, name)

        def work(at: int, case: _Case = case) -> None:
            with stepping(Steps(at)):
                case.work()

        case.again()
        steps = Steps(0)
        with stepping(steps):
            case.work()
        for at in kills.spread(steps.taken, most, offset, stride):
            case.again()
            kills.end_at(functools.partial(work, at), at)
            findings.counts["tool_points"] += 1
            findings.add(f"{durability}, {name}, step {at}", case.judge())
    return findings


def power_losses(base: Path, durability: str, most: int, offset: int, stride: int) -> Findings:
    """Cut the power of each tool at up to `most` moments, and when it has returned; judge that."""
    findings = Findings()
    choose = random.Random(f"{durability} {offset}")
    for name in TOOLS:
        case = _Case(base, durability, name)
        case.again()
        log = workload.log_of(case.folder)
        before = log.read_text()
        events = disk.record(case.work, case.folder, log)
        returned = [len(events)] * _AT_THE_END
        for at in (*kills.spread(len(events), most, offset, stride), *returned):
            image = disk.loaded(case.start)
            for event in events[:at]:
                image.do(event)
            shutil.rmtree(case.folder)
            disk.written(image.lost(choose), case.folder)
            log.write_text(before + disk.notes(events[:at]))
            findings.counts["power_losses"] += 1
            findings.add(f"{durability}, {name}, power lost at event {at}", case.judge())
    return findings
