"""Blocks, slots, streams and a host, small, with all their accesses declared to the checker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from kvtier.device.base import Copy, Fence
from kvtier.device.chaos import POISON, ChaosDevice
from kvtier.device.cpu import CpuDevice, CpuStream
from kvtier.device.cuda import CudaDevice
from kvtier.device.paths import DEFAULT, Choice, Way
from kvtier.device.race import Checked, CheckedStream, Race
from kvtier.device.stack import stacked
from kvtier.device.turns import CudaStream
from kvtier.testing.cpu_driver import CpuDriver
from kvtier.testing.layouts import by_planes
from kvtier.transfer import CopyStatus, CopyTransfer

LAYERS: Final = 2
PLANES: Final = 2 * LAYERS  # K and V
BLOCKS: Final = 8
BYTES: Final = 24
CHUNK: Final = 2  # blocks
SLOTS: Final = 2
_SECONDS: Final = 10.0
Bytes = NDArray[np.uint8]


class Rig:
    """Blocks, slots, streams and a host, whose accesses are all declared. Memory is poisoned.

    seed: of the schedule; None: streams on threads of their own. way: of copies of the CUDA device,
    whose driver is these streams; None: of the CPU device. races: what the checker found.
    """

    def __init__(self, seed: int | None, way: Way | None = None) -> None:
        self.races: list[Race] = []
        device = CpuDevice() if seed is None else ChaosDevice(seed)
        self._threaded = CpuStream("compute") if seed is None else None
        compute = device.compute if isinstance(device, ChaosDevice) else self._threaded
        self._queue = cast("CpuStream", compute)
        self._under = device
        if way is None:
            self.device = Checked(device, self.races.append)
            self.compute = self.device.compute or self.device.wrap(self._queue, "compute")
        else:
            streams = device._stream if isinstance(device, ChaosDevice) else CpuStream
            driver = CpuDriver(streams, self._queue)
            cuda = CudaDevice(driver, DEFAULT, Choice(way), in_flight=2, staging_bytes=64)
            self.device = Checked(cuda, self.races.append)
            self.compute = self.device.wrap(CudaStream(driver, self._queue, 1), "compute")
        self.kv = np.full((PLANES, BLOCKS, BYTES), POISON, np.uint8)
        # On each other schedule, a layer is a tensor of its own.
        layers = np.split(self.kv, LAYERS) if (seed or 0) % 2 else [self.kv]
        (self.pages,) = stacked(layers)
        self.slots = np.full((SLOTS, PLANES, CHUNK, BYTES), POISON, np.uint8)
        self.staging = np.full((PLANES, CHUNK, BYTES), POISON, np.uint8)
        self.device.pin(self.slots)

    def close(self) -> None:
        """Let all work end."""
        if self._threaded is not None:
            self._threaded.close()
        self.device.close()
        self._under.close()

    def launch(
        self,
        name: str,
        pieces: Sequence[Callable[[], None]],
        after: Sequence[Fence] = (),
        *,
        reads: Sequence[Bytes] = (),
        writes: Sequence[Bytes] = (),
    ) -> Fence:
        """Enqueue work of the engine on its compute stream."""
        for fence in after:
            self.compute.wait(fence)
        self.compute.declare(name, reads=reads, writes=writes)
        for piece in pieces:
            self._queue.enqueue(piece)
        return self.compute.record()

    def hold(self, fence: Fence) -> None:
        """Let what the host computes next come after a fence, as an engine does."""
        self.device.hold(fence, _SECONDS)

    def write(
        self,
        blocks: Sequence[int],
        value: int,
        after: Sequence[Fence] = (),
        layers: slice = slice(None),
    ) -> Fence:
        """Compute blocks, plane by plane."""
        parts = [plane[block] for plane in self.kv[layers] for block in blocks]
        pieces = [partial(part.fill, value) for part in parts]
        return self.launch(f"computing {value} into blocks {blocks}", pieces, after, writes=parts)

    def attend(
        self, block: int, seen: list[int], after: Sequence[Fence] = (), layers: slice = slice(None)
    ) -> Fence:
        """Read a block, plane by plane."""
        parts = list(self.kv[layers, block])
        pieces = [partial(_see, part, seen) for part in parts]
        return self.launch(f"attention over block {block}", pieces, after, reads=parts)

    def enqueue(self, stream: CheckedStream, work: Callable[[], Any]) -> None:
        """Enqueue work that was declared."""
        inner = stream.inner.handle if isinstance(stream.inner, CudaStream) else stream.inner
        cast("CpuStream", inner).enqueue(work)

    def store(
        self,
        blocks: Sequence[int],
        slot: int,
        after: Sequence[Fence],
        layers: slice = slice(None),
    ) -> Fence:
        """Copy blocks into a slot."""
        copy = Copy(self.pages, blocks, self.slots[slot]).cut(layers)
        return self.device.gather(self.device.stream("store"), [copy], after)

    def load(
        self, blocks: Sequence[int], slot: int, after: Sequence[Fence] = (), groups: int = 1
    ) -> list[Fence]:
        """Copy a slot into blocks."""
        copy = Copy(self.pages, blocks, self.slots[slot])
        return self.device.scatter(self.device.stream("load"), by_planes([copy], groups), after)

    def fill(self, slot: int, value: int) -> None:
        """Let the host write a slot, now."""
        self.device.touch(f"filling slot {slot}", writes=[self.slots[slot]])
        self.slots[slot] = value

    def read(self, slot: int) -> list[int]:
        """Let the host read a slot, now."""
        self.device.touch(f"reading slot {slot}", reads=[self.slots[slot]])
        return values(self.slots[slot])


def values(array: Bytes) -> list[int]:
    """Return the different bytes of an array."""
    return [int(value) for value in np.unique(array)]


def settled(fences: Sequence[Fence]) -> CopyStatus:
    """Wait for copies, as a connector does."""
    return CopyTransfer(fences, 0, ()).result(_SECONDS).status


def _see(part: Bytes, seen: list[int]) -> None:
    seen += values(part)
