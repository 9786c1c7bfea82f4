"""Small plans of copies, which are as they are by hand, and what no plan is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import cast
from unittest import mock

import numpy as np

from kvtier.device import spread as planner
from kvtier.device.base import HOLE, Copy, PlaneGroups
from kvtier.device.descriptors import Runs, cut, joined
from kvtier.device.layout import byte_pages
from kvtier.device.spread import Spread, describe, spreads
from kvtier.device.stack import Bytes, Planes, Stack, stacked
from kvtier.device.staging import Staged
from kvtier.errors import ConfigError, MisuseError
from kvtier.testing.staging_facts import MANY, lines, links, staging_holds


def facts_hold() -> bool:
    """Say whether all of them are as they are by hand, and all that cannot be copied is refused."""
    return (
        _plain_facts()
        and _counts()
        and staging_holds()
        and _cut_groups()
        and _own_planes()
        and _together()
        and _stacks()
        and _looks_once()
        and all(_refused(error, said, call) for error, said, call in _refusals())
    )


def _refused(error: type[Exception], said: str, call: Callable[[], object]) -> bool:
    try:
        call()
    except error as refusal:
        return said in str(refusal)
    return False


def _refusals() -> Iterator[tuple[type[Exception], str, Callable[[], object]]]:
    """Yield what has to be refused: the error, what it says, and the call."""
    import torch

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
            ((1 << 63, 1), slot),
            (cast("Sequence[int]", np.array([1, 5])), slot),
        ),
    ):
        copy = Copy(pages, blocks, part)
        yield MisuseError, "do not match", partial(describe, [copy])
        yield MisuseError, "do not match", partial(describe, [Copy(pages, (), slot[:, :0]), copy])
    yield MisuseError, "do not match", partial(describe, [Copy(pages[:, :0], (0,), slot[:, :1])])
    several = [Copy(pages, blocks, slot) for blocks in ((3, 4), (HOLE, 2), (1, 5), (7, 8))]
    yield MisuseError, "blocks 1 to 5 do not match pages of 5", partial(describe, several)
    uneven = [Copy(pages, blocks, slot) for blocks in ((1, 2), (1, 2, 3))]
    yield MisuseError, "3 blocks of (4, 5, 8) do not match their slot", partial(describe, uneven)
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
        (good.astype(object), "not Python's objects"),
        (torch.zeros(good.shape).half().to_sparse(), "by strides"),
        (np.zeros((5, 4, 64), np.uint16), "is not 4 planes"),
        (np.zeros((4, 5, 32), np.uint16), "is not 4 planes"),
    ):
        yield ConfigError, said, partial(byte_pages, bad, 4, 128)


def _looks_once() -> bool:
    """Say whether of chunks that are alike only the first is looked at: it takes a while."""
    pages, arena = np.zeros((4, 9, 16), np.uint8), np.zeros((5, 4, 2, 16), np.uint8)
    copies = [Copy(pages, (at, at + 2), slot) for at, slot in enumerate(arena)]
    with mock.patch.object(planner, "_shape", wraps=vars(planner)["_shape"]) as looks:
        spreads([copies])
        return looks.call_count == 1


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
    last = whole.on(1, 2)
    lone = np.lib.stride_tricks.as_strided(pages, (1, 2, 6, 1, 32), (7, 192, 32, 9, 1))
    return (
        rows == by_hand
        and whole.cut(16).first.tolist() == [0, 4, 8]
        and whole.cut(32) is whole
        and not whole.planes.flags.writeable
        and whole.on(0, 2) is whole
        and (last.whole, last.at, last.total) == (whole, 1, whole.total // 2)
        and spreads([[Copy(pages[:0], (1,), slot[:0, :1])]]) == [[]]
        and lines(describe([Copy(pages[:1], (0, 2), flat)]))
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
        found += lines(joined(one.expanded()))
    return found


def _own_planes() -> bool:
    """Say whether groups have of each copy its planes, behind one of its pages, or of its cuts."""
    (one, other), slot = np.zeros((2, 4, 3, 8), np.uint8), np.zeros((4, 1, 8), np.uint8)
    halves, rest = ((0, 2), (2, 4)), ((0, 1), (1, 4))
    copies = [Copy(pages, (0,), slot) for pages in (one, one, other)]
    cuts = [halves, rest, rest]
    groups = PlaneGroups(copies, cuts, 2)
    mine = [
        [copy.cut(slice(*cut[at])) for copy, cut in zip(copies, cuts, strict=True)] for at in (0, 1)
    ]
    return [list(map(_ends, group)) for group in groups] == [
        list(map(_ends, some)) for some in mine
    ]


def _ends(copy: Copy) -> tuple[object, ...]:
    pages, _, slot = copy
    return np.asarray(pages).ctypes.data, pages.shape, slot.ctypes.data, slot.shape


def _cut_groups() -> bool:
    """Say whether groups that have the same copies are planned as such are that have not."""
    pages, arena = np.zeros((6, 9, 16), np.uint8), np.zeros((3, 6, 2, 16), np.uint8)
    copies = [Copy(pages, (at, at + 2), slot) for at, slot in enumerate(arena)]
    copies[2] = Copy(pages[:4], (5, 6), arena[2, :4])
    cuts = (((0, 1), (1, 3), (3, 6)), ((0, 1), (1, 3), (3, 6)), ((0, 0), (0, 2), (2, 4)))
    groups = PlaneGroups(copies, cuts, 3)
    cut, plain = spreads(groups), spreads(list(groups))
    third = cut[2][0]
    (stage,) = Staged(third).stages(1024, 3 * 32 * 2, *MANY)
    together, single = np.zeros((9, 4, 16), np.uint8).swapaxes(0, 1), np.zeros((4, 1, 16), np.uint8)
    (alone,) = spreads(PlaneGroups([Copy(together, (1,), single)], [((1, 3),)], 1))[0]
    each, same = (
        [sorted(run for one in some for run in lines(one.expanded())) for some in planned]
        for planned in (cut, plain)
    )
    return (
        [len(some) for some in cut] == [1, 2, 2]
        and each == same
        and third.reach() == (arena[0, 3].ctypes.data, arena[2].ctypes.data)
        and links(stage)
        == [
            (
                4,
                [(1024, arena[0, 3:].ctypes.data, 96), (1120, arena[1, 3:].ctypes.data, 96)],
                None,
            )
        ]
        and _refused(IndexError, "3", lambda: groups[3])
        and [len(some) for some in groups[1:]] == [3, 3]
        and len(groups[-3]) == 2
        and (alone.count, Staged(third).pieces(3)) == (1, 2)
    )


def _stacks() -> bool:
    """Say whether tensors that are alike are planned at once, and each is where it is."""
    memory = np.zeros((10, 7, 16), np.uint8)
    each = [memory[6:8], memory[:2], memory[2:5], memory[8:9, :5], memory[5:6, :5]]
    turned = [memory[5:9], memory[:3]]
    wide, narrow = stacked(each)
    stacks = [(wide, each[:3]), (stacked(turned)[0], turned), (narrow, each[3:])]
    slots = np.zeros((3, 7, 7, 16), np.uint8)
    copies, by_hand = [], []
    for (pages, tensors), ids, slot in (
        *((stacks[0], (1, 5, 0), slots[0, :, :3]), (stacks[1], (2, 3, HOLE), slots[0, :, 3:6])),
        *((stacks[0], tuple(range(7)), slots[1]), (stacks[2], (4, 1), slots[2, :2, :2])),
        *((stacks[1], (4, 6, 5), slots[2, :, 2:5]), (stacks[0], (2, 6), slots[2, :, 5:])),
    ):
        copies.append(Copy(pages, ids, slot))
        by_hand.append([Copy(one[None], ids, part[None]) for one, part in _planes(tensors, slot)])
    cuts = [((0, 1), (1, 3), (3, 7))] * len(copies)
    cuts[3] = ((0, 0), (0, 2), (1, 1))
    planned = spreads([copies, *([one] for one in copies)])
    groups = spreads(PlaneGroups(copies, cuts, 3))
    grouped = [
        [hand for each, cut in zip(by_hand, cuts, strict=True) for hand in each[slice(*cut[at])]]
        for at in range(3)
    ]
    begins = [plane.ctypes.data for plane, _ in _planes(each[:3], slots[0])]
    slices = [slice(low, high) for high in range(1, 8) for low in range(high)]
    return (
        [len(some) for some in [*planned, *groups]] == [3, *[1] * len(copies), 2, 3, 2]
        and _pieces(planned[0]) == _bytes(list(chain.from_iterable(by_hand)))
        and [_pieces(some) for some in planned[1:]] == [_bytes(some) for some in by_hand]
        and all(one.count == len(_joined_apart(one)) for some in groups for one in some)
        and [_pieces(some) for some in groups] == [_bytes(some) for some in grouped]
        and all(one.count == len(_joined_apart(one)) for some in planned for one in some)
        and all(_begins(wide[some]) == begins[some] for some in slices)
        and (wide[:] is wide, len(wide[2:2]), len(wide[1:2])) == (True, 0, 1)
        and (wide.shape, narrow.shape) == ((7, 7, 16), (2, 5, 16))
        and stacked(each[:1])[0] is each[0]
        and _refused(
            MisuseError, "do not match", lambda: list(copies[3]._replace(pages=wide).tensors())
        )
    )


def _planes(tensors: list[Bytes], slot: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield each plane of tensors, and its part of a slot."""
    return zip(chain.from_iterable(tensors), slot, strict=True)


def _begins(pages: Planes) -> list[int]:
    """Return where planes begin, of which several tensors say it twice."""
    tensors = pages.tensors if isinstance(pages, Stack) else (pages,)
    found = [plane.ctypes.data for tensor in tensors for plane in tensor]
    said = pages.begins.tolist() if isinstance(pages, Stack) else found
    return found if said == found and all(map(len, tensors)) else []


def _pieces(planned: list[Spread]) -> list[tuple[int, int]]:
    """Return where each 16 bytes of runs lie at both ends, in order."""
    rows = chain.from_iterable(lines(one.expanded()) for one in planned)
    return sorted((at + n, to + n) for at, to, size in rows for n in range(0, size, 16))


def _bytes(copies: list[Copy]) -> list[tuple[int, int]]:
    """Return that of copies of one plane, found block by block."""
    rows = _one_by_one(copies)
    return sorted((at + n, to + n) for at, to, size in rows for n in range(0, size, 16))


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
            lines(joined(Runs.together([spread.expanded() for spread in planned])))
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
    for blocks, (pages, slot) in ((one.blocks, each) for one in copies for each in one.tensors()):
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
