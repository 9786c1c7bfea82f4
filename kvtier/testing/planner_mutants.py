"""What plans copies, with one thing changed: every change has to show in bytes or in a refusal."""

from __future__ import annotations

import ast
import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np

from kvtier.device import descriptors, layout, spread, staging
from kvtier.device.base import HOLE, Copy, PlaneGroups
from kvtier.device.chaos import POISON
from kvtier.device.descriptors import CUT_BYTES, Runs, cut, joined
from kvtier.device.layout import byte_pages
from kvtier.device.spread import Spread, describe, spreads
from kvtier.device.staging import Staged
from kvtier.errors import ConfigError, MisuseError
from kvtier.testing.guards import Guard, guards_of
from kvtier.testing.layouts import cases, is_right
from kvtier.testing.operators import Edit, edits

_STAGING: Final[tuple[tuple[int, int, int], ...]] = ((1040, 4, 5), (1 << 16, 1000, 1000))
"""Bytes of staging memory, and planes and runs that go through it at once."""
_AROUND: Final = 256
_MANY: Final = (1000, 1000)
_SUMS: Final[dict[type[ast.operator], tuple[ast.operator, ...]]] = {
    ast.Add: (ast.Sub(),),
    ast.Sub: (ast.Add(),),
    ast.Mult: (ast.Add(),),
    ast.FloorDiv: (ast.Mult(),),
    ast.Mod: (ast.Mult(),),
}


def planner_mutants() -> Iterator[Guard]:
    """Yield each guard, comparison, sum and product of the planner, taken away or changed."""
    for module in (descriptors, layout, spread, staging):
        yield from guards_of(module, lambda tree: chain(edits(tree), _arithmetic(tree)))


def _arithmetic(function: ast.AST) -> Iterator[Edit]:
    """Yield sums and products that are other ones, and comparisons that are their opposites."""
    for parent in ast.walk(function):
        for field, value in ast.iter_fields(parent):
            nodes = value if isinstance(value, list) else [value]
            for number, node in enumerate(nodes):
                index = number if isinstance(value, list) else None
                for instead in _others(node):
                    yield Edit("other", ast.unparse(node), parent, field, index, [instead])


def _others(node: Any) -> Iterator[ast.AST]:
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            for other in _SUMS.get(type(op), ()):
                yield ast.BinOp(left, other, right)
        case ast.AugAssign(target=target, op=op, value=value):
            for other in _SUMS.get(type(op), ()):
                yield ast.AugAssign(target, other, value)
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=comparators):
            yield ast.Compare(left, [ast.NotEq()], comparators)
        case ast.Compare(left=left, ops=[ast.NotEq()], comparators=comparators):
            yield ast.Compare(left, [ast.Eq()], comparators)


def planner_holds() -> bool:
    """Say whether all layouts are copied right, and all that cannot be copied is refused."""
    return (
        _plain_facts()
        and _counts()
        and _staged_facts()
        and _staged_copies()
        and _cut_groups()
        and _together()
        and all(_refused(error, said, call) for error, said, call in _refusals())
        and all(is_right(case, mover) for case in cases() for mover in (_by_planes, _by_runs))
        # Through staging memory each other case goes at once, and the others bit by bit.
        and all(
            is_right(case, partial(_by_stages, *_STAGING[number // 3 % 2]))
            for number, case in enumerate(cases())
        )
    )


def _by_planes(spread: Spread, into_slot: bool) -> None:  # noqa: FBT001  (a Mover)
    """Do what the kernel does."""
    *begins, to, of, nbytes = spread.rows(into_slot=into_slot)
    for plane in zip(*begins, strict=True):
        for run in zip(to + plane[0], of + plane[1], nbytes, strict=True):
            ctypes.memmove(*map(int, run))


def _by_runs(spread: Spread, into_slot: bool) -> None:  # noqa: FBT001  (a Mover)
    """Do what batched copies do."""
    _move(joined(spread.expanded()), into_slot)


def _by_stages(
    most: int,
    planes: int,
    runs: int,
    spread: Spread,
    into_slot: bool,  # noqa: FBT001  (a Mover)
) -> None:
    """Do what a copy through so many bytes of staging memory does, where they end in others."""
    memory = np.full(most + 2 * _AROUND, POISON, np.uint8)
    address = memory.ctypes.data + _AROUND
    for stage in Staged(spread).stages(address, most, planes, runs):
        low, high = stage.inner.reach()
        if low < address or high > address + most:
            raise AssertionError(f"{low} to {high} is not in {most} bytes at {address}")
        for (run, link), (run_stop, link_stop) in pairwise(stage.lots):
            inner = Spread(stage.inner.planes, stage.inner.runs.some(slice(run, run_stop)))
            over = stage.link.some(slice(link, link_stop))
            steps = (partial(_by_planes, inner), partial(_move, over))
            for step in steps if into_slot else reversed(steps):
                step(into_slot)
    if (memory[:_AROUND] != POISON).any() or (memory[-_AROUND:] != POISON).any():
        raise AssertionError("a copy through staging memory writes beside it")


def _move(runs: Runs, into_slot: bool) -> None:  # noqa: FBT001  (as a Mover's)
    for to, of, nbytes in runs.table(into_slot=into_slot).T.tolist():
        ctypes.memmove(to, of, nbytes)


def _refused(error: type[Exception], said: str, call: Callable[[], object]) -> bool:
    try:
        call()
    except error as refusal:
        return said in str(refusal)
    return False


def _refusals() -> Iterator[tuple[type[Exception], str, Callable[[], object]]]:
    """Yield what has to be refused: the error, what it says, and the call."""
    pages, slot = np.zeros((4, 5, 8), np.uint8), np.zeros((4, 2, 8), np.uint8)
    for blocks, part in (
        *(((1,), slot), ((1, 2, 3), slot), ((1, 2), slot[:3])),
        *(
            ((1, 2), slot[:, ::-1]),
            ((1, 2), slot[::-1]),
            ((1, 2), slot[:, :, :7]),
            ((), slot),
            ((1, 5), slot),
            ((-2, 1), slot),
        ),
    ):
        copy = Copy(pages, blocks, part)
        yield MisuseError, "do not match", partial(describe, [copy])
        yield MisuseError, "do not match", partial(describe, [Copy(pages, (), slot[:, :0]), copy])
    yield MisuseError, "do not match", partial(describe, [Copy(pages[:, :0], (0,), slot[:, :1])])
    several = [Copy(pages, blocks, slot) for blocks in ((3, 4), (HOLE, 2), (1, 5), (7, 8))]
    yield MisuseError, "blocks 1 to 5 do not match pages of 5", partial(describe, several)
    for most in (0, -16, 8, 24):
        yield MisuseError, "aligned", partial(cut, describe([]), most)
    good = np.zeros((4, 5, 64), np.uint16)
    strided = np.lib.stride_tricks.as_strided
    for bad, said in (
        (np.zeros((4, 5, 128), np.uint16)[:, :, ::2], "gaps"),
        (np.zeros((4, 5, 4, 32), np.uint16)[:, :, :, :16], "gaps"),
        (np.zeros((4, 4, 5, 64), np.uint16)[:2, :2], "evenly"),
        (strided(good, good.shape, (640, 126, 2)), "share bytes"),
        (strided(good, good.shape, (638, 128, 2)), "share bytes"),
        (strided(good, good.shape, (0, 128, 2)), "share bytes"),
        (good[::-1], "share bytes"),
        (np.broadcast_to(good[0], good.shape), "writable"),
        (np.zeros((5, 4, 64), np.uint16), "is not 4 planes"),
        (np.zeros((4, 5, 32), np.uint16), "is not 4 planes"),
    ):
        yield ConfigError, said, partial(byte_pages, bad, 4, 128)


def _plain_facts() -> bool:
    """Say whether some small plans are as they are by hand."""
    pages, slot = np.zeros((2, 6, 32), np.uint8), np.zeros((2, 4, 32), np.uint8)
    at, to = pages.ctypes.data, slot.ctypes.data
    runs = describe([Copy(pages, (2, 3, HOLE, 5), slot)])
    rows = [runs.pages.tolist(), runs.slots.tolist(), runs.nbytes.tolist(), len(runs), runs.total]
    by_hand = [
        [at + 64, at + 160, at + 256, at + 352],
        [to, to + 96, to + 128, to + 224],
        [64, 32, 64, 32],
        4,
        192,
    ]
    pieces = cut(Runs(*np.array([[1000], [5000], [40]], np.uint64)), 16)
    apart = describe([Copy(pages, (1, 3), slot[:, :2])])
    two = [Copy(pages, some, slot[:, :2]) for some in ((1, 4), (3, 0))]
    whole, flat = spreads([two])[0][0], slot[0, :2][None]
    lone = np.lib.stride_tricks.as_strided(pages, (1, 2, 6, 1, 32), (7, 192, 32, 9, 1))
    return (
        rows == by_hand
        and whole.cut(16).first.tolist() == [0, 4, 8]
        and whole.cut(32) is whole
        and spreads([[Copy(pages[:0], (1,), slot[:0, :1])]]) == [[]]
        and _rows(describe([Copy(pages[:1], (0, 2), flat)]))
        == [[at, to, 32], [at + 64, to + 32, 32]]
        and joined(apart) is apart  # what does not have to be touched costs nothing
        and cut(apart, 32) is apart
        and byte_pages(lone, 2, 32).strides == pages.strides
        and pieces.pages.tolist() == [1000, 1016, 1032]
        and pieces.slots.tolist() == [5000, 5016, 5032]
        and pieces.nbytes.tolist() == [16, 16, 8]
        and len(describe([])) == len(cut(describe([]))) == len(joined(describe([]))) == 0
    )


def _counts() -> bool:
    """Say whether runs are counted as they will be, whatever lies together in memory."""
    for planes, ids in ((1, ((2,), (3, 4))), (2, ((1, 3), (5,), (4, 6))), (3, ((1,), (5, 6, 0)))):
        shapes = ((planes, 9, 16), *((planes, len(some), 16) for some in ids))
        plain = [np.zeros(shape, np.uint8) for shape in shapes]
        turned = [np.zeros((blocks, n, 16), np.uint8).swapaxes(0, 1) for n, blocks, _ in shapes]
        for pages, *slots in (plain, turned):
            copies = [Copy(pages, some, slot) for some, slot in zip(ids, slots, strict=True)]
            if any(one.count != len(_joined_apart(one)) for one in spreads([copies])[0]):
                return False
    return True


def _joined_apart(spread: Spread) -> list[list[int]]:
    """Return the runs of a spread on all planes, those of each copy joined, of no two."""
    found: list[list[int]] = []
    for first, stop in zip(spread.first[:-1], spread.first[1:], strict=True):
        one = Spread(spread.planes, spread.runs.some(slice(first, stop)))
        found += _rows(joined(one.expanded()))
    return found


def _staged_facts() -> bool:
    """Say whether some small lots are as they are by hand."""
    pages, arena = np.zeros((4, 20, 16), np.uint8), np.zeros((6, 4, 3, 16), np.uint8)
    ids = [(at, at + 1, at + 3) for at in range(4)]
    ids.insert(2, (HOLE,) * 3)
    copies = [Copy(pages, some, slot) for some, slot in zip(ids, arena, strict=False)]
    at, (spread,) = arena.ctypes.data, spreads([copies])[0]
    slots = [at + 192 * one for one in (0, 1, 3, 4)]  # each of 192 bytes
    (found,) = Staged(spread).stages(1024, 3 * 192 + 191, *_MANY)
    thin = list(Staged(spread).stages(1024, 2 * 48 + 15, *_MANY))
    few = (Copy(pages, (1, 3), arena[5, :, :2]), Copy(pages, (5,), arena[5, :, 2:]))
    (several,) = spreads([few])[0]
    (parts,) = Staged(several).stages(1024, 176 + 160, *_MANY)
    odd = np.zeros((2, 1, 1, 24), np.uint8)
    (uneven,) = spreads([[Copy(np.zeros((1, 2, 24), np.uint8), (1,), slot) for slot in odd]])[0]
    (split,) = Staged(uneven).stages(1024, 64, *_MANY)
    limits = ((9, 4), (9, 2), (9, 1), (3, 9))
    fours, twos, ones, thirds = (list(Staged(spread).stages(1024, 1 << 20, *n)) for n in limits)
    long = np.zeros((1, 1, CUT_BYTES + 16), np.uint8)
    (uncut,) = spreads([[Copy(long, (0,), long.copy())]])[0]
    (stage,) = Staged(uncut).stages(1024, 1 << 20, *_MANY)
    together = np.zeros((9, 4, 16), np.uint8).swapaxes(0, 1)
    single = [Copy(together, (one,), np.zeros((4, 1, 16), np.uint8)) for one in (1, 5)]
    return (
        spread.reach() == (at, at + 5 * 192)
        and spread.total == 4 * 192
        and (Staged(spread).runs, Staged(several).runs, Staged(uneven).runs) == (4, 8, 2)
        and _rows(found.link)
        == [[1024, slots[0], 2 * 192], [1408, slots[2], 192], [1024, slots[3], 192]]
        and found.lots == [(0, 0), (6, 2), (8, 3)]
        and [_rows(stage.link) for stage in thin]
        == [[[1024, slot + half, 96] for slot in slots] for half in (0, 96)]
        and {tuple(stage.lots) for stage in thin} == {tuple((2 * n, n) for n in range(5))}
        and _rows(parts.link)
        == [
            [begin + plane, at + 960 + place + plane, size]
            for begin, place, size in ((1024, 0, 32), (1200, 32, 16))
            for plane in (0, 48, 96, 144)
        ]
        and parts.lots == [(0, 0), (3, 8)]
        and _rows(split.link) == [[1024 + 32 * n, odd.ctypes.data + 24 * n, 24] for n in (0, 1)]
        and [stage.lots for stage in fours] == [[(0, 0), (4, 1), (8, 2)]]
        and [stage.lots for stage in twos] == [[(2 * n, n) for n in range(5)]]
        and {run for stage in ones for run, _ in stage.lots} == {0, 1}
        and [len(stage.inner.planes[0]) for stage in thirds] == [3, 1]
        and stage.inner.runs.nbytes.tolist() == [CUT_BYTES, 16]
        and spreads([single])[0][0].count == 2
    )


def _cut_groups() -> bool:
    """Say whether groups that have the same copies are planned as such are that have not."""
    pages, arena = np.zeros((6, 9, 16), np.uint8), np.zeros((3, 6, 2, 16), np.uint8)
    copies = [Copy(pages, (at, at + 2), slot) for at, slot in enumerate(arena)]
    copies[2] = Copy(pages[:4], (5, 6), arena[2, :4])
    cuts = (((0, 1), (1, 3), (3, 6)), ((0, 1), (1, 3), (3, 6)), ((0, 0), (0, 2), (2, 4)))
    groups = PlaneGroups(copies, cuts, 3)
    cut, plain = spreads(groups), spreads(list(groups))
    third = cut[2][0]
    (stage,) = Staged(third).stages(1024, 3 * 32 * 2, *_MANY)
    together, single = np.zeros((9, 4, 16), np.uint8).swapaxes(0, 1), np.zeros((4, 1, 16), np.uint8)
    (alone,) = spreads(PlaneGroups([Copy(together, (1,), single)], [((1, 3),)], 1))[0]
    each, same = (
        [sorted(run for one in some for run in _rows(one.expanded())) for some in planned]
        for planned in (cut, plain)
    )
    return (
        [len(some) for some in cut] == [1, 2, 2]
        and each == same
        and third.reach() == (arena[0, 3].ctypes.data, arena[2].ctypes.data)
        and _rows(stage.link)
        == [[1024, arena[0, 3:].ctypes.data, 96], [1120, arena[1, 3:].ctypes.data, 96]]
        and _refused(IndexError, "3", lambda: groups[3])
        and [len(some) for some in groups[1:]] == [3, 3]
        and len(groups[-3]) == 2
        and (alone.count, Staged(third).runs) == (1, 2)
    )


def _staged_copies() -> bool:
    """Say whether copies whose slots are in no order go right through little staging memory."""
    pages = np.random.default_rng(0).integers(0, POISON, (2, 20, 32), np.uint8)
    for most, runs in ((64, 9), (1 << 10, 2), (1 << 10, 1)):
        arena = np.zeros((5, 2, 3, 32), np.uint8)
        each = [((7 * at) % 20, (7 * at + 3) % 20, (7 * at + 4) % 20) for at in range(5)]
        copies = [Copy(pages, some, arena[4 - at]) for at, some in enumerate(each)]
        (spread,) = spreads([copies])[0]
        _by_stages(most, 9, runs, spread, True)  # noqa: FBT003  (a Mover's)
        if not all(np.array_equal(slot, pages[:, ids]) for _, ids, slot in copies):
            return False
    return True


def _rows(runs: Runs) -> list[list[int]]:
    """Return runs one by one: where in the blocks, where in the slots, and how many bytes."""
    rows = (row.tolist() for row in runs.ends(into_slot=False))
    return [list(run) for run in zip(*rows, strict=True)]


def _together() -> bool:
    """Say whether copies of unlike shapes are planned in one call as each would be, run by run."""
    pages, across = np.zeros((3, 7, 32), np.uint8), np.zeros((7, 4, 16), np.uint8).swapaxes(0, 1)
    arena = np.zeros(1 << 14, np.uint8)
    padded, at = np.zeros((2, 6, 40), np.uint8)[:, :, :32], 0
    copies = []
    for some, blocks, gap in (
        *((pages, (1, 2, 5), 0), (pages, (6, 0, 4), 0), (pages, (5, 6, HOLE, 0), 32)),
        *((padded, (1, 2), 0), (padded, (3, 4), 0), (padded[:1], (5, HOLE, 0, 1), 0)),
        *((pages[:1], (1, 2), 0), (pages[:1], (3, 4), 0), (pages[:1], (5, 6), 32)),
        *((across, (2,), 0), (across, (3,), 0), (across, (4,), 16), (across, (5, 6), 0)),
        *((pages[1:], (), 0), (pages, (0, 3, 6), 0), (pages, range(7), 0), (pages, (HOLE,), 0)),
    ):
        size = some[:, 0].size * len(blocks)
        slot = arena[at : at + size].reshape(len(some), len(blocks), some.shape[2])
        copies.append(Copy(some, blocks, slot))
        at += size + gap
    wide = arena[at : at + 3 * 9 * 32].reshape(3, 9, 32)
    copies += [Copy(pages, (2, 3), wide[:, 1:3]), Copy(pages, (4, 5), wide[:, 2:6:2])]
    copies.append(Copy(padded, (2, 3), wide[:2, 0:4:2]))
    groups = [copies[:7], [], copies[7:9], copies[9:]]  # in which nothing is joined across borders
    return all(
        [
            _rows(joined(Runs.together([spread.expanded() for spread in planned])))
            for planned in spreads(some)
        ]
        == [_one_by_one(_alike_together(group)) for group in some]
        for some in ([copies], groups)
    )


def _alike_together(copies: list[Copy]) -> list[Copy]:
    """Return copies with those beside each other that are planned in one."""
    found: dict[tuple[tuple[int, ...], ...], list[Copy]] = {}
    for copy in copies:
        shape = (copy.pages.shape, copy.pages.strides, copy.slot.strides)
        found.setdefault(shape, []).append(copy)
    return list(chain.from_iterable(found.values()))


def _one_by_one(copies: list[Copy]) -> list[list[int]]:
    """Return the runs of copies, found block by block."""
    found: list[list[int]] = []
    for pages, blocks, slot in copies:
        for plane, part in zip(pages, slot, strict=True):
            for place, block in enumerate(blocks):
                if block == HOLE:
                    continue
                run = [plane[block].ctypes.data, part[place].ctypes.data, pages.shape[2]]
                last = found[-1] if found else [0, 0, 0]
                if run[:2] == [last[0] + last[2], last[1] + last[2]]:
                    last[2] += run[2]
                else:
                    found.append(run)
    return found
