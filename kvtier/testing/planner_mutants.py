"""What plans copies, with one thing changed: every change has to show in bytes or in a refusal."""

from __future__ import annotations

import ast
import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np

from kvtier.device import descriptors, layout
from kvtier.device.base import HOLE, Copy
from kvtier.device.descriptors import Runs, allocated, cut, describe, describe_groups, joined
from kvtier.device.layout import byte_pages
from kvtier.errors import ConfigError, MisuseError
from kvtier.testing.guards import Guard, guards_of
from kvtier.testing.layouts import cases, is_right
from kvtier.testing.operators import Edit, edits

__all__ = ["planner_holds", "planner_mutants"]

_SUMS: Final[dict[type[ast.operator], tuple[ast.operator, ...]]] = {
    ast.Add: (ast.Sub(),),
    ast.Sub: (ast.Add(),),
    ast.Mult: (ast.Add(),),
    ast.FloorDiv: (ast.Mult(),),
    ast.Mod: (ast.Mult(),),
}


def planner_mutants() -> Iterator[Guard]:
    """Yield each guard, comparison, sum and product of the planner, taken away or changed."""
    for module in (descriptors, layout):
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
        all(is_right(case, _move) for case in cases())
        and all(_refused(error, said, call) for error, said, call in _refusals())
        and _plain_facts()
        and _together()
    )


def _move(runs: Runs, into_slot: bool) -> None:  # noqa: FBT001  (a Mover)
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
        *(((1, 2), slot[:, :, :7]), ((), slot), ((1, 5), slot), ((-2, 1), slot)),
    ):
        copy = Copy(pages, blocks, part)
        yield MisuseError, "do not match", partial(describe, [copy])
        yield MisuseError, "do not match", partial(describe, [Copy(pages, (), slot[:, :0]), copy])
    yield MisuseError, "do not match", partial(describe, [Copy(pages[:, :0], (0,), slot[:, :1])])
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
    pieces = cut(Runs(np.array([[1000], [5000], [40]], np.uint64)), 16)
    apart = describe([Copy(pages, (1, 3), slot[:, :2])])
    ids, owner, dense = np.array([1, 2, HOLE, 0, 1, 2, 3]), [0, 0, 0, 0, 0, 1, 1], [True, False]
    follows = descriptors._follows(ids, np.array(owner), np.array(dense))  # before there are planes
    lone = np.lib.stride_tricks.as_strided(pages, (1, 2, 6, 1, 32), (7, 192, 32, 9, 1))
    return (
        rows == by_hand
        and joined(apart) is apart  # what does not have to be touched costs nothing
        and cut(apart, 32) is apart
        and byte_pages(lone, 2, 32).strides == pages.strides
        and pieces.pages.tolist() == [1000, 1016, 1032]
        and pieces.slots.tolist() == [5000, 5016, 5032]
        and pieces.nbytes.tolist() == [16, 16, 8]
        and follows.tolist() == [False, True, False, False, True, False, False]
        and len(describe([])) == len(cut(describe([]))) == len(joined(describe([]))) == 0
    )


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
        [runs.rows.T.tolist() for runs in describe_groups(some, allocated)]
        == [_one_by_one(group) for group in some]
        for some in ([copies], groups)
    )


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
