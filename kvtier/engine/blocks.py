"""The block pool: who owns which block, and which free blocks still hold a known prefix.

The bytes lie in one tensor elsewhere; here are only numbers. A block is owned (its count of
owners is positive), or idle (free, but its content is still known under a key), or blank.
Owned blocks may be known by a key too: that is how running requests share a prefix.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ConfigError, MisuseError


class BlockPool:
    """Ownership, prefix index and eviction of `num_blocks` blocks, numbered from 0.

    prefix_cache: False keeps no index; a freed block is forgotten at once.
    Idle blocks are evicted least recently freed first. ``release`` frees a request's blocks
    deepest first, so of one prefix the tail is evicted before what it builds on.
    """

    def __init__(self, num_blocks: int, *, prefix_cache: bool = True) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks is {num_blocks}; a pool needs at least 1")
        self.num_blocks = num_blocks
        self._prefix_cache = prefix_cache
        self._owners = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._blank = list(range(num_blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that ``allocate`` could hand out now, idle ones included."""
        return len(self._blank) + len(self._idle)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of `keys`. No hold: see ``share``."""
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, key: bytes) -> int | None:
        """Return the block that is known under `key`. No hold: see ``share``."""
        return self._blocks.get(key)

    def idle(self, blocks: Sequence[int]) -> int:
        """Count those of `blocks` that are free: sharing them makes ``free`` that much less."""
        return sum(block in self._idle for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Become one more owner of blocks that ``match`` just returned."""
        for block in blocks:
            if self._keys[block] is None:
                raise MisuseError(f"block {block} holds no known prefix")
            self._owners[block] += 1
            self._idle.pop(block, None)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks of unknown content, owned once; None if so many are not free."""
        if count > self.free:
            return None
        return [self._take() for _ in range(count)]

    def publish(self, block: int, key: bytes) -> None:
        """Make an owned block, now full, findable under `key`. The first of equals stays."""
        if not self._owners[block]:
            raise MisuseError(f"block {block} has no owner")
        if self._prefix_cache and self._keys[block] is None and key not in self._blocks:
            self._keys[block] = key
            self._blocks[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Own a request's blocks, given in the order of its table, no longer."""
        for block in reversed(blocks):
            if not self._owners[block]:
                raise MisuseError(f"block {block} is released more often than it was taken")
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if self._keys[block] is None:
                self._blank.append(block)
            else:
                self._idle[block] = None

    def reset(self) -> None:
        """Forget every prefix. Blocks in use stay with their owners."""
        self._blocks.clear()
        self._keys = [None] * self.num_blocks
        self._blank.extend(self._idle)
        self._idle.clear()

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            key = self._keys[block]
            if key is not None:
                del self._blocks[key]
                self._keys[block] = None
        self._owners[block] = 1
        return block


def root_key(identity: object | None) -> bytes:
    """Return the key that a request's chain of blocks starts from, 32 bytes.

    identity: None, or a frozen dataclass of plain values, which enter with their full content.
    Raises ConfigError for a value that has no exact encoding.
    """
    return hashlib.sha256(_encode(identity)).digest()


def chain_keys(parent: bytes, tokens: NDArray[np.int32], block_tokens: int) -> list[bytes]:
    """Return the keys of the whole blocks of `tokens`, chained from `parent`, 32 bytes each.

    A key is sha256 over its parent and the raw token ids: equal keys mean equal prefixes.
    """
    keys = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        content = tokens[start : start + block_tokens].astype("<i4", copy=False).tobytes()
        parent = hashlib.sha256(parent + content).digest()
        keys.append(parent)
    return keys


def _encode(value: object) -> bytes:
    """Encode plain data so that different values never have the same bytes: tag, length, body."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return _tagged(b"D", _encode([type(value).__qualname__, *fields]))
    if isinstance(value, bytes | bytearray):
        return _tagged(b"B", bytes(value))
    if isinstance(value, str):
        return _tagged(b"S", value.encode())
    if value is None or isinstance(value, bool | int | float):
        return _tagged(b"V", repr(value).encode())
    if isinstance(value, list | tuple):
        return _tagged(b"L", b"".join(_encode(item) for item in value))
    raise ConfigError(
        f"a request identity cannot hold a {type(value).__name__};"
        " use None, numbers, text, bytes, tuples and dataclasses of these"
    )


def _tagged(tag: bytes, body: bytes) -> bytes:
    return tag + len(body).to_bytes(8, "little") + body
