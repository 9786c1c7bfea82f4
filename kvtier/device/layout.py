"""Where the blocks of a KV tensor lie, whatever the order of its dimensions in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ConfigError

_READ_WRITE: Final = False  # numpy's array interface asks whether it is read-only


class _Bytes:
    """Bytes at an address, for numpy. It keeps whose they are alive."""

    def __init__(
        self, owner: Any, address: int, shape: Sequence[int], strides: Sequence[int]
    ) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "data": (address, _READ_WRITE),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": "|u1",
            "version": 3,
        }


def byte_pages(tensor: Any, planes: int, block_bytes: int) -> NDArray[np.uint8]:
    """View a tensor as bytes [planes, blocks, bytes of a block]. See ``Device.pages``.

    tensor: of numpy or torch. Nothing of it is read: its memory may be a GPU's.
    """
    if isinstance(tensor, np.ndarray):
        address, item = int(tensor.__array_interface__["data"][0]), tensor.itemsize
        strides = tensor.strides
        if not tensor.flags.writeable:
            raise ConfigError("a KV tensor must be writable: loads write into it")
        if tensor.dtype.hasobject:
            raise ConfigError("a KV tensor must hold numbers, not Python's objects")
    else:
        try:
            address, item = tensor.data_ptr(), tensor.element_size()
            strides = tuple(stride * item for stride in tensor.stride())
        except RuntimeError as error:  # torch's, of one that is sparse or nested, say
            raise ConfigError(f"a KV tensor must lie in memory by strides: {error}") from error
    shape = tuple(tensor.shape)
    at = _block_dimension(shape, item, planes, block_bytes)
    if not _dense(shape[at + 1 :], strides[at + 1 :], item):
        raise ConfigError(
            f"a KV tensor of shape {shape} and strides {strides} has gaps inside its blocks; "
            "a block's bytes must lie together"
        )
    along = _even(shape[:at], strides[:at])
    if along is None:
        raise ConfigError(
            f"a KV tensor of shape {shape} and strides {strides} does not space its planes "
            "evenly; give each layer as a tensor of its own"
        )
    steps = sorted([(strides[at], shape[at]), (along, planes)])
    if not _apart(steps, block_bytes):
        raise ConfigError(
            f"a KV tensor of shape {shape} and strides {strides} has blocks that share bytes"
        )
    place = (planes, shape[at], block_bytes)
    return bytes_at(tensor, address, place, (along, strides[at], 1))


def bytes_at(
    owner: Any, address: int, shape: Sequence[int], strides: Sequence[int]
) -> NDArray[np.uint8]:
    """Return bytes at an address, which `owner` keeps there. Nothing is read."""
    return np.asarray(_Bytes(owner, address, shape, strides))


def _block_dimension(shape: tuple[int, ...], item: int, planes: int, block_bytes: int) -> int:
    """Return which dimension counts blocks. A model of one plane, or layer, has some of one."""
    for at in range(len(shape)):
        rest = math.prod(shape[at + 1 :]) * item
        if math.prod(shape[:at]) == planes and rest == block_bytes:
            return at
    raise ConfigError(
        f"a KV tensor of shape {shape} is not {planes} planes (layers x K and V) "
        f"of blocks of {block_bytes} bytes; check dtype, block size, heads and head size"
    )


def _dense(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    """Say whether the elements fill one run of memory, in whatever order."""
    run = item
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1:
            if stride != run:
                return False
            run *= length
    return True


def _even(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the one stride that leads through all of some dimensions; None if there is none."""
    real = [pair for pair in zip(shape, strides, strict=True) if pair[0] > 1]
    for (_, outer), (length, inner) in itertools.pairwise(real):
        if outer != inner * length:
            return None
    return real[-1][1] if real else 0


def _apart(steps: Sequence[tuple[int, int]], block_bytes: int) -> bool:
    """Say whether no two blocks share a byte. steps: stride and count, the smaller stride first."""
    extent = block_bytes
    for stride, count in steps:
        if count > 1:
            if stride < extent:
                return False
            extent = stride * (count - 1) + extent
    return True
