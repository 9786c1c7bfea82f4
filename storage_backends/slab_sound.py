"""Whether LMDB can be let at an index: every page of it is looked at, as it lies on the disk.

LMDB trusts its pages. One flipped bit in a page can end the process that follows it, by a signal or
by an assertion, or let it write over pages in use. So an index is read whole before it is opened:
every page is what its parent says, every entry lies within its page, and no page is both in use and
free. What is in the entries is another matter: they carry checksums of their own.
"""

from __future__ import annotations

import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.errors import Corrupt
from kvtier.identity.record import RECORD_ID_BYTES, RecordId
from kvtier.storage_backends.slab_index import VALUE_BYTES, WHERE, Page, where_of
from kvtier.storage_backends.slab_pages import (
    NO_PAGE,
    IndexPages,
    Meta,
    Torn,
    Walk,
    check_order,
    check_places,
    entries_of,
)

_METAS: Final = 2
_PAGE: Final = struct.Struct("<Q2xHI")  # of an overflow page: its number, flags and how many follow
_NODE: Final = struct.Struct("<HHHH")
_NUMBER: Final = struct.Struct("<Q")
_USUAL: Final = _NODE.pack(VALUE_BYTES, 0, 0, RECORD_ID_BYTES)
_USUAL_KEY: Final = _NODE.size + RECORD_ID_BYTES  # where it ends
_USUAL_WHERE: Final = _USUAL_KEY + WHERE.itemsize
_USUAL_BYTES: Final = _USUAL_KEY + VALUE_BYTES
_BRANCH: Final = 1
_OVERFLOW: Final = 4
_ELSEWHERE: Final = 1  # an entry whose value has pages of its own


def read_sound(path: Path) -> Page:
    """Return where the records of an index that nobody has open lie, by name.

    It may be empty or absent.

    Blocks, a few seconds for a million entries. Raises Corrupt for an index that LMDB must not
    open, with one word of reason and the page as its cause; OSError.
    """
    if not path.exists() or path.stat().st_size == 0:
        return Page([], np.empty(0, WHERE))
    found, torn = examine(path)
    if torn:
        first = min(torn)
        raise Corrupt("unreadable") from Corrupt(f"page {first.page} {first.reason}")
    return found


def examine(path: Path) -> tuple[Page, set[Torn]]:
    """Return where the records of an index lie, and its pages that LMDB must not see.

    Blocks. Raises Corrupt, with one word of reason, for a file that is no whole index; OSError.
    """
    with IndexPages(path) as pages:
        meta = pages.latest()
        descriptor = pages.fileno()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        whole = _Whole(descriptor, meta)
        if meta.root != NO_PAGE:
            whole.below(meta.root, meta.levels, b"", None)
        free = _Free(descriptor, meta, whole.used)
        if meta.free_root != NO_PAGE:
            free.below(meta.free_root, meta.free_levels, b"", None)
    torn = whole.torn | free.torn
    if len(whole.names) != meta.entries and not torn:
        torn.add(Torn(0, "counts other entries than there are"))
    return Page(whole.names, np.frombuffer(b"".join(whole.where), WHERE)), torn


class _Whole(Walk):
    """A walk through all pages, none of which it meets twice."""

    def __init__(self, descriptor: int, meta: Meta) -> None:
        super().__init__(descriptor, meta, b"", 1, inclusive=True)
        self.used = bytearray(meta.last + 1)
        self.used[:_METAS] = b"\1" * _METAS
        self.names: list[RecordId] = []
        self.where: list[bytes] = []

    def nodes(self, page: int, kind: int) -> tuple[bytes, tuple[int, ...]]:
        data, nodes = super().nodes(page, kind)
        _take(self.used, page)
        if len(nodes) <= (kind == _BRANCH):  # LMDB ends the process for a branch of one
            raise Corrupt("has too few entries")
        return data, nodes

    def take(self, data: bytes, nodes: tuple[int, ...], low: bytes, high: bytes | None) -> None:
        if all(data[node : node + _NODE.size] == _USUAL for node in nodes):  # as nearly all are
            names = [data[node + _NODE.size : node + _USUAL_KEY] for node in nodes]
            where = [data[node + _USUAL_KEY : node + _USUAL_WHERE] for node in nodes]
            ends = [node + _USUAL_BYTES for node in nodes]
        else:
            entries, ends = entries_of(data, nodes)
            names = [name for name, _ in entries]
            where = [where_of(value) for _, value in entries]
        check_places(zip(nodes, ends, strict=True), len(data))
        check_order(names, low, high)
        self.names += names
        self.where += where


class _Free(_Whole):
    """A walk through the tree of the pages that are free: by transaction, lists of pages."""

    def __init__(self, descriptor: int, meta: Meta, used: bytearray) -> None:
        super().__init__(descriptor, meta)
        self.used = used

    def children(
        self, data: bytes, nodes: tuple[int, ...], low: bytes, high: bytes | None
    ) -> tuple[list[bytes], list[int]]:
        children = []
        placed = []
        for node in nodes:
            least, more, most, key_bytes = _NODE.unpack_from(data, node)
            children.append(least | more << 16 | most << 32)
            placed.append((node, node + _NODE.size + key_bytes))
        self._check(data, placed[1:], low, high)
        return [b"\0"] * len(children), children  # all of them follow what the walk begins after

    def take(self, data: bytes, nodes: tuple[int, ...], low: bytes, high: bytes | None) -> None:
        placed = []
        values = []
        for node in nodes:
            least, more, flags, key_bytes = _NODE.unpack_from(data, node)
            begin = node + _NODE.size + key_bytes
            length = least | more << 16
            end = begin + (_NUMBER.size if flags == _ELSEWHERE else length)
            if flags not in (0, _ELSEWHERE):
                raise Corrupt("has an impossible list")
            placed.append((node, end))
            values.append((data[begin:end], length if flags else 0))
        self._check(data, placed, low, high)
        for value, length in values:
            self._list(self._overflow(value, length) if length else value)

    def _check(
        self, data: bytes, placed: list[tuple[int, int]], low: bytes, high: bytes | None
    ) -> None:
        """Check that keys are numbers, in order, and no two nodes share bytes."""
        del low, high  # numbers do not stand in the order of their bytes
        if any(_NODE.unpack_from(data, node)[3] != _NUMBER.size for node, _ in placed):
            raise Corrupt("has an impossible list")
        keys = [_NUMBER.unpack_from(data, node + _NODE.size)[0] for node, _ in placed]
        if any(key >= following for key, following in pairwise(keys)):
            raise Corrupt("is out of order")
        check_places(placed, len(data))

    def _overflow(self, value: bytes, length: int) -> bytes:
        """Return a value that has pages of its own."""
        (first,) = _NUMBER.unpack(value)
        size = self._meta.page_bytes
        if first > self._meta.last:
            raise Corrupt("lies behind the end")
        number, flags, count = _PAGE.unpack_from(os.pread(self._descriptor, size, first * size))
        needed = -(-(_PAGE.size + length) // size)
        if (number, flags, count) != (first, _OVERFLOW, needed):
            raise Corrupt("is not what its parent says")
        for page in range(first, first + count):
            _take(self.used, page)
        return os.pread(self._descriptor, length, first * size + _PAGE.size)

    def _list(self, value: bytes) -> None:
        pages = struct.unpack(f"<{len(value) // 8}Q", value[: len(value) // 8 * 8])
        if len(value) % 8 or not pages or pages[0] != len(pages) - 1:
            raise Corrupt("has an impossible list")
        if any(page <= following for page, following in pairwise(pages[1:])):
            raise Corrupt("has a list that is out of order")
        for page in pages[1:]:
            _take(self.used, page)


def _take(used: bytearray, page: int) -> None:
    """Note that a page has one use. Raises Corrupt for a second one."""
    if page >= len(used):
        raise Corrupt("lies behind the end")
    if used[page]:
        raise Corrupt("is used twice")
    used[page] = 1
