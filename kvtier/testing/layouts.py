"""The KV layouts of serving engines, small, and whether a copy of them is right to the byte.

What is right is said by ``torch.index_select`` on the tensor as it lies in memory, which knows
nothing of runs, planes, addresses or strides of kvtier's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.device.base import HOLE, Copy, PlaneGroups
from kvtier.device.chaos import POISON
from kvtier.device.descriptors import Runs, cut, joined
from kvtier.device.layout import byte_pages
from kvtier.device.spread import Spread, spreads
from kvtier.device.stack import Bytes, Planes, stacked

if TYPE_CHECKING:
    import torch

BLOCKS: Final = 9
TOKENS: Final = 4
Mover = Callable[[Spread, bool], None]
"""Copies runs; True: out of the blocks, into the slots. Raises where it notices an error."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A KV tensor as one engine has it.

    shape: as it lies in memory. planes: dimensions that count planes; blocks: the one that counts
    blocks; what is left makes up a block. kept: what of it is KV. view: from there to the tensor
    that is registered: planes, blocks, and then a block. dtype: of torch. apart: it is registered
    as a tensor for each of its first dimension.
    """

    name: str
    shape: tuple[int, ...]
    planes: tuple[int, ...]
    blocks: int
    view: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    dtype: str = "bfloat16"
    kept: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    apart: bool = False

    def pages(
        self, tensor: torch.Tensor, block_bytes: int, view: Callable[..., Bytes] = byte_pages
    ) -> Planes:
        """Return the pages of what is kept, each registered tensor of which a device views."""
        registered = self.view(tensor)
        each = list(registered) if self.apart else [registered]
        (found,) = stacked([view(one, self.plane_count // len(each), block_bytes) for one in each])
        return found

    @property
    def plane_count(self) -> int:
        """Planes of all of it."""
        return math.prod(self.shape[at] for at in self.planes)

    @property
    def inner(self) -> list[int]:
        """The dimensions that make up a block."""
        outer = (*self.planes, self.blocks)
        return [at for at in range(len(self.shape)) if at not in outer]


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-3, -2)


LAYOUTS: Final = (
    Layout("a tensor a layer", (BLOCKS, TOKENS, 2, 8), (), 0),
    Layout("K and V before blocks", (2, BLOCKS, TOKENS, 2, 8), (0,), 1),
    Layout(
        *("a tensor for each of three layers", (3, BLOCKS, 2, TOKENS, 2, 8), (0, 2), 1),
        view=lambda tensor: tensor.movedim(2, 1),
        apart=True,
    ),
    Layout("all layers in one", (3, 2, BLOCKS, TOKENS, 2, 8), (0, 1), 2),
    Layout("K and V concatenated", (BLOCKS, TOKENS, 2, 2 * 8), (), 0, dtype="float16"),
    Layout("MLA latent", (3, BLOCKS, TOKENS, 36), (0,), 1),
    Layout(
        *("blocks across layers", (BLOCKS, 3, 2, TOKENS, 2, 8), (1, 2), 0),
        view=lambda tensor: tensor.movedim(0, 2),
    ),
    Layout(
        *("blocks before K and V", (BLOCKS, 2, TOKENS, 2, 8), (1,), 0),
        view=lambda tensor: tensor.movedim(0, 1),
    ),
    Layout("heads before tokens", (2, BLOCKS, 2, TOKENS, 8), (0,), 1, view=_swapped),
    Layout(
        *("padded blocks", (2, BLOCKS, TOKENS + 1, 2, 8), (0,), 1),
        kept=lambda tensor: tensor[:, :, :TOKENS],
    ),
    Layout(
        *("spare blocks", (3, BLOCKS + 2, TOKENS, 2, 8), (0,), 1),
        kept=lambda tensor: tensor[:, :BLOCKS],
    ),
    Layout("FP8", (2, BLOCKS, TOKENS, 2, 8), (0,), 1, dtype="float8_e4m3fn"),
    Layout("odd bytes", (2, BLOCKS, 3, 5, 3), (0,), 1, dtype="uint8"),
    Layout("odd words", (2, BLOCKS, 3, 5, 1), (0,), 1, dtype="float32"),
    Layout("long blocks", (2, BLOCKS, 37, 31), (0,), 1, dtype="float32"),
    Layout("recurrent states", (3, 1, BLOCKS, 2, 33), (0, 1), 2, dtype="float32"),
    Layout(
        *("states in padded places", (3, BLOCKS, 70), (0,), 1),
        kept=lambda tensor: tensor[:, :, : tensor.shape[2] // 70 * 66],
        dtype="float32",
    ),
)

CHOICES: Final[dict[str, tuple[int, ...]]] = {
    "none": (),
    "one": (7,),
    "consecutive": (3, 4, 5, 6),
    "scattered": (8, 0, 7, 3),
    "mixed": (4, 5, 2, 7, 8, 1),
    "backwards": (6, 5, 4),
    "holes": (HOLE, 0, 1, HOLE, HOLE, 8),
    "holes alone": (HOLE, HOLE),
}
_SHIFTS: Final = (0, 1, 4, 8)  # bytes that memory begins after an aligned address
_BEFORE: Final = 1  # blocks of the chunk before those that are copied
_AFTER: Final = 2
_GROUPS: Final = 3
_CUT: Final = 48  # bytes
_ALIGNED: Final = 64


@dataclass(frozen=True, slots=True)
class Case:
    """A layout, blocks of it, and how far off alignment blocks and slots begin, in bytes."""

    layout: Layout
    blocks: tuple[int, ...]
    page_shift: int
    slot_shift: int

    def __str__(self) -> str:
        shifts = f"{self.page_shift} and {self.slot_shift} bytes off"
        return f"{self.layout.name}, blocks {list(self.blocks)}, {shifts}"


def cases() -> Iterator[Case]:
    """Yield all layouts with all choices of blocks; of pairs of shifts each is met by each."""
    pairs = [(page, slot) for page in _SHIFTS for slot in _SHIFTS]
    count = 0
    for layout in LAYOUTS:
        for blocks in CHOICES.values():
            for page, slot in (pairs[0], pairs[count % len(pairs)]):
                yield Case(layout, blocks, page, slot)
            count += 1


def by_planes(copies: Sequence[Copy], groups: int) -> list[list[Copy]]:
    """Cut copies into so many groups, each of about as many planes."""

    def planes(copy: Copy, index: int) -> slice:
        return slice(*(len(copy.pages) * at // groups for at in (index, index + 1)))

    return [[copy.cut(planes(copy, index)) for copy in copies] for index in range(groups)]


def plane_groups(copies: Sequence[Copy], groups: int) -> PlaneGroups:
    """Return the same groups, as a cache gives them to a device."""
    bounds = [tuple(len(copy.pages) * at // groups for at in range(groups + 1)) for copy in copies]
    return PlaneGroups(copies, [tuple(itertools.pairwise(one)) for one in bounds], groups)


def is_right(case: Case, mover: Mover, *, spare: int = 4096) -> bool:
    """Gather whole, scatter by groups of planes and in pieces; compare all memory, to the byte.

    spare: bytes behind blocks and slot that have to stay as they are; with 0, memory ends there.
    """
    import torch

    layout, generator = case.layout, np.random.default_rng(len(case.blocks))
    item = getattr(torch, layout.dtype).itemsize
    size = int(np.prod(layout.shape)) * item
    source, target = (_Memory(size, case.page_shift, spare, generator) for _ in range(2))
    block = source.lies(layout, item).numel() // layout.plane_count // BLOCKS
    chunk = (layout.plane_count, _BEFORE + len(case.blocks) + _AFTER, block)
    slot = _Memory(int(np.prod(chunk)), case.slot_shift, spare)
    part = slot.inside(slot.whole).reshape(chunk)[:, _BEFORE : _BEFORE + len(case.blocks)]

    kept = [at for at, block in enumerate(case.blocks) if block != HOLE]
    named = torch.tensor([case.blocks[at] for at in kept], dtype=torch.long)
    order = (*layout.planes, layout.blocks, *layout.inner)
    axis = len(layout.planes)
    taken = source.lies(layout, item).permute(order).index_select(axis, named)
    want = slot.whole.copy()
    rows = slot.inside(want).reshape(chunk)[:, [_BEFORE + at for at in kept]]
    values = taken.numpy().reshape(rows.shape)
    slot.inside(want).reshape(chunk)[:, [_BEFORE + at for at in kept]] = values

    for spread in spreads([[Copy(source.pages(layout, block), case.blocks, part)]])[0]:
        mover(spread, True)  # noqa: FBT003  (a Mover's)
        runs = joined(spread.expanded())
        if len(runs) != spread.count or not _is_joined(runs):
            return False
    if not np.array_equal(slot.whole, want):
        return False

    before = target.whole.copy()
    target.lies(layout, item).permute(order).index_copy_(axis, named, taken)
    want, target.whole[:] = target.whole.copy(), before
    copies = [Copy(target.pages(layout, block), case.blocks, part)]
    for spread in itertools.chain.from_iterable(spreads(by_planes(copies, _GROUPS))):
        pieces = cut(spread.runs, _CUT)
        mover(Spread(spread.planes, pieces), False)  # noqa: FBT003  (a Mover's)
        if pieces.nbytes.tolist() != [n for run in spread.runs.nbytes.tolist() for n in _cuts(run)]:
            return False
    return np.array_equal(target.whole, want)


class _Memory:
    """Bytes that begin so many beyond an aligned address, with poison around them."""

    def __init__(
        self, size: int, shift: int, spare: int, generator: np.random.Generator | None = None
    ) -> None:
        whole = np.full(2 * _ALIGNED + size + spare, POISON, np.uint8)
        self.first = -whole.ctypes.data % _ALIGNED + shift
        self.size = size
        self.whole = whole
        if generator is not None:
            self.inside(whole)[:] = generator.integers(0, POISON, size, np.uint8)

    def inside(self, whole: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the bytes that count of memory like this."""
        return whole[self.first : self.first + self.size]

    def lies(self, layout: Layout, item: int) -> torch.Tensor:
        """Return the tensor as it lies here, as bytes."""
        import torch

        shape = (*layout.shape[:-1], layout.shape[-1] * item)
        return layout.kept(torch.from_numpy(self.inside(self.whole)).view(shape))

    def pages(self, layout: Layout, block_bytes: int) -> Planes:
        """Return the view that a device makes of the registered tensor."""
        import torch

        tensor = torch.from_numpy(self.inside(self.whole)).view(getattr(torch, layout.dtype))
        return layout.pages(layout.kept(tensor.view(layout.shape)), block_bytes)


def _is_joined(runs: Runs) -> bool:
    """Say whether no run goes on where the one before it ended, at both ends."""
    rows = list(zip(runs.pages.tolist(), runs.slots.tolist(), runs.nbytes.tolist(), strict=True))
    pairs = itertools.pairwise(rows)
    return not any(a + n == b and c + n == d for (a, c, n), (b, d, _) in pairs)


def _cuts(nbytes: int) -> list[int]:
    """Return what a run is cut into."""
    return [min(_CUT, nbytes - at) for at in range(0, nbytes, _CUT)]
