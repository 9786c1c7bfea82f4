"""Usable: the longest prefix at which every component has what it needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from kvtier.catalog.index import DRAM, NO_ROW, Index
from kvtier.identity.record import RecordId
from kvtier.identity.shape import Shape


def usable_tokens(
    shape: Shape, chunks: int, limit: int, has: Callable[[int, int], bool]
) -> tuple[int, int]:
    """Return the longest usable length, in tokens, and how many chunks have what each needs.

    limit: tokens, at most; the length is a multiple of the block, and of the chunk where a state
    is needed at its end. has: says whether the part at a position of a chunk is there.
    """
    size = shape.chunk_tokens
    whole = _whole(shape.always, chunks, has)
    most = min(whole * size, limit // shape.block_tokens * shape.block_tokens)
    covered = -(-most // size)
    runs = {at: _runs(has(c, at) for c in range(covered)) for at, _ in shape.windows}
    lengths = itertools.chain((most,), range((most - 1) // size * size, 0, -size))
    for tokens in lengths if most else ():
        last = (tokens - 1) // size
        if shape.states and (tokens % size or not all(has(last, at) for at in shape.states)):
            continue
        firsts = ((at, max(tokens - window, 0) // size) for at, window in shape.windows)
        if all(runs[at][last] > last - first for at, first in firsts):
            return tokens, whole
    return 0, whole


def leasable(
    index: Index, names: Sequence[Sequence[RecordId]], shape: Shape, first: int, tokens: int
) -> tuple[int, list[int]]:
    """Return the longest usable length for which DRAM has all that is needed, and its rows.

    tokens: at most; what is before chunk `first` the engine has. Under the Catalog's lock.
    """
    if shape.plain:  # no step of Python for each part
        return _leasable_plain(index, names, shape, first, tokens)
    find, present = index.find, index.present

    def has(chunk: int, at: int) -> bool:
        if chunk < first:
            return True
        row = find(names[chunk][at])
        return row != NO_ROW and bool(present[row] & 1 << DRAM)

    usable, _ = usable_tokens(shape, -(-tokens // shape.chunk_tokens), tokens, has)
    held = itertools.chain.from_iterable(shape.select(names, first, usable))
    return usable, list(map(index.rows.__getitem__, held))


def _leasable_plain(
    index: Index, names: Sequence[Sequence[RecordId]], shape: Shape, first: int, tokens: int
) -> tuple[int, list[int]]:
    size, block, parts = shape.chunk_tokens, shape.block_tokens, len(shape.names)
    wanted = names[first : -(-tokens // size)]
    rows = index.in_dram(itertools.chain.from_iterable(wanted))
    usable = min((first + len(rows) // parts) * size, tokens // block * block)
    return usable, rows[: (-(-usable // size) - first) * parts]


def _whole(places: Sequence[int], chunks: int, has: Callable[[int, int], bool]) -> int:
    """Return how many chunks, from the first, have all of some parts."""
    for chunk in range(chunks):
        for at in places:
            if not has(chunk, at):
                return chunk
    return chunks


def _runs(present: Iterable[bool]) -> list[int]:
    """Return for each place how many in a row are present up to it, itself included."""
    runs: list[int] = []
    run = 0
    for one in present:
        run = run + 1 if one else 0
        runs.append(run)
    return runs
