"""The index of a slab store, read without LMDB: nothing is locked, mapped or written.

For whoever looks at a directory that somebody else may have open, or that may be damaged: a torn
page is an exception here and not the end of the process, and there is no read transaction that
could keep an owner's pages from being used again.

LMDB never writes to a page of its last two transactions: a transaction uses again only what was
free before the one before it. So what was read of transaction T is whole if, when all is read,
the last one committed is T or T+1. If not, it is read again, in smaller steps.

Pages are laid out as in LMDB 0.9 (mdb.c: MDB_meta, MDB_page, MDB_node). An entry of this index
always fits into a leaf, so there are no overflow pages.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple, Self

from kvtier.errors import Corrupt, Unavailable
from kvtier.identity.record import RecordId
from kvtier.storage_backends.slab_index import Entry, unpack_entry

_META: Final = struct.Struct("<10xH4x II16x IHH32xQ 4xHH24xQQ QQ")
_MAGIC: Final = 0xBEEFC0DE
_LMDB_VERSION: Final = 1
_META_PAGE: Final = 8
_INTEGER_KEYS: Final = 8  # what LMDB keeps of free pages has them
_NO_FOLDER: Final = 0x4000  # how the file was made
_LEAST_PAGE: Final = 512
_MOST_PAGE: Final = 1 << 16
NO_PAGE: Final = (1 << 64) - 1
"""Where a tree begins that has no pages."""

_PAGE: Final = struct.Struct("<Q2xHHH")
_NODE: Final = struct.Struct("<HHHH")
_BRANCH: Final = 1
_LEAF: Final = 2
_MOST_LEVELS: Final = 32
_MOST_KEY: Final = 511
_ATTEMPTS: Final = 200


class Meta(NamedTuple):
    """What a transaction left: where its tree begins, and the one of the pages that are free."""

    page_bytes: int
    levels: int
    entries: int
    root: int
    last: int
    transaction: int
    free_levels: int
    free_root: int


class Torn(NamedTuple):
    """A page that cannot be read; what is under it is lost."""

    page: int
    reason: str


class IndexPages:
    """The entries of an index file as they were last committed. Not thread-safe.

    Methods block, and raise Corrupt for a file that is no whole index, OSError for one that
    cannot be read, and Unavailable where commits follow each other too fast.
    """

    def __init__(self, path: Path) -> None:
        """Open a file for reading."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.latest()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._descriptor

    @property
    def count(self) -> int:
        """How many entries the last transaction left."""
        return self.latest().entries

    @property
    def replaced(self) -> bool:
        """Whether this file is no longer the one at its path."""
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return True
        mine = os.fstat(self._descriptor)
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)

    def find(self, name: RecordId) -> Entry | None:
        """Return the entry of a record, None if there is none."""
        found, _ = self._read(name, 1, inclusive=True)
        return next((entry for key, entry in found if key == name), None)

    def pages(
        self, step: int = 2048, torn: set[Torn] | None = None
    ) -> Iterator[list[tuple[RecordId, Entry]]]:
        """Yield all entries by name, about `step` at a time; each lot is of one transaction.

        torn: takes the pages that cannot be read; without it they raise Corrupt.
        """
        after = b""
        while True:
            found, damage = self._read(after, step)
            if damage and torn is None:
                worst = min(damage)
                raise Corrupt(f"page {worst.page} {worst.reason}")
            if torn is not None:
                torn |= damage
            if not found:
                return
            yield found
            after = found[-1][0]

    def _read(
        self, after: RecordId, step: int, *, inclusive: bool = False
    ) -> tuple[list[tuple[RecordId, Entry]], set[Torn]]:
        """Return entries that follow `after`: at least `step` of them if there are as many."""
        for _ in range(_ATTEMPTS):
            meta = self.latest()
            walk = Walk(self._descriptor, meta, after, step, inclusive=inclusive)
            if meta.root != NO_PAGE:
                walk.below(meta.root, meta.levels, b"", None)
            if self._unharmed(meta):
                return walk.found, walk.torn
            step = max(1, step // 2)
        raise Unavailable(f"{self.path} is committed to faster than it can be read; try again")

    def _unharmed(self, meta: Meta) -> bool:
        """Say whether nobody can have written yet to what the transaction of `meta` left."""
        return self.latest().transaction <= meta.transaction + 1

    def latest(self) -> Meta:
        """Return what was committed last, of two pages that take turns."""
        problem = Corrupt("truncated")
        for _ in range(_ATTEMPTS):
            try:
                first = self._metas()
            except Corrupt as error:  # perhaps it was being written
                problem = error
                continue
            if first == self._metas():
                return max(first, key=lambda meta: meta.transaction)
        raise problem

    def _metas(self) -> tuple[Meta, Meta]:
        first = self._meta(0)
        second = self._meta(first.page_bytes)
        if first.page_bytes != second.page_bytes:
            raise Corrupt("invalid")
        return first, second

    def _meta(self, offset: int) -> Meta:
        data = os.pread(self._descriptor, _META.size, offset)
        if len(data) < _META.size:
            raise Corrupt("truncated")
        kind, magic, version, page_bytes, *rest = _META.unpack(data)
        free_flags, free_levels, free_root, flags, levels, entries, root, last, transaction = rest
        if magic != _MAGIC or version != _LMDB_VERSION or kind != _META_PAGE:
            raise Corrupt("invalid")
        if flags or free_flags & ~_NO_FOLDER != _INTEGER_KEYS:
            raise Corrupt("invalid")
        if not _LEAST_PAGE <= page_bytes <= _MOST_PAGE:
            raise Corrupt("invalid")
        for first, height in ((root, levels), (free_root, free_levels)):
            if not (first == NO_PAGE or 1 <= height <= _MOST_LEVELS):
                raise Corrupt("invalid")
        if os.fstat(self._descriptor).st_size < (last + 1) * page_bytes:
            raise Corrupt("truncated")
        free = free_levels, free_root
        return Meta(page_bytes, levels, entries, root, last, transaction, *free)


class Walk:
    """One way down through the pages of a transaction, from `after` on."""

    def __init__(
        self, descriptor: int, meta: Meta, after: RecordId, step: int, *, inclusive: bool
    ) -> None:
        self._descriptor = descriptor
        self._meta = meta
        self._after = after
        self._step = step
        self._inclusive = inclusive
        self.found: list[tuple[RecordId, Entry]] = []
        self.torn: set[Torn] = set()

    def below(self, page: int, level: int, low: bytes, high: bytes | None) -> None:
        """Read what is under a page, whose names are from `low` on and below `high`."""
        try:
            data, nodes = self.nodes(page, _LEAF if level == 1 else _BRANCH)
            if level == 1:
                self.take(data, nodes, low, high)
                return
            keys, children = self.children(data, nodes, low, high)
        except Corrupt as error:
            self.torn.add(Torn(page, str(error)))
            return
        first = max(0, bisect_right(keys, self._after) - 1)
        for number in range(first, len(keys)):
            if len(self.found) >= self._step:
                return
            until = keys[number + 1] if number + 1 < len(keys) else high
            self.below(children[number], level - 1, keys[number], until)

    def nodes(self, page: int, kind: int) -> tuple[bytes, tuple[int, ...]]:
        """Return a page and where its nodes begin."""
        size = self._meta.page_bytes
        if page > self._meta.last:
            raise Corrupt("lies behind the end")
        data = os.pread(self._descriptor, size, page * size)
        if len(data) < size:
            raise Corrupt("is cut off")
        number, flags, lower, upper = _PAGE.unpack_from(data)
        if number != page or flags != kind:
            raise Corrupt("is not what its parent says")
        if not _PAGE.size <= lower <= upper <= size or lower % 2:
            raise Corrupt("has impossible bounds")
        nodes = struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", data, _PAGE.size)
        if any(not upper <= node <= size - _NODE.size for node in nodes):
            raise Corrupt("points outside itself")
        return data, nodes

    def children(
        self, data: bytes, nodes: tuple[int, ...], low: bytes, high: bytes | None
    ) -> tuple[list[bytes], list[int]]:
        """Return from which key on its children have what is below a branch, and their pages."""
        keys: list[bytes] = []
        children: list[int] = []
        ends: list[int] = []
        for node in nodes:
            least, more, most, key_bytes = _NODE.unpack_from(data, node)
            begin = node + _NODE.size
            ends.append(begin + key_bytes)
            # The first child has what is below the second: its own key means nothing.
            keys.append(data[begin : begin + key_bytes] if keys else low)
            children.append(least | more << 16 | most << 32)
        check_places(zip(nodes, ends, strict=True), len(data))
        check_order(keys, low, high)
        return keys, children

    def take(self, data: bytes, nodes: tuple[int, ...], low: bytes, high: bytes | None) -> None:
        """Collect what a leaf has."""
        entries, ends = entries_of(data, nodes)
        check_places(zip(nodes, ends, strict=True), len(data))
        check_order([key for key, _ in entries], low, high)
        self.found += [
            (key, unpack_entry(value))
            for key, value in entries
            if key > self._after or (self._inclusive and key == self._after)
        ]


def entries_of(data: bytes, nodes: Sequence[int]) -> tuple[list[tuple[bytes, bytes]], list[int]]:
    """Return the names and values of a leaf, and where each ends."""
    entries = []
    ends = []
    for node in nodes:
        least, more, flags, key_bytes = _NODE.unpack_from(data, node)
        begin = node + _NODE.size + key_bytes
        end = begin + (least | more << 16)
        if flags or not 1 <= key_bytes <= _MOST_KEY:
            raise Corrupt("has an impossible entry")
        entries.append((data[node + _NODE.size : begin], data[begin:end]))
        ends.append(end)
    return entries, ends


def check_places(placed: Iterable[tuple[int, int]], size: int) -> None:
    """Check that no two nodes, by begin and end, share bytes, and none is longer than the page."""
    ordered = sorted(placed)
    if ordered and ordered[-1][1] > size:
        raise Corrupt("has an impossible entry")
    if any(end > begin for (_, end), (begin, _) in pairwise(ordered)):
        raise Corrupt("has entries that overlap")


def check_order(keys: Sequence[bytes], low: bytes, high: bytes | None) -> None:
    """Check that names are in order, and between two others."""
    if not keys:
        raise Corrupt("is empty")
    if keys[0] < low or (high is not None and keys[-1] >= high):
        raise Corrupt("has names that belong elsewhere")
    if any(key >= following for key, following in pairwise(keys)):
        raise Corrupt("is out of order")
