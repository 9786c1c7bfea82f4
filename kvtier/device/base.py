"""The accelerator side: streams, fences, and copies between KV blocks and slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvtier.device.stack import Bytes, Planes, Stack
from kvtier.errors import MisuseError

Role = Literal["load", "store"]
HOLE: Final = -1
"""In the place of a block's id: neither read nor written, and its place in the slot neither."""


class Fence(Protocol):
    """One recorded moment of a stream. Immutable: it is never recorded again."""

    def done(self) -> bool:
        """Say whether all work before it has ended. Never blocks. Raises what the work raised."""
        ...

    def wait(self, timeout: float) -> bool:
        """Block at most `timeout` seconds; say whether it is done. Raises as ``done`` does."""
        ...


class Stream(Protocol):
    """Work in order. Two streams are unordered but for ``wait``."""

    def record(self) -> Fence:
        """Return the fence of all work enqueued so far."""
        ...

    def wait(self, fence: Fence) -> None:
        """Hold later work of this stream until the fence is done. Does not block the caller."""
        ...


class Copy(NamedTuple):
    """One copy between blocks of a paged cache and part of a slot.

    pages: bytes of the paged cache, uint8 [planes, blocks, bytes of a block], the last of them
        dense, of one tensor or of several alike. Of a GPU's memory it only says where that is:
        nobody on the host looks inside.
    blocks: ids of the engine's blocks, in token order, or HOLE; read when the copy is enqueued,
        not later.
    slot: bytes of the same tokens in the slot, uint8 [planes, len(blocks), bytes of a block];
        strided along planes when only some of a chunk's tokens are copied.
    """

    pages: Planes
    blocks: Sequence[int]
    slot: Bytes

    def cut(self, planes: slice) -> Copy:
        """Return the copy of some of the planes."""
        return Copy(self.pages[planes], self.blocks, self.slot[planes])

    def tensors(self) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield the pages of each tensor, and its part of the slot.

        Raises MisuseError for a slot of more or fewer planes than several tensors have.
        """
        pages, slot = self.pages, self.slot
        if not isinstance(pages, Stack):
            yield pages, slot
            return
        if len(slot) != len(pages):
            raise MisuseError(f"pages {pages.shape} do not match their slot {slot.shape}")
        at = 0
        for tensor in pages.tensors:
            yield tensor, slot[at : at + len(tensor)]
            at += len(tensor)


Cuts = tuple[tuple[int, int], ...]
"""Of each group the first of its planes, and the one behind its last."""


class PlaneGroups(Sequence[list[Copy]]):
    """Groups of copies that are the same copies, each of other planes.

    They are groups as any others; a device may also plan the copies at once. cuts: of each copy,
    which planes of it are in which group, none or several.
    """

    def __init__(self, copies: Sequence[Copy], cuts: Sequence[Cuts], count: int) -> None:
        self.copies = copies
        self.cuts = cuts
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> list[Copy]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[Copy]]: ...

    def __getitem__(self, index: int | slice) -> list[Copy] | list[list[Copy]]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        found: list[Copy] = []
        before: tuple[object, object] = (None, None)
        planes = slice(0)
        view: Planes = np.empty(0, np.uint8)
        for (pages, blocks, slot), cuts in zip(self.copies, self.cuts, strict=True):
            if (
                pages is not before[0] or cuts is not before[1]
            ):  # as those of one chunk after another
                before = (pages, cuts)
                planes = slice(*cuts[index])
                view = pages[planes]
            if planes.start < planes.stop:
                found.append(Copy(view, blocks, slot[planes]))
        return found


@runtime_checkable
class Device(Protocol):
    """Enqueues copies. Calls do not block; `after` is mandatory, so that nothing is unordered."""

    name: str

    def stream(self, role: Role) -> Stream:
        """Return the device's stream for loads, or for stores."""
        ...

    def pages(self, tensor: Any, planes: int, block_bytes: int) -> NDArray[np.uint8]:
        """View a KV tensor as bytes [planes, blocks, bytes of a block].

        tensor: torch or numpy; its leading dimensions make up `planes`, the next is the block,
            and what follows has `block_bytes`. Planes and blocks may lie apart, in either order,
            as views of larger tensors do; the bytes of one block are taken as they lie in memory.
        Raises ConfigError when it has another shape, when a block has gaps or shares bytes with
        another, and when it lies on another device.
        """
        ...

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Make memory of slots fit for copies, all of it; nothing where it is already.

        Memory that has it pinned and overlaps, is taken to be gone. Raises ConfigError when the
        system refuses.
        """
        ...

    def host_fence(self) -> Fence:
        """Return a fence of what the calling thread has computed until now."""
        ...

    def hold(self, fence: Fence, timeout: float) -> bool:
        """Let what the calling thread computes from now on come after a fence.

        On a GPU its stream waits, and nobody here; where the thread computes itself, it blocks,
        at most `timeout` seconds. False: the fence was not done by then, and nothing is ordered.
        Raises what the fence raises, where that is known already.
        """
        ...

    def gather(self, stream: Stream, copies: Sequence[Copy], after: Sequence[Fence]) -> Fence:
        """Copy blocks into slots, after the fences."""
        ...

    def scatter(
        self, stream: Stream, groups: Sequence[Sequence[Copy]], after: Sequence[Fence]
    ) -> list[Fence]:
        """Copy slots into blocks, after the fences; return a fence for each group of copies.

        Groups go one after the other: what is in the first may be read while the last is still
        on its way. Those of other planes of the same copies had better be PlaneGroups.
        """
        ...

    def close(self) -> None:
        """Wait for work in flight, bounded, and end the streams."""
        ...


def block_runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of consecutive blocks: from and to which place, and the first id. No holes.

    Raises MisuseError for an id below HOLE, which an array would take as one from its end.
    """
    at = 0
    while at < len(blocks):
        first, stop = blocks[at], at + 1
        while stop < len(blocks) and blocks[stop] == first + stop - at:
            stop += 1
        if first < HOLE:
            raise MisuseError(f"blocks from {first} on do not match any: ids begin with 0")
        if first != HOLE:
            yield at, stop, first
            at = stop
        else:
            at += 1
