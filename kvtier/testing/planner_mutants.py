"""What plans copies, with one thing changed: every change has to show in bytes or in a refusal."""

from __future__ import annotations

import ast
import ctypes
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np

from kvtier.device import descriptors, layout, spread, stack, staging
from kvtier.device.base import Copy
from kvtier.device.chaos import POISON
from kvtier.device.descriptors import Runs, joined
from kvtier.device.spread import Spread, spreads
from kvtier.device.stack import Bytes
from kvtier.device.staging import Stage, Staged
from kvtier.testing.guards import Guard, guards_of
from kvtier.testing.layouts import cases, is_right
from kvtier.testing.operators import Edit, edits
from kvtier.testing.planner_facts import facts_hold

_STAGING: Final[tuple[tuple[int, int, int], ...]] = ((1040, 4, 5), (1 << 16, 1000, 1000))
"""Bytes of staging memory, and planes and runs that go through it at once."""
_AROUND: Final = 256
_ROOM: Final = 1 << 18  # for a group of each case
_SUMS: Final[dict[type[ast.operator], tuple[ast.operator, ...]]] = {
    ast.Add: (ast.Sub(),),
    ast.Sub: (ast.Add(),),
    ast.Mult: (ast.Add(),),
    ast.FloorDiv: (ast.Mult(),),
    ast.Mod: (ast.Mult(),),
}


def planner_mutants() -> Iterator[Guard]:
    """Yield each guard, comparison, sum and product of the planner, taken away or changed."""
    for module in (descriptors, layout, spread, stack, staging):
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
        facts_hold()
        and _staged_copies()
        and all(is_right(case, mover) for case in cases() for mover in (_by_planes, _by_runs))
        # Through staging memory each other case goes at once, and the others bit by bit; few go by
        # groups of planes.
        and all(
            is_right(case, partial(_by_stages, *_STAGING[number // 3 % 2]))
            and (number % 5 > 0 or is_right(case, _by_groups))
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
        _by_lots(stage, range(len(stage.inner.planes[0])), into_slot)
    _nothing_beside(memory)


def _by_groups(spread: Spread, into_slot: bool) -> None:  # noqa: FBT001  (a Mover)
    """Do what a copy in groups of planes does, the last of which is narrower, by one table."""
    planes = len(spread.planes[0])
    groups = [range(at, min(at + 2, planes)) for at in range(0, planes, 2)]
    memory = np.full(_ROOM + 2 * _AROUND, POISON, np.uint8)
    stage = Staged(spread).grouped(groups, memory.ctypes.data + _AROUND, _ROOM, 1000)
    for group in groups:
        if stage is None:
            raise AssertionError("there is room for each group")
        _by_lots(stage, group, into_slot)
    _nothing_beside(memory)


def _nothing_beside(memory: Bytes) -> None:
    if (memory[:_AROUND] != POISON).any() or (memory[-_AROUND:] != POISON).any():
        raise AssertionError("a copy through staging memory writes beside it")


def _by_lots(
    stage: Stage,
    planes: range,
    into_slot: bool,  # noqa: FBT001  (as a Mover's)
) -> None:
    """Do what a copy through staging memory does on some planes."""
    run = 0
    for lot in stage.lots[planes.start]:
        some = slice(planes.start, planes.stop)
        inner = Spread(stage.inner.planes[:, some], stage.inner.runs.some(slice(run, lot.stop)))
        run = lot.stop
        over = [lot.whole]
        if lot.parts is not None:
            over += [_shifted(lot.parts, plane * stage.step) for plane in range(len(planes))]
        steps = (partial(_by_planes, inner), partial(_move, Runs.together(over)))
        for step in steps if into_slot else reversed(steps):
            step(into_slot)


def _shifted(runs: Runs, by: int) -> Runs:
    return Runs(runs.pages + np.uint64(by), runs.slots + np.uint64(by), runs.nbytes)


def _move(runs: Runs, into_slot: bool) -> None:  # noqa: FBT001  (as a Mover's)
    for to, of, nbytes in runs.table(into_slot=into_slot).T.tolist():
        ctypes.memmove(to, of, nbytes)


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
