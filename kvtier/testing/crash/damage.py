"""Damage done to the files of a store: flipped bits, cut files, swapped payloads, older copies.

Some of it is done while the store is open and read at once; the rest while it is closed, and then
it is opened, read whole and used. The index is damaged only while it is closed: it is mapped, and
what changes in a mapping nobody can check.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.storage_backends.slab import PAGE
from kvtier.testing.crash import kills, workload
from kvtier.testing.crash.judge import Findings, Verdict, in_child, judge, serve, version_of
from kvtier.testing.crash.workload import NAMES, Told

_HEADER_BYTES: Final = 256
_LOT: Final = 250  # of damages done by one process
_PAGE_HEADER: Final = 16
_NODE_HEADER: Final = 8
_META_BYTES: Final = 152
_FROZEN: Final = 3


def bases(folder: Path, durability: str) -> list[Path]:
    """Return copies of one store as it was at three times, the latest last."""
    made = []
    for number in range(_FROZEN):
        if number == 0:
            workload.prefill(folder, durability)
        else:
            workload.work(folder, durability, 12, 10 + number)
        made.append(kills.copied(folder, folder.with_name(f"{folder.name}-{number}")))
    return made


# ---- while it is open


def while_open(base: Path, durability: str, kind: str, count: int, seed: int) -> Findings:
    """Flip bits of, cut, or swap slots of an open store `count` times, and read what that hit.

    kind: flips, truncations or swaps.
    """
    findings = Findings()
    folder = kills.copied(base, base.with_name(f"case-{os.getpid()}"))
    promised = workload.told(workload.log_of(folder).read_text(), durability)
    harm = {"flips": _flip, "truncations": _cut, "swaps": _swap}[kind]
    for start in range(0, count, _LOT):
        lot = min(_LOT, count - start)
        choose = random.Random(f"{durability} {kind} {seed} {start}")

        def look(lot: int = lot, choose: random.Random = choose) -> Verdict:
            store = workload.open_store(folder, durability)
            there = _Slots(store, folder, promised, choose)
            for _ in range(lot):
                harm(there)
            store.close()
            return there.found

        verdict = in_child(look)
        findings.counts[kind] += lot if not verdict.deaths else 0
        findings.add(f"{durability}, {kind} from {start} of seed {seed}", verdict)
    return findings


class _Slots:
    """The slots of an open store, and what is found in them."""

    def __init__(
        self, store: LmdbSlabStore, folder: Path, told: Told, choose: random.Random
    ) -> None:
        self.choose = choose
        self.found = Verdict()
        self._store, self._folder, self._told = store, folder, told
        self.names = [name for name in range(NAMES) if self._is_exact(name)]
        assert len(self.names) > 5, "there is nothing to damage"

    def _is_exact(self, number: int) -> bool:
        header, data = serve(self._store, number)
        return header is not None and version_of(header, number, data, self._told) is not None

    def place(self, number: int) -> tuple[Path, int, int]:
        """Return the file of a record, where its slot begins, and how long it is."""
        (entry,) = self._store._ledger.find([workload.record_of(number, 0).header.id])
        assert entry is not None
        (path,) = self._folder.glob(f"slab-{entry.segment:08d}-*.seg")
        stride = int(path.stem.rpartition("-")[2])
        return path, entry.slot * stride, stride

    def read(self, numbers: list[int]) -> None:
        """Read records that may be damaged."""
        for number in numbers:
            header, data = serve(self._store, number)
            if header is None:
                self.found.misses += 1
                continue
            self.found.hits += 1
            if version_of(header, number, data, self._told) is None:
                self.found.wrong += 1
                self.found.notes.append(f"name {number}: bytes that were never written")


@contextlib.contextmanager
def _changed(path: Path, at: int, content: bytes) -> Iterator[None]:
    """Let a part of a file be something else for a while."""
    with path.open("r+b", buffering=0) as file:
        before = os.pread(file.fileno(), len(content), at)
        os.pwrite(file.fileno(), content, at)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), before, at)


def _flip(there: _Slots) -> None:
    choose = there.choose
    number = choose.choice(there.names)
    path, begin, _ = there.place(number)
    stored = workload.record_of(number, 0).header.stored_bytes
    in_header = choose.random() < 0.3
    offset = choose.randrange(_HEADER_BYTES) if in_header else PAGE + choose.randrange(stored)
    with path.open("rb") as file:
        (byte,) = os.pread(file.fileno(), 1, begin + offset)
    with _changed(path, begin + offset, bytes([byte ^ 1 << choose.randrange(8)])):
        there.read([number])


def _cut(there: _Slots) -> None:
    path, begin, stride = there.place(there.choose.choice(there.names))
    whole = path.read_bytes()
    os.truncate(path, there.choose.randrange(begin + stride))
    try:
        there.read([name for name in there.names if there.place(name)[0] == path])
    finally:
        path.write_bytes(whole)


def _swap(there: _Slots) -> None:
    """Swap the payloads of two records of one size, with their headers or without."""
    choose = there.choose
    one = choose.choice(there.names)
    path, begin, stride = there.place(one)
    alike = [name for name in there.names if name != one and there.place(name)[2] == stride]
    other = choose.choice(alike)
    other_path, other_begin, _ = there.place(other)
    skip = choose.choice((0, PAGE))
    with path.open("rb") as file, other_path.open("rb") as second:
        mine = os.pread(file.fileno(), stride - skip, begin + skip)
        others = os.pread(second.fileno(), stride - skip, other_begin + skip)
    with _changed(path, begin + skip, others), _changed(other_path, other_begin + skip, mine):
        there.read([one, other])


# ---- while it is closed


def at_rest(bases: list[Path], durability: str, kind: str, count: int, seed: int) -> Findings:
    """Damage a closed store in `count` ways, one at a time; open it, read all, and use it.

    kind: flips, truncations or older (a file is what it was before).
    """
    findings = Findings()
    choose = random.Random(f"{durability} {kind} {seed} at rest")
    harm: Callable[[list[Path], Path, random.Random], str] = {
        "flips": _flip_file,
        "truncations": _cut_file,
        "older": _put_back,
    }[kind]
    folder = bases[-1].with_name(f"case-{os.getpid()}")
    for number in range(count):
        kills.copied(bases[-1], folder)
        what = harm(bases, folder, choose)
        promised = workload.told(workload.log_of(folder).read_text(), durability)
        verdict = judge(folder, durability, promised, durable=False)
        # A damaged store may say that it can't be used; that is for its operator, not for us.
        noted = [] if not verdict.wrong and not verdict.deaths else verdict.notes
        findings.counts[kind] += 1
        case = f"{durability}, {kind} {number} of seed {seed}: {what}"
        findings.add(case, msgspec.structs.replace(verdict, notes=noted))
    return findings


def _flip_file(_: list[Path], folder: Path, choose: random.Random) -> str:
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    index = folder / "index.lmdb"
    if choose.random() < 0.8:
        offset = choose.choice(_structure(index.read_bytes()))
        path = index
    else:
        path = choose.choice(files)
        offset = choose.randrange(path.stat().st_size)
    bit = choose.randrange(8)
    with path.open("r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), offset)
    return f"bit {bit} of byte {offset} of {path.name}"


def _structure(index: bytes) -> list[int]:
    """Return where in an index LMDB finds its way: what is neither a key nor a value."""
    places: list[int] = []
    for page in range(len(index) // PAGE):
        begin = page * PAGE
        (lower,) = struct.unpack_from("<H", index, begin + 12)
        if page < 2:  # the two meta pages
            places += range(begin, begin + _META_BYTES)
        elif _PAGE_HEADER <= lower < PAGE:
            places += range(begin, begin + lower)
            count = (lower - _PAGE_HEADER) // 2
            for node in struct.unpack_from(f"<{count}H", index, begin + _PAGE_HEADER):
                places += range(begin + node, min(begin + node + _NODE_HEADER, begin + PAGE))
    return places


def _cut_file(_: list[Path], folder: Path, choose: random.Random) -> str:
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    path = choose.choice([*files, folder / "index.lmdb"])
    length = choose.randrange(path.stat().st_size)
    if choose.random() < 0.5:
        os.truncate(path, length)
        return f"{path.name} cut to {length}"
    whole = path.stat().st_size
    os.truncate(path, length)
    os.truncate(path, whole)
    return f"{path.name} zeroed from {length} on"


def _put_back(bases: list[Path], folder: Path, choose: random.Random) -> str:
    older = choose.choice(bases[:-1])
    path = choose.choice(sorted(path for path in older.iterdir() if path.stat().st_size))
    if choose.random() < 0.5:
        path = older / "index.lmdb"
    shutil.copy(path, folder / path.name)
    return f"{path.name} of {older.name}"
