"""How fast a device copies on each way, measured: what ``kvtier doctor --device`` looks at."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.device.base import Copy, Device, Role
from kvtier.device.cpu import CpuDevice
from kvtier.device.cuda import CudaDevice
from kvtier.device.driver import Driver
from kvtier.device.layout import bytes_at
from kvtier.device.paths import DEFAULT, Choice, Speed, Table
from kvtier.errors import KvtierError

RUN_BYTES: Final = (4 << 10, 16 << 10, 24 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20)
RUNS: Final = (64, 2048)
TURNS: Final = 3
CPU_BLOCK: Final = 32 << 10
"""Bytes of a block in a plane: 16 tokens of Llama-3-8B."""
_MOST: Final = 256 << 20  # bytes of one copy
_GRIDS: Final = (2, 4, 8, 16, 32)
_PLANES: Final = 16
_ROLES: Final[tuple[Role, ...]] = ("load", "store")
_SECONDS: Final = 60.0


def measure(
    driver: Driver,
    run_bytes: Sequence[int] = RUN_BYTES,
    runs: Sequence[int] = RUNS,
    most: int = _MOST,
) -> Table:
    """Measure all ways of a GPU, for runs of so many bytes and so many of them. Blocks.

    Copies above `most` bytes are left out. Needs 2 * most bytes on the GPU and most bytes of
    pinned memory. Raises ConfigError when that is refused, and KvtierError when a copy hangs.
    """
    slots = np.zeros(most, np.uint8)
    choices = [Choice("staged"), *(Choice("direct", grid) for grid in _GRIDS)]
    if driver.batches:
        choices.insert(0, Choice("batch"))
    speeds: list[Speed] = []
    with closing(CudaDevice(driver, DEFAULT)) as device:
        pages = driver.memory(2 * most, device.stream("load").handle)
        device.pin(slots)
        for size, count in itertools.product(run_bytes, runs):
            if size * count > most:
                continue
            copy = _copy(pages, pages.address, slots, size, count)
            for role, choice in itertools.product(_ROLES, choices):
                device.way = choice
                speeds.append(Speed(role, size, count, choice, _speed(device, role, copy)))
    return Table(driver.name, tuple(speeds))


def cpu_speeds(total: int = 64 << 20) -> Iterator[tuple[Role, float]]:
    """Measure the CPU device, with scattered blocks: the role, and GB/s. Blocks."""
    pages, slots = np.ones(2 * total, np.uint8), np.ones(total, np.uint8)
    copy = _copy(pages, pages.ctypes.data, slots, CPU_BLOCK, total // CPU_BLOCK)
    with closing(CpuDevice()) as device:
        for role in _ROLES:
            yield role, _speed(device, role, copy)


def _copy(pages: Any, address: int, slots: NDArray[np.uint8], size: int, count: int) -> Copy:
    """Return a copy of so many scattered blocks, in planes, of so many bytes each."""
    planes = min(_PLANES, count)
    blocks = count // planes
    order = np.random.default_rng(0).permutation(2 * blocks)[:blocks]
    place = bytes_at(pages, address, (planes, 2 * blocks, size), (2 * blocks * size, size, 1))
    slot = slots[: planes * blocks * size].reshape(planes, blocks, size)
    return Copy(place, order.tolist(), slot)


def _speed(device: Device, role: Role, copy: Copy) -> float:
    """Return GB/s of the fastest of some turns, after one that counts for nothing."""
    best = float("inf")
    for turn in range(TURNS + 1):
        begin = time.perf_counter()
        if role == "store":
            fence = device.gather(device.stream("store"), [copy], ())
        else:
            (fence,) = device.scatter(device.stream("load"), [[copy]], ())
        if not fence.wait(_SECONDS):
            raise KvtierError(f"{device.name}: a copy of {copy.slot.nbytes} bytes hangs")
        if turn:
            best = min(best, time.perf_counter() - begin)
    return copy.slot.nbytes / best / 1e9
