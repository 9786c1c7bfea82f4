"""Small plans of copies through a GPU's own memory, which are as they are by hand."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvtier.device.base import HOLE, Copy
from kvtier.device.descriptors import CUT_BYTES, Runs
from kvtier.device.spread import spreads
from kvtier.device.staging import Lot, Stage, Staged, _places

MANY: Final = (1000, 1000)
"""Planes and runs of a stage, at most, where that is not what matters."""


def staging_holds() -> bool:
    """Say whether all of them are as they are by hand."""
    return _in_lots() and _in_groups()


def _in_lots() -> bool:
    """Say whether some small lots are as they are by hand."""
    pages, arena = np.zeros((4, 20, 16), np.uint8), np.zeros((6, 4, 3, 16), np.uint8)
    ids = [(at, at + 1, at + 3) for at in range(4)]
    ids.insert(2, (HOLE,) * 3)
    copies = [Copy(pages, some, slot) for some, slot in zip(ids, arena, strict=False)]
    at, (spread,) = arena.ctypes.data, spreads([copies])[0]
    slots = [at + 192 * one for one in (0, 1, 3, 4)]  # each of 192 bytes
    (found,) = Staged(spread).stages(1024, 3 * 192 + 191, *MANY)
    thin = list(Staged(spread).stages(1024, 2 * 48 + 15, *MANY))
    few = (Copy(pages, (1, 3), arena[5, :, :2]), Copy(pages, (5,), arena[5, :, 2:]))
    (several,) = spreads([few])[0]
    (parts,) = Staged(several).stages(1024, 176 + 160, *MANY)
    behind = [Copy(pages, (1, 3, 5), arena[4]), Copy(pages, (7,), arena[5, :, :1])]
    (beside,) = Staged(spreads([behind])[0][0]).stages(1024, 1 << 20, *MANY)
    odd = np.zeros((2, 1, 1, 24), np.uint8)
    (uneven,) = spreads([[Copy(np.zeros((1, 2, 24), np.uint8), (1,), slot) for slot in odd]])[0]
    (split,) = Staged(uneven).stages(1024, 64, *MANY)
    limits = ((9, 4), (9, 3), (9, 2), (9, 1), (3, 9), (2, 9))
    fours, threes, twos, ones, thirds, halves = (
        list(Staged(spread).stages(1024, 1 << 20, *n)) for n in limits
    )
    long = np.zeros((1, 1, CUT_BYTES + 16), np.uint8)
    (uncut,) = spreads([[Copy(long, (0,), long.copy())]])[0]
    (stage,) = Staged(uncut).stages(1024, 1 << 20, *MANY)
    together = np.zeros((9, 4, 16), np.uint8).swapaxes(0, 1)
    single = [Copy(together, (one,), np.zeros((4, 1, 16), np.uint8)) for one in (1, 5)]
    counted = ((spread, 4), (spread, 1), (several, 1), (several, 4), (uneven, 1))
    return (
        spread.reach() == (at, at + 5 * 192)
        and spread.total == 4 * 192
        and [Staged(one).pieces(n) for one, n in counted] == [4, 4, 2, 8, 2]
        and links(found)
        == [
            (6, [(1024, slots[0], 2 * 192), (1408, slots[2], 192)], None),
            (8, [(1024, slots[3], 192)], None),
        ]
        and [links(stage) for stage in thin]
        == [
            [(2 * n, [(1024, slot + half, 96)], None) for n, slot in enumerate(slots, 1)]
            for half in (0, 96)
        ]
        and links(parts) == [(3, [], [(1024, at + 960, 32), (1200, at + 992, 16)])]
        and (parts.step, found.step, split.step) == (48, 48, 0)
        and links(split)
        == [(2, [(1024 + 32 * n, odd.ctypes.data + 24 * n, 24) for n in (0, 1)], None)]
        and links(beside) == [(4, [(1024, at + 768, 192)], [(1216, at + 960, 16)])]
        and [lot.stop for (stage,) in (fours,) for lot in stage.lots[0]] == [4, 8]
        and [[lot.stop for lot in stage.lots[0]] for (stage,) in (threes, twos)]
        == 2 * [[2, 4, 6, 8]]
        and {lot.stop for stage in ones for lot in stage.lots[0]} == {1}
        and [len(stage.inner.planes[0]) for stage in thirds] == [2, 2]
        and [lot.whole.nbytes.tolist() for stage in halves for lot in stage.lots[0]]
        == 2 * [4 * [96]]
        and stage.inner.runs.nbytes.tolist() == [CUT_BYTES, 16]
        and spreads([single])[0][0].count == 2
    )


def _in_groups() -> bool:
    """Say whether groups of planes go through one place by one table, where each has room."""
    pages, arena = np.zeros((5, 20, 16), np.uint8), np.zeros((4, 5, 3, 16), np.uint8)
    ids = ((0, 2, 4), (1, 3, 5), (7, HOLE, 6))
    copies = [Copy(pages, some, slot) for some, slot in zip(ids, arena, strict=False)]
    (spread,) = spreads([copies])[0]
    staged, slots = Staged(spread), [slot.ctypes.data for slot in arena]
    groups = [range(2), range(2, 4), range(4, 5)]
    stage = staged.grouped(groups, 1024, 3 * 96, 9)
    few = staged.grouped(groups[1:], 1024, 2 * 96, 9)
    long = np.zeros((2, 1, CUT_BYTES + 16), np.uint8)
    (uncut,) = spreads([[Copy(long, (0,), long.copy())]])[0]
    cut = Staged(uncut).grouped([range(1), range(1, 2)], 1024, 1 << 20, 9)
    shared = _places((range(2),), 2, 16)
    if stage is None or few is None or cut is None or shared is None:
        return False
    (lot,), (two, one) = stage.lots[4], few.lots[2]
    last = (8, [(1024 + 96 * n, slots[n] + 192, 48) for n in (0, 1)], _apart(slots[2] + 192, 192))
    return (
        (stage.inner.planes[1] - stage.inner.planes[1][0]).tolist() == [0, 48, 0, 48, 0]
        and stage.inner.planes[0].tolist() == spread.planes[0].tolist()
        and (few.inner.planes[1] - few.inner.planes[1][0]).tolist() == [0, 0, 0, 48, 0]
        and (list(stage.lots), list(few.lots)) == ([0, 2, 4], [2, 4])
        and _link(lot) == last
        and _link(two) == (6, [(1024 + 96 * n, slots[n] + 96, 96) for n in (0, 1)], [])
        and _link(one) == (8, [], _apart(slots[2] + 96, 0))
        and staged.grouped(groups, 1024, 95, 9) is None
        and staged.grouped(groups, 1024, 96, 3) is not None
        and staged.grouped(groups, 1024, 96, 2) is None
        and staged.grouped([range(3), range(2, 4)], 1024, 1 << 20, 9) is None
        and staged.grouped([range(1), range(1)], 1024, 1 << 20, 9) is None
        and not shared.flags.writeable
        and [lot.stop for lot in cut.lots[1]] == [2]
        and cut.inner.runs.nbytes.tolist() == [CUT_BYTES, 16]
    )


def _apart(slot: int, used: int) -> list[tuple[int, ...]]:
    """Return the pieces of a copy whose second block of three is a hole, behind others."""
    return [(1024 + used + far, slot + far, 16) for far in (0, 32)]


_Link = tuple[int, list[tuple[int, ...]], list[tuple[int, ...]] | None]


def links(stage: Stage) -> list[_Link]:
    """Return of each lot of the only group what ``_link`` does."""
    (lots,) = stage.lots.values()
    return [_link(lot) for lot in lots]


def _link(lot: Lot) -> _Link:
    """Return the run behind its last, and what goes over the link: whole pieces, and parts."""
    parts = None if lot.parts is None else list(map(tuple, lines(lot.parts)))
    return lot.stop, list(map(tuple, lines(lot.whole))), parts


def lines(runs: Runs) -> list[list[int]]:
    """Return runs one by one: where in the blocks, where in the slots, and how many bytes."""
    rows = (row.tolist() for row in runs.ends(into_slot=False))
    return [list(run) for run in zip(*rows, strict=True)]
