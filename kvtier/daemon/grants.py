"""Grants: which slots are out in which plan, in memory that outlives the server.

The supervisor makes it and keeps its descriptor; clients never see it. A server that is started
anew reads what the one before had granted, so that no slot is given away that somebody may still
be copying from or to.

Little-endian. A header: magic, version, generation, the arena's inode number, and what the lives of
its servers are counted from. Then a mark for each
cell: 1 where a live grant begins. Then the members: processes that may execute the plans of an
engine. Then cells of 4 KiB, of which a grant takes as many as it needs, each naming the next.
A grant is written whole before its mark is set, and unmarked before its cells are used again, so
that a server that is killed between two writes leaves none that is half.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvtier.clock import Clock, monotonic
from kvtier.errors import ConfigError, ProtocolError
from kvtier.memory.arena import Slot
from kvtier.memory.packed import unpack_slots

CELLS: Final = 1 << 14
MEMBERS: Final = 1 << 13

_MAGIC: Final = b"KVTIERgr"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sQQQ")
_ORIGIN: Final = struct.Struct("<Q")  # behind the header
_LIVES_A_SECOND: Final = 8  # that a server can be started, at most: see Supervisor
_PAGE: Final = 4096
_MARKS_AT: Final = _PAGE
_MEMBERS_AT: Final = _MARKS_AT + CELLS
_MEMBER: Final = struct.Struct("<B7xQQ16s")
_MEMBER_BYTES: Final = 64
_CELLS_AT: Final = _MEMBERS_AT + MEMBERS * _MEMBER_BYTES
_CELL_BYTES: Final = 4096
_NEXT: Final = struct.Struct("<I4x")  # the number of the cell that follows, and 1; 0 for none
_INSIDE: Final = _CELL_BYTES - _NEXT.size
_HEAD: Final = struct.Struct(
    "<QQQ16s16sQ"
)  # plan, pid, start time, session, engine, bytes of slots
_ENDED_AT: Final = _NEXT.size + _HEAD.size
_ENDED: Final = struct.Struct("<QQ")
_MOST_ENDED: Final = 32
_SLOTS_AT: Final = _ENDED_AT + 8 + _MOST_ENDED * _ENDED.size
_BYTES: Final = _CELLS_AT + CELLS * _CELL_BYTES
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Who(NamedTuple):
    """A process, by its number and when it began."""

    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A plan that was out when an earlier server ended.

    session: whose it is; who: that session's process; engine: whose other processes may execute
    it. ended: processes that do so no more.
    """

    plan: int
    session: bytes
    engine: bytes
    who: Who
    ended: tuple[Who, ...]
    slots: list[Slot]


def make_grants() -> int:
    """Return the descriptor of a memfd for Grants, of sealed size. It takes memory as it fills."""
    fd = os.memfd_create("kvtier-grants", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def cells_for(slots: bytes) -> int:
    """Return how many cells a grant of packed slots takes."""
    return 1 + -(-max(len(slots) - (_CELL_BYTES - _SLOTS_AT), 0) // _INSIDE)


class Grants:
    """The table, opened by one server at a time. Not thread-safe.

    fd: of ``make_grants``; it is closed with this. arena: the arena's inode number; what was
    granted of another one is forgotten. generation: how many servers have opened it, this one
    included. life: the same, counted so that servers on an arena that comes after this one have
    other numbers, as long as the host is up.
    Raises ConfigError for what is no such table, and ProtocolError for a damaged one.
    """

    def __init__(self, fd: int, arena: int, clock: Clock = monotonic) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            if os.fstat(fd).st_size != _BYTES:
                raise ConfigError("the table of grants has another size; start the daemon anew")
            self._map = mmap.mmap(fd, _BYTES)
            undo.callback(self._map.close)
            self._map.madvise(mmap.MADV_DONTFORK)
            self._open(arena, clock)
            undo.pop_all()
        self._fd = fd

    def _open(self, arena: int, clock: Clock) -> None:
        """Begin a generation, with what the one before has left."""
        magic, version, generation, of = _HEADER.unpack_from(self._map)
        if magic != _MAGIC:
            version, generation = _VERSION, 0
        if version != _VERSION:
            raise ConfigError(f"grants of version {version}, not {_VERSION}; start the daemon anew")
        if magic != _MAGIC or of != arena:
            self._forget()
            _ORIGIN.pack_into(self._map, _HEADER.size, int(clock() * _LIVES_A_SECOND))
        self.generation = generation + 1
        self.life = _ORIGIN.unpack_from(self._map, _HEADER.size)[0] + self.generation
        _HEADER.pack_into(self._map, 0, _MAGIC, _VERSION, self.generation, arena)
        self._heads: dict[int, list[int]] = {}  # by plan, its cells
        self._members: dict[tuple[bytes, Who], int] = {}
        self.left = list(self._read())
        used = {cell for cells in self._heads.values() for cell in cells}
        self._free = [cell for cell in reversed(range(CELLS)) if cell not in used]
        rows = set(self._members.values())
        self._rows = [row for row in reversed(range(MEMBERS)) if row not in rows]

    def close(self) -> None:
        """Unmap it, and close the descriptor. Idempotent."""
        if self._fd >= 0:
            self._map.close()
            os.close(self._fd)
            self._fd = -1

    # ---- grants

    def add(self, plan: int, session: bytes, engine: bytes, who: Who, slots: bytes) -> bool:
        """Write down a plan before anybody hears of it; False when there is no room.

        session, engine: 16 bytes each. slots: packed, as messages carry them.
        """
        count = cells_for(slots)
        if count > len(self._free):
            return False
        cells = self._free[-count:]
        del self._free[-count:]
        at = _CELL_BYTES - _SLOTS_AT
        for number, cell in enumerate(cells):
            following = cells[number + 1] + 1 if number + 1 < count else 0
            _NEXT.pack_into(self._map, self._at(cell), following)
            if number:
                piece = slots[at : at + _INSIDE]
                start = self._at(cell) + _NEXT.size
                self._map[start : start + len(piece)] = piece
                at += _INSIDE
        head = self._at(cells[0])
        _HEAD.pack_into(self._map, head + _NEXT.size, plan, *who, session, engine, len(slots))
        self._map[head + _ENDED_AT] = 0
        piece = slots[: _CELL_BYTES - _SLOTS_AT]
        self._map[head + _SLOTS_AT : head + _SLOTS_AT + len(piece)] = piece
        self._heads[plan] = cells
        self._map[_MARKS_AT + cells[0]] = 1
        return True

    def ended(self, plan: int, who: Who) -> None:
        """Note that a process executes a plan no more. Beyond 32 it is not written down."""
        head = self._at(self._heads[plan][0]) + _ENDED_AT
        count = self._map[head]
        if count < _MOST_ENDED:
            _ENDED.pack_into(self._map, head + 8 + count * _ENDED.size, *who)
            self._map[head] = count + 1

    def drop(self, plan: int) -> None:
        """Forget a plan whose copies have ended everywhere."""
        cells = self._heads.pop(plan)
        self._map[_MARKS_AT + cells[0]] = 0
        self._free += reversed(cells)

    # ---- members

    @property
    def members(self) -> list[tuple[bytes, Who]]:
        """Return engines with the processes that may execute their plans."""
        return list(self._members)

    def enter(self, engine: bytes, who: Who) -> bool:
        """Write down that a process may execute an engine's plans; False when there is no room."""
        if (engine, who) in self._members:
            return True
        if not self._rows:
            return False
        row = self._members[engine, who] = self._rows.pop()
        at = _MEMBERS_AT + row * _MEMBER_BYTES
        _MEMBER.pack_into(self._map, at, 0, *who, engine)
        self._map[at] = 1
        return True

    def remove(self, engine: bytes, who: Who) -> None:
        """Forget a member that is dead."""
        row = self._members.pop((engine, who))
        self._map[_MEMBERS_AT + row * _MEMBER_BYTES] = 0
        self._rows.append(row)

    # ---- what there was

    def _forget(self) -> None:
        self._map[_MARKS_AT:_MEMBERS_AT] = bytes(CELLS)
        self._map[_MEMBERS_AT:_CELLS_AT] = bytes(MEMBERS * _MEMBER_BYTES)

    def _read(self) -> Iterator[Grant]:
        """Yield the grants that are marked, and note the members."""
        for row in range(MEMBERS):
            at = _MEMBERS_AT + row * _MEMBER_BYTES
            live, pid, start_time, engine = _MEMBER.unpack_from(self._map, at)
            if live:
                self._members[engine, Who(pid, start_time)] = row
        marks = np.frombuffer(self._map[_MARKS_AT:_MEMBERS_AT], np.uint8)
        for head in np.flatnonzero(marks).tolist():
            yield self._grant(head)

    def _grant(self, head: int) -> Grant:
        at = self._at(head)
        fields = _HEAD.unpack_from(self._map, at + _NEXT.size)
        plan, pid, start_time, session, engine, nbytes = fields
        count = self._map[at + _ENDED_AT]
        spot = at + _ENDED_AT + 8
        ended = tuple(
            Who(*_ENDED.unpack_from(self._map, spot + number * _ENDED.size))
            for number in range(count)
        )
        cells = [head]
        data = bytearray(self._map[at + _SLOTS_AT : at + _CELL_BYTES])
        while following := _NEXT.unpack_from(self._map, self._at(cells[-1]))[0]:
            if following > CELLS or len(cells) == CELLS:
                raise ProtocolError("the table of grants is damaged; start the daemon anew")
            cells.append(following - 1)
            start = self._at(cells[-1])
            data += self._map[start + _NEXT.size : start + _CELL_BYTES]
        self._heads[plan] = cells
        slots = unpack_slots(bytes(data[:nbytes]))
        return Grant(plan, session, engine, Who(pid, start_time), ended, slots)

    @staticmethod
    def _at(cell: int) -> int:
        return _CELLS_AT + cell * _CELL_BYTES
