"""Writers that do everything in steps, and kill themselves at one of them."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from kvtier.storage_backends import slab_repair
from kvtier.storage_backends.slab import PAGE, FileIO
from kvtier.storage_backends.slab_directory import SlabDirectory
from kvtier.storage_backends.slab_files import SegmentFiles
from kvtier.storage_backends.slab_index import Index
from kvtier.storage_backends.slab_ledger import Ledger

PIECES: Final = 16
"""In how many pieces a payload is written, in any order."""

NAMED: Final = (
    (Index, "commit"),
    (Index, "grow"),
    (Index, "extend"),
    (Index, "sync"),
    (Index, "close"),
    (Ledger, "renew"),
    (SlabDirectory, "sync"),
    (SlabDirectory, "remove_draft"),
    (SlabDirectory, "discard"),
    (slab_repair, "remake"),
    (slab_repair, "_within"),
    (slab_repair, "_remove"),
    (slab_repair, "_repair"),
    (Ledger, "publish"),
    (Ledger, "remove"),
    (Ledger, "look"),
    (Ledger, "slots"),
    (Ledger, "slot"),
    (Ledger, "commit"),
    (SegmentFiles, "write"),
    (SegmentFiles, "sync"),
    (SegmentFiles, "create"),
    (SegmentFiles, "remove"),
    (FileIO, "open"),
    (FileIO, "pwrite"),
    (FileIO, "fdatasync"),
    (FileIO, "fallocate"),
)
"""The steps of a store: the process may be killed before and after each."""


class Steps:
    """Counts steps, and kills the process at one of them; 0 only counts."""

    def __init__(self, at: int) -> None:
        self.taken = 0
        self._at = at

    def __call__(self) -> None:
        """Take a step."""
        self.taken += 1
        if self.taken == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def stepping(step: Callable[[], None]) -> Iterator[None]:
    """Let the store take a step before and after each of what is NAMED."""
    before = [(kind, name, getattr(kind, name)) for kind, name in NAMED]
    for kind, name, call in before:
        setattr(kind, name, _in_steps(call, step))
    try:
        yield
    finally:
        for kind, name, call in before:
            setattr(kind, name, call)


def _in_steps(call: Callable[..., Any], step: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def stepped(*arguments: Any, **named: Any) -> Any:
        step()
        found = call(*arguments, **named)
        step()
        return found

    return stepped


class PieceIO(FileIO):
    """Writes in 16 pieces, in an order that a seed gives, as a device may."""

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed)

    def pwrite(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write `buffers` piece by piece."""
        pages = [
            (buffer[at : at + PAGE], offset + done + at)
            for buffer, done in _placed(buffers)
            for at in range(0, len(buffer), PAGE)
        ]
        size = -(-len(pages) // PIECES)
        pieces = [pages[at : at + size] for at in range(0, len(pages), size)]
        self._choose.shuffle(pieces)
        return sum(self._write(descriptor, piece) for piece in pieces)

    def _write(self, descriptor: int, piece: Sequence[tuple[memoryview, int]]) -> int:
        return super().pwrite(descriptor, [page for page, _ in piece], piece[0][1])


def _placed(buffers: Sequence[memoryview]) -> Iterator[tuple[memoryview, int]]:
    done = 0
    for buffer in buffers:
        yield buffer, done
        done += len(buffer)
