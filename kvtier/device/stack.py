"""KV tensors that are alike, one for each layer, copied as if they were one.

An engine that gives each layer a tensor has dozens, anywhere in memory. What is planned for a plane
of one of them holds for all planes of all: only where each begins is another.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class Stack:
    """Bytes [planes, blocks, bytes of a block] of several tensors, one after another.

    tensors: uint8 [planes of it, blocks, bytes of a block], whose blocks are as many, as long, and
    as far apart in each. begins: where each plane begins, uint64 [planes]. Immutable.
    """

    __slots__ = ("__weakref__", "_first", "begins", "shape", "strides", "tensors")

    def __init__(self, tensors: Sequence[Bytes], begins: NDArray[np.uint64]) -> None:
        self.tensors = tuple(tensors)
        self.begins = begins
        self.shape = (len(begins), *self.tensors[0].shape[1:])
        self._first = list(accumulate(map(len, self.tensors[:-1]), initial=0))
        self.strides = (0, *self.tensors[0].strides[1:])  # planes have none

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, planes: slice) -> Planes:
        """Return some of the planes, consecutive ones."""
        low, high, _ = planes.indices(len(self))
        if high - low == len(self):
            return self
        if high <= low:
            return self.tensors[0][:0]
        touched = slice(bisect_right(self._first, low) - 1, bisect_left(self._first, high))
        each = zip(self.tensors[touched], self._first[touched], strict=True)
        kept = [tensor[max(low - at, 0) : high - at] for tensor, at in each]
        return Stack(kept, self.begins[low:high])


Planes = Bytes | Stack
"""Bytes of a paged cache, [planes, blocks, bytes of a block]: of one tensor, or of several."""


def stacked(tensors: Sequence[Bytes]) -> list[Planes]:
    """Return tensors, each [planes, blocks, bytes], with neighbours that are alike as a Stack."""
    found: list[Planes] = []
    for _, some in groupby(tensors, lambda one: (one.shape[1:], one.strides[1:])):
        alike = list(some)
        begins = [one.ctypes.data + one.strides[0] * np.arange(len(one)) for one in alike]
        joined = np.concatenate(begins).view(np.uint64)
        found.append(Stack(alike, joined) if len(alike) > 1 else alike[0])
    return found
