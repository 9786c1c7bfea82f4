"""A driver whose GPU is the CPU: streams do at their leisure what a CUDA device has enqueued.

What a GPU reads late, such as the table of a kernel, is read late here, too: changed or given back
too early, it shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from kvtier.device.chaos import POISON
from kvtier.device.cpu import CpuFence, CpuStream
from kvtier.device.descriptors import Numbers
from kvtier.device.driver import Event, Work
from kvtier.errors import ConfigError

_ROWS: Final = 3
_SECONDS: Final = 10.0


class _Memory:
    """See Buffer."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = np.full(nbytes, POISON, np.uint8)
        self.address = self._bytes.ctypes.data


class CpuDriver:
    """See Driver. streams: makes one by its name. compute: the stream of ``caller``, if any.

    pinned: what is registered. registered: the addresses, each time. calls: what was enqueued.
    """

    name = "a CPU in the place of a GPU"
    processors = 4
    node: int | None = None

    def __init__(
        self,
        streams: Callable[[str], CpuStream] = CpuStream,
        compute: CpuStream | None = None,
        *,
        batches: bool = True,
    ) -> None:
        self.batches = batches
        self.pinned: dict[int, int] = {}
        self.registered: list[int] = []
        self.calls: list[str] = []
        self.refuses = False
        self._make = streams
        self._compute = compute
        self._streams: list[CpuStream] = []

    def stream(self) -> CpuStream:
        """See Driver."""
        self._streams.append(self._make(("load", "store")[len(self._streams) % 2]))
        return self._streams[-1]

    def record(self, stream: Any) -> Event:
        """See Driver."""
        fence: Event = stream.record()
        return fence

    def wait(self, stream: Any, event: Event) -> None:
        """See Driver."""
        stream.wait(event)

    def caller(self) -> Event:
        """See Driver."""
        if self._compute is not None:
            return self._compute.record()
        fence = CpuFence()
        fence.settle()
        return fence

    def hold(self, event: Event) -> None:
        """See Driver. Where nobody has a stream to compute on, the caller computes, and waits."""
        if self._compute is not None:
            self._compute.wait(cast("CpuFence", event))
        else:
            cast("CpuFence", event).wait(_SECONDS)

    def own(self, tensor: Any) -> Any:
        """See Driver."""
        if not isinstance(tensor, np.ndarray) and tensor.device.type != "cpu":
            raise ConfigError(f"a tensor on {tensor.device} is none of this driver's")
        return tensor

    def memory(self, nbytes: int, stream: Any) -> _Memory:
        """See Driver."""
        del stream
        return _Memory(nbytes)

    def host(self, nbytes: int) -> NDArray[np.uint8]:
        """See Driver."""
        return np.full(nbytes, POISON, np.uint8)

    def pin(self, address: int, nbytes: int) -> None:
        """See Driver."""
        if self.refuses:
            raise ConfigError(f"{nbytes} bytes are not pinned: so it was asked for")
        if any(at < address + nbytes and address < at + size for at, size in self.pinned.items()):
            raise ConfigError("memory is pinned twice")
        self.pinned[address] = nbytes
        self.registered.append(address)

    def unpin(self, address: int) -> None:
        """See Driver."""
        del self.pinned[address]

    def copy(
        self, stream: Any, to: int, of: int, nbytes: int, planes: int = 1, step: int = 0
    ) -> None:
        """See Driver."""
        if planes > 1 and step < nbytes:
            raise RuntimeError(f"planes of {nbytes} bytes, {step} apart: an invalid pitch")
        self.calls.append("copy" if planes == 1 else "copy of planes")
        for plane in range(planes):
            stream.enqueue(partial(ctypes.memmove, to + plane * step, of + plane * step, nbytes))

    def batch(self, stream: Any, table: Numbers) -> None:
        """See Driver. The table is read late, as far as anybody knows."""
        if not self.batches:
            raise ConfigError("this driver has no batched copies")
        self.calls.append("batch")
        stream.enqueue(partial(_copy_runs, table.ctypes.data, table.shape[1]))

    def launch(self, stream: Any, work: Work, grid: int) -> None:
        """See Driver."""
        self.calls.append(f"launch {grid}")
        stream.enqueue(partial(_copy_planes, work))

    def close(self) -> None:
        """See Driver."""
        for stream in self._streams:
            stream.close()


def _copy_runs(table: int, runs: int) -> None:
    for to, of, nbytes in _rows(table, _ROWS, runs).T.tolist():
        _copy(to, of, nbytes)


def _copy_planes(work: Work) -> None:
    begins = [_rows(work.begins + 8 * work.all * row, 1, work.planes)[0] for row in range(2)]
    rows = [_rows(work.table + 8 * work.row * row, 1, work.runs)[0] for row in range(_ROWS)]
    for plane in zip(*begins, strict=True):
        ends = ((row + begin).tolist() for row, begin in zip(rows, plane, strict=False))
        for to, of, nbytes in zip(*ends, rows[2].tolist(), strict=True):
            _copy(to, of, nbytes)


def _copy(to: int, of: int, nbytes: int) -> None:
    if nbytes > 1 << 30:
        raise ValueError("the table was changed before it was read")
    ctypes.memmove(to, of, nbytes)


def _rows(table: int, rows: int, count: int) -> Numbers:
    """Read a table, as late as a GPU does."""
    found = np.empty((rows, count), np.uint64)
    ctypes.memmove(found.ctypes.data, table, found.nbytes)
    return found
