"""A disk with a volatile cache, in memory: what a power loss may leave of a recorded run.

What a process did to its files is recorded at the system calls, LMDB's included. A write is certain
once its file was synced, or at once through a descriptor with O_DSYNC; the creation, renaming and
removal of a file once its directory was. Of everything later, a power loss keeps any part, in any
order: sectors of 512 bytes of file contents; of lengths and names what came first, as a journal
does.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.errors import Unavailable
from kvtier.testing.crash.tracing import Call, trace

SECTOR: Final = 512
_VECTOR: Final = struct.Struct("<QQ")

_DURABLE: Final = os.O_DSYNC
_KEEP: Final = (0.0, 0.02, 0.5, 0.95, 1.0)


class Event(NamedTuple):
    """One thing that a process did. file: a name. at: an offset or a length."""

    kind: str
    file: str
    at: int = 0
    data: bytes = b""
    other: str = ""
    durable: bool = False


@dataclass(slots=True)
class _File:
    """The content that is certain, and what has been done to it since."""

    safe: bytearray = field(default_factory=bytearray)
    pending: list[Event] = field(default_factory=list)


class Disk:
    """One directory. Events are done to it in their order; `lost` says what a power loss leaves."""

    def __init__(self) -> None:
        self._safe: dict[str, _File] = {}
        self._names: dict[str, _File] = {}
        self._renamed: list[Event] = []
        self._made: list[_File | None] = []
        self.syncs = 0

    def put(self, name: str, content: bytes) -> None:
        """Let a file be there, durably."""
        self._safe[name] = self._names[name] = _File(bytearray(content))

    def do(self, event: Event, *, honest: bool = True) -> None:
        """Do an event. honest: a sync is not only acknowledged."""
        kind, file = event.kind, event.file
        if kind in ("make", "remove", "rename"):
            self._rename(event)
        elif kind == "sync":
            self.syncs += 1
            if honest:
                self._sync(file)
        elif file in self._names:
            one = self._names[file]
            one.pending.append(event)
            if event.durable and honest:
                self.syncs += 1
                one.pending.remove(event)
                _apply(one.safe, event)

    def lost(self, choose: random.Random) -> dict[str, bytes]:
        """Return the files that a power loss leaves now."""
        kept = choose.randint(0, len(self._renamed))
        names = dict(self._safe)
        for event, made in zip(self._renamed[:kept], self._made[:kept], strict=True):
            _name(names, event, made)
        return {name: _torn(one, choose) for name, one in names.items()}

    def _rename(self, event: Event) -> None:
        made = _File() if event.kind == "make" else None
        if event.kind == "make" and event.file in self._names:
            return
        self._renamed.append(event)
        self._made.append(made)
        _name(self._names, event, made)

    def _sync(self, file: str) -> None:
        if not file:
            self._safe = dict(self._names)
            self._renamed.clear()
            self._made.clear()
        elif file in self._names:
            one = self._names[file]
            for event in one.pending:
                _apply(one.safe, event)
            one.pending.clear()


def _name(names: dict[str, _File], event: Event, made: _File | None) -> None:
    if made is not None:
        names[event.file] = made
    elif event.file in names:
        one = names.pop(event.file)
        if event.kind == "rename":
            names[event.other] = one


def _apply(content: bytearray, event: Event) -> None:
    if event.kind == "length":
        content[event.at :] = bytes(max(0, event.at - len(content)))
        return
    if event.kind == "allocate":
        content += bytes(max(0, event.at - len(content)))
        return
    end = event.at + len(event.data)
    content += bytes(max(0, end - len(content)))
    content[event.at : end] = event.data


def _torn(one: _File, choose: random.Random) -> bytes:
    """Return what is left of a file: what is certain, and any part of the rest."""
    content = bytearray(one.safe)
    keep = choose.choice(_KEEP)
    lengths = [event for event in one.pending if event.kind != "write"]
    for event in lengths[: choose.randint(0, len(lengths))]:
        _apply(content, event)
    longer = choose.random() < 0.5
    for event in one.pending:
        if event.kind != "write":
            continue
        for begin in range(0, len(event.data), SECTOR):
            at = event.at + begin
            if choose.random() < keep and (longer or at < len(content)):
                _apply(content, Event("write", "", at, event.data[begin : begin + SECTOR]))
    return bytes(content)


# ---- recording


class _Recorder:
    """Turns the calls of a child into events on the files of one folder."""

    def __init__(self, folder: Path, log: Path) -> None:
        self._folder = folder
        self._log = log
        self._open: dict[int, tuple[str, bool]] = {}
        self._at: dict[int, int] = {}
        self.events: list[Event] = []

    def visit(self, call: Call) -> None:
        if call.result is None or call.result < 0:
            return
        made: Callable[[Call], None] | None = getattr(
            self, "_open_" if call.name == "open" else f"_{call.name}", None
        )
        if made is not None:
            made(call)

    def _inside(self, path: str) -> str | None:
        """Return the name of a file in the folder, "" for the folder, None for another one."""
        if path == str(self._folder):
            return ""
        if path == str(self._log):
            return "@log"
        place = Path(path)
        return place.name if place.parent == self._folder else None

    def _openat(self, call: Call) -> None:
        self._opened(call, call.text(1), call.arguments[2])

    def _open_(self, call: Call) -> None:
        self._opened(call, call.text(0), call.arguments[1])

    def _opened(self, call: Call, path: str, flags: int) -> None:
        name = self._inside(path)
        if name is None or call.result is None or name.endswith("-lock"):
            return
        self._open[call.result] = name, bool(flags & _DURABLE)
        self._at[call.result] = 0
        if flags & os.O_CREAT:
            self.events.append(Event("make", name))
        if flags & os.O_TRUNC:
            self.events.append(Event("length", name, 0))

    def _close(self, call: Call) -> None:
        self._open.pop(call.arguments[0], None)

    def _lseek(self, call: Call) -> None:
        self._at[call.arguments[0]] = call.result or 0

    def _wrote(self, call: Call, at: int | None, data: bytes) -> None:
        number = call.arguments[0]
        if number not in self._open:
            return
        name, durable = self._open[number]
        if at is None:
            at = self._at[number]
            self._at[number] += call.result or 0
        data = data[: call.result]
        self.events.append(Event("write", name, at, data, durable=durable))

    def _vector(self, call: Call) -> bytes:
        if call.arguments[0] not in self._open:
            return b""
        table = call.memory(call.arguments[1], _VECTOR.size * call.arguments[2])
        return b"".join(call.memory(*one) for one in _VECTOR.iter_unpack(table))

    def _write(self, call: Call) -> None:
        self._wrote(call, None, call.memory(call.arguments[1], call.result or 0))

    def _writev(self, call: Call) -> None:
        self._wrote(call, None, self._vector(call))

    def _pwrite64(self, call: Call) -> None:
        self._wrote(call, call.arguments[3], call.memory(call.arguments[1], call.result or 0))

    def _pwritev(self, call: Call) -> None:
        self._wrote(call, call.arguments[3], self._vector(call))

    _pwritev2 = _pwritev

    def _fsync(self, call: Call) -> None:
        if call.arguments[0] in self._open:
            self.events.append(Event("sync", self._open[call.arguments[0]][0]))

    _fdatasync = _fsync

    def _length(self, kind: str, name: str | None, length: int) -> None:
        if name is not None:
            self.events.append(Event(kind, name, length))

    def _ftruncate(self, call: Call) -> None:
        name, _ = self._open.get(call.arguments[0], (None, False))
        self._length("length", name, call.arguments[1])

    def _truncate(self, call: Call) -> None:
        self._length("length", self._inside(call.text(0)), call.arguments[1])

    def _fallocate(self, call: Call) -> None:
        name, _ = self._open.get(call.arguments[0], (None, False))
        self._length("allocate", name, call.arguments[2] + call.arguments[3])

    def _unlink(self, call: Call) -> None:
        self._removed(call.text(0))

    def _unlinkat(self, call: Call) -> None:
        self._removed(call.text(1))

    def _removed(self, path: str) -> None:
        if (name := self._inside(path)) is not None:
            self.events.append(Event("remove", name))

    def _rename(self, call: Call) -> None:
        self._renamed(call.text(0), call.text(1))

    def _renameat(self, call: Call) -> None:
        self._renamed(call.text(1), call.text(3))

    _renameat2 = _renameat

    def _renamed(self, old: str, new: str) -> None:
        name, other = self._inside(old), self._inside(new)
        if name is not None and other is not None:
            there = self._open.items()  # what is open keeps its file, whatever that is called
            self._open = {
                number: (other if file == name else file, durable)
                for number, (file, durable) in there
                if file != other
            }
            self.events.append(Event("rename", name, other=other))


def record(work: Callable[[], None], folder: Path, log: Path) -> list[Event]:
    """Let a process do `work` to the end; return what it did to the files of `folder` and `log`.

    Raises Unavailable if it did not come to its end.
    """
    recorder = _Recorder(folder, log)
    if status := trace(work, recorder.visit):
        raise Unavailable(f"the writer ended with {status} though nothing was done to it")
    return recorder.events


def loaded(folder: Path) -> Disk:
    """Return a disk that holds what a folder does."""
    disk = Disk()
    for path in folder.iterdir():
        disk.put(path.name, path.read_bytes())
    return disk


def written(files: dict[str, bytes], folder: Path) -> None:
    """Make a folder that holds these files."""
    folder.mkdir(mode=0o700)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def notes(events: Iterable[Event]) -> str:
    """Return what a writer had noted in its log."""
    return b"".join(event.data for event in events if event.file == "@log").decode()
