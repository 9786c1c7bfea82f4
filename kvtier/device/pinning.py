"""Which of the host's memory a driver has registered, and for which mapping of it.

An address says too little. What is mapped anew, of the same size, mostly lies where the old mapping
lay; a GPU would go on to read and write the pages of the old one, and nobody would notice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.device.driver import Driver


class _Extent(NamedTuple):
    """So many bytes of what `owner` returns, or None once that is gone."""

    nbytes: int
    owner: Callable[[], object]


class Pinned:
    """The registered memory of one driver. It keeps alive what cannot be referred to weakly."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._extents: dict[int, _Extent] = {}

    def holds(self, memory: NDArray[np.uint8]) -> bool:
        """Say whether just this is registered; of nothing there is nothing to register."""
        mine = self._extents.get(memory.ctypes.data)
        return not memory.nbytes or (
            mine is not None and mine.nbytes == memory.nbytes and mine.owner() is _owner(memory)
        )

    def covers(self, low: int, high: int) -> bool:
        """Say whether all between two addresses is in one registered memory."""
        return any(at <= low and high <= at + one.nbytes for at, one in self._extents.items())

    def stale(self, memory: NDArray[np.uint8]) -> list[int]:
        """Return the addresses of what is gone, or is in the way of this."""
        begin, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
        return [
            at
            for at, one in self._extents.items()
            if one.owner() is None or (at < end and begin < at + one.nbytes)
        ]

    def add(self, memory: NDArray[np.uint8]) -> None:
        """Register it, exactly so much. Raises ConfigError when refused."""
        self._driver.pin(memory.ctypes.data, memory.nbytes)
        owner = _reference(_owner(memory))
        self._extents[memory.ctypes.data] = _Extent(memory.nbytes, owner)

    def drop(self, addresses: Sequence[int] | None = None) -> None:
        """Undo it for some; None: for all. No work uses them any more."""
        for address in list(self._extents if addresses is None else addresses):
            del self._extents[address]
            self._driver.unpin(address)


def _owner(memory: NDArray[np.uint8]) -> object:
    """Return whose memory it is: the mapping, say, that an array is a view of."""
    found: Any = memory
    while isinstance(found, np.ndarray) and found.base is not None:
        found = found.base
    return found.obj if isinstance(found, memoryview) else found


def _reference(owner: object) -> Callable[[], object]:
    """Return what gives an owner, and None once it is gone; some kinds of it are kept instead."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner
