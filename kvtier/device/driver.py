"""What a CUDA device asks of the driver: few calls, so that a CPU can stand in for all of them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.device.descriptors import Numbers


class Work(NamedTuple):
    """What the copy kernel is given: see ``copy.cuh``. Addresses are of the GPU's memory."""

    begins: int
    table: int
    planes: int
    runs: int
    all: int
    row: int


class Event(Protocol):
    """One recorded moment of a stream; never recorded again."""

    def done(self) -> bool:
        """Say whether all before it has ended. Never blocks. Raises what the work raised."""
        ...


class Buffer(Protocol):
    """Memory of the device, for as long as this object lives."""

    address: int


class Driver(Protocol):
    """One GPU. Streams are the driver's own, and not the default one. Nothing here waits.

    name: of GPU and driver, which measured speeds belong to. processors: how many SMs.
    batches: whether ``batch`` can be had. node: of the host's memory, the nearest; None: not known.
    """

    name: str
    processors: int
    batches: bool
    node: int | None

    def stream(self) -> Any:
        """Return a new stream."""
        ...

    def record(self, stream: Any) -> Event:
        """Return a new event of all that is on a stream."""
        ...

    def wait(self, stream: Any, event: Event) -> None:
        """Hold later work of a stream until an event."""
        ...

    def caller(self) -> Event:
        """Return a new event of the stream that the calling thread computes on."""
        ...

    def hold(self, event: Event) -> None:
        """Hold later work of that stream until an event."""
        ...

    def own(self, tensor: Any) -> Any:
        """Return a tensor of this GPU, without its history. Raises ConfigError for another."""
        ...

    def memory(self, nbytes: int, stream: Any) -> Buffer:
        """Return memory of the GPU that only work of this stream uses."""
        ...

    def host(self, nbytes: int) -> NDArray[np.uint8]:
        """Return pinned memory of the host."""
        ...

    def pin(self, address: int, nbytes: int) -> None:
        """Register memory of the host, exactly so much. Raises ConfigError when refused."""
        ...

    def unpin(self, address: int) -> None:
        """Undo that."""
        ...

    def copy(
        self, stream: Any, to: int, of: int, nbytes: int, planes: int = 1, step: int = 0
    ) -> None:
        """Enqueue one copy of bytes, and of as many on each further plane.

        step: how far planes lie apart at both ends, at least `nbytes`.
        """
        ...

    def batch(self, stream: Any, table: Numbers) -> None:
        """Enqueue copies, whose sources are read in stream order. table: see ``Runs.table``."""
        ...

    def launch(self, stream: Any, work: Work, grid: int) -> None:
        """Enqueue the copy kernel, on tables that are in the GPU's memory by then."""
        ...

    def close(self) -> None:
        """Give back what is the driver's. All streams have ended."""
        ...
