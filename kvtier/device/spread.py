"""Copies between blocks and slots, planned: as runs that lie alike on planes.

All copies of a call are planned together, and on one plane only: a host that looks at each run of
each plane has a microsecond for each of thousands. The kernel goes through the planes itself.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.device.base import HOLE, Copy, Cuts, PlaneGroups
from kvtier.device.descriptors import CUT_BYTES, Numbers, Room, Runs, allocated, cut, joined
from kvtier.device.stack import Planes, Stack
from kvtier.errors import MisuseError

Signed = NDArray[np.int64]
_Sizes = tuple[int, ...]
_Shape = tuple[_Sizes, _Sizes, _Sizes, Stack | None]
"""What makes copies alike: the shape of their pages, the strides of those, and of their slots; and
the tensors whose planes they are, where those are several, with no one stride."""
_Key = tuple[_Shape, tuple[int, ...]]
"""A shape, and which blocks there are: copies with the same have the same runs on a plane."""


class _Found(NamedTuple):
    """The runs of copies on a plane, in bytes: beyond the first block, in slots, and how many.

    In slots is beyond the begin of the first one, as if each went on where the one before it ends.
    first, before: of each copy its first run, and how many blocks are in copies before it; and at
    last how many there are, [copies + 1].
    """

    pages: Signed
    slots: Signed
    nbytes: Signed
    first: Signed
    before: Signed


class Spread:
    """Runs that lie alike on each of some planes, of one copy or of several.

    planes: how far beyond the first one of all each is, in the blocks and in the slots, uint64
    [2, planes]. runs: those on that one; addresses are sums of both, whose overflow wraps.
    first: of each copy the number of its first run, and at last how many runs there are,
    [copies + 1], and no copy is without runs; None: they are of one copy.
    whole, at: it is `whole` on some planes, from that one on.
    """

    def __init__(self, planes: Numbers, runs: Runs, first: Signed | None = None) -> None:
        self.planes = planes
        self.runs = runs
        self.first = np.array([0, len(runs)]) if first is None else first
        self.at = 0
        self._of: Spread | None = None

    @property
    def whole(self) -> Spread:
        """That one. What is said of runs is found once, and there."""
        return self if self._of is None else self._of

    @property
    def total(self) -> int:
        """Bytes on all planes."""
        return self.whole.nbytes * len(self.planes[0])

    @property
    def counts(self) -> Signed:
        """How many runs each copy has on a plane."""
        return self.first[1:] - self.first[:-1]

    @property
    def count(self) -> int:
        """How many runs there are on all planes, neighbours of one copy joined.

        A copy's only run goes on from plane to plane, where its planes lie together at both ends.
        """
        planes, (going, follow) = len(self.planes[0]), self.whole.joints
        joints = int(follow[self.at : self.at + planes - 1].sum())
        return planes * len(self.runs) - joints * going

    def on(self, first: int, stop: int) -> Spread:
        """Return it on some of the planes."""
        if (first, stop) == (0, len(self.planes[0])):
            return self
        found = Spread(self.planes[:, first:stop], self.runs, self.first)
        found._of, found.at = self, first
        return found

    def cut(self, most: int = CUT_BYTES) -> Spread:
        """Return it with runs of at most so many bytes. See ``descriptors.cut``."""
        runs = cut(self.runs, most)
        if runs is self.runs:
            return self
        pieces = np.append(0, np.cumsum(-(-self.runs.nbytes.view(np.int64) // most)))
        return Spread(self.planes, runs, pieces[self.first])

    def rows(self, *, into_slot: bool) -> tuple[Numbers, ...]:
        """Return the rows of the kernel's table: see ``copy.cuh``."""
        return (*self.planes[:: -1 if into_slot else 1], *self.runs.ends(into_slot=into_slot))

    @cached_property
    def nbytes(self) -> int:
        """Bytes on a plane."""
        return self.runs.total

    @cached_property
    def joints(self) -> tuple[int, NDArray[np.bool_]]:
        """Return how many copies have a run as long as slots' planes are apart, and no other.

        And which planes lie as far behind the one before in the blocks as they do in slots.
        """
        pages, slots = self.planes[:, 1:] - self.planes[:, :-1]  # those of slots are all the same
        long = self.runs.nbytes[self.first[:-1]] == (slots[0] if len(slots) else 0)
        return int((long & (self.counts == 1)).sum()), pages == slots

    @cached_property
    def extents(self) -> tuple[list[int], list[int]]:
        """Of each copy where it begins and ends in its slot, on the plane of the runs."""
        begins, last = self.runs.slots, self.first[1:] - 1
        ends = begins[last] + self.runs.nbytes[last]
        return begins[self.first[:-1]].tolist(), ends.tolist()

    @cached_property
    def pieces(self) -> tuple[Numbers, Numbers, Signed]:
        """What lies together in slots, on the plane of the runs: where, and how many bytes.

        And of each copy its first one; at last how many there are.
        """
        runs = self.runs
        ends = runs.slots + runs.nbytes
        begins = np.empty(len(runs) + 1, np.bool_)
        np.not_equal(ends[:-1], runs.slots[1:], out=begins[1:-1])
        begins[self.first] = True
        bounds = begins.nonzero()[0]
        at, last = bounds[:-1], bounds[1:] - 1
        return runs.slots[at], ends[last] - runs.slots[at], at.searchsorted(self.first)

    def reach(self) -> tuple[int, int]:
        """Return between which addresses everything lies that is in slots."""
        (begins, ends), planes = self.whole.extents, self.planes[1]
        return min(begins) + int(planes[0]), max(ends) + int(planes[-1])

    def expanded(self, room: Room = allocated) -> Runs:
        """Return the runs of all planes: copy by copy, and of each plane by plane.

        room: what they lie in. Neighbours of as many runs are done at once.
        """
        planes, runs = len(self.planes[0]), self.runs
        rows = room(3 * planes * len(runs)).reshape(3, -1)
        at = run = 0
        for count, some in groupby(self.counts.tolist()):
            several = sum(1 for _ in some)
            stop, after = at + several * planes * count, run + several * count
            pages, slots, nbytes = rows[:, at:stop].reshape(3, several, planes, count)
            alike = (several, 1, count)
            np.add(runs.pages[run:after].reshape(alike), self.planes[0][:, None], out=pages)
            np.add(runs.slots[run:after].reshape(alike), self.planes[1][:, None], out=slots)
            nbytes[:] = runs.nbytes[run:after].reshape(alike)
            at, run = stop, after
        return Runs(*rows)


def describe(copies: Sequence[Copy]) -> Runs:
    """Return the runs of copies on all planes, neighbours joined. See ``spreads``."""
    return joined(Runs.together([spread.expanded() for spread in spreads([copies])[0]]))


def spreads(groups: Sequence[Sequence[Copy]]) -> list[list[Spread]]:
    """Return for each group the runs of its copies; those of one shape and strides are in one.

    Blocks that follow each other are in one run. Raises MisuseError where blocks do not match
    their slot, or are not among the pages.
    """
    if isinstance(groups, PlaneGroups):
        return _cut_spreads(groups)
    pages: dict[int, Planes] = {}
    asked: dict[_Key, list[Copy]] = {}
    each: list[dict[_Key, list[Copy]]] = []
    for copies in groups:
        alike: dict[_Shape, list[Copy]] = {}
        before, some = None, []
        for copy in copies:
            mine, blocks, slot = copy
            like = (id(mine), len(blocks), slot.shape, slot.strides)
            if like != before:  # as they are from one chunk to the next
                before, some = like, alike.setdefault(_shape(copy), [])
                pages[id(mine)] = mine
            some.append(copy)
        keys = {
            (shape, tuple(id(one.blocks) for one in some)): some for shape, some in alike.items()
        }
        each.append(keys)
        asked |= keys  # groups of layers have the same blocks, which are looked at once
    begins = {key: _first(one) for key, one in pages.items()}  # once each: it takes a while
    known = {key: _on_a_plane(key[0], [one.blocks for one in some]) for key, some in asked.items()}
    found = (
        [_spread(key[0], some, begins, known[key]) for key, some in keys.items()] for keys in each
    )
    return [[one for one in some if one.planes.size and len(one.runs)] for some in found]


def _cut_spreads(groups: PlaneGroups) -> list[list[Spread]]:
    """Return the runs of groups that have the same copies, which are planned once."""
    alike: dict[Cuts, list[Copy]] = {}
    for copy, cuts in zip(groups.copies, groups.cuts, strict=True):
        alike.setdefault(cuts, []).append(copy)
    whole = list(zip(alike, spreads(list(alike.values())), strict=True))
    return [
        [
            one.on(*cuts[group])
            for cuts, some in whole
            for one in some
            if cuts[group][0] < cuts[group][1]
        ]
        for group in range(len(groups))
    ]


def _shape(copy: Copy) -> _Shape:
    """Return what makes copies alike. Raises MisuseError where a slot does not match its blocks."""
    pages, blocks, slot = copy
    planes, _, size = pages.shape
    if slot.shape != (planes, len(blocks), size) or min(slot.strides) < 0:
        raise MisuseError(
            f"{len(blocks)} blocks of {pages.shape} do not match their slot {slot.shape}, "
            f"strides {slot.strides}"
        )
    return pages.shape, pages.strides, slot.strides, pages if isinstance(pages, Stack) else None


def _first(pages: Planes) -> int:
    """Return where the first plane begins."""
    return int(pages.begins[0]) if isinstance(pages, Stack) else pages.ctypes.data


def _on_a_plane(shape: _Shape, every: Sequence[Sequence[int]]) -> _Found:
    """Return the runs of copies on a plane, from their blocks. See _Found."""
    (_, among, size), (_, across, _), (_, slot_across, _), _ = shape
    before = np.array(list(accumulate(map(len, every), initial=0)))
    ids = _ids(every, among)
    if (ids - HOLE).view(np.uint64).max(initial=0) > among:  # what is below is beyond all
        extremes = ((min(blocks), max(blocks)) for blocks in every if len(blocks))
        low, high = next(pair for pair in extremes if pair[0] < HOLE or pair[1] >= among)
        raise MisuseError(f"blocks {low} to {high} do not match pages of {among}")
    kept = ids != HOLE
    follows = np.zeros(len(ids) + 1, np.bool_)
    if across == slot_across == size:
        np.logical_and(ids[1:] - ids[:-1] == 1, kept[:-1], out=follows[1:-1])
        follows[before] = False
    begins = (kept != follows[:-1]).nonzero()[0]
    counts = (kept != follows[1:]).nonzero()[0] - begins + 1
    rows = (ids[begins] * across, begins * slot_across, counts * size)
    return _Found(*rows, begins.searchsorted(before), before)


def _ids(every: Sequence[Sequence[int]], among: int) -> Signed:
    """Return the ids of all blocks, one after another."""
    try:
        packed = b"".join([_packer(len(blocks)).pack(*blocks) for blocks in every])
    except struct.error as error:  # it has more than 64 bits, or is no number
        raise MisuseError(f"ids of blocks do not match pages of {among}: {error}") from error
    return np.frombuffer(packed, np.int64)


@lru_cache
def _packer(count: int) -> struct.Struct:
    """Return what makes int64 of so many ids, in less than half the time that numpy takes."""
    return struct.Struct(f"{count}q")


def _spread(shape: _Shape, copies: Sequence[Copy], begins: dict[int, int], found: _Found) -> Spread:
    """Return the runs of copies, whose pages begin where it is said."""
    (planes, _, _), (along, _, _), (slot_along, slot_across, _), stack = shape
    counts = found.first[1:] - found.first[:-1]
    pages = np.array([begins[id(copy.pages)] for copy in copies])
    slots = np.array([_begin(copy.slot) for copy in copies]) - found.before[:-1] * slot_across
    runs = Runs(
        (found.pages + pages.repeat(counts)).view(np.uint64),
        (found.slots + slots.repeat(counts)).view(np.uint64),
        found.nbytes.view(np.uint64),
    )
    steps = _steps(planes, along, slot_along)
    if stack is not None:
        steps = np.stack([stack.begins - stack.begins[0], steps[1]])
    some = np.ones(len(counts) + 1, np.bool_)
    np.greater(counts, 0, out=some[1:])
    return Spread(steps, runs, found.first[some])


@lru_cache
def _steps(planes: int, along: int, slot_along: int) -> Numbers:
    """Return how far planes are beyond the first one, in the blocks and in the slots."""
    found = (np.array([[along], [slot_along]]) * np.arange(planes)).view(np.uint64)
    found.flags.writeable = False  # it is everyone's
    return found


def _begin(slot: NDArray[np.uint8]) -> int:
    """Return where a slot begins. It is asked of each copy, and numpy takes a microsecond more."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(slot.data))
    except (TypeError, ValueError):  # it is not in one piece, or there is none
        return int(slot.ctypes.data)
