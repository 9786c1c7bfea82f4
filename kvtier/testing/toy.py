"""A toy engine of numpy blocks around a real Cache, for tests and for trying things out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

import kvtier
from kvtier.connectors.base import Loaded, Update
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.cpu import CpuDevice

BLOCK: Final = 16
CHUNK: Final = 64
GEOMETRY = kvtier.Geometry(
    (kvtier.Component(layers=2, heads=2, head_size=8),), block_tokens=(BLOCK,), chunk_tokens=CHUNK
)
CHUNK_BYTES = GEOMETRY.bytes_per_token * CHUNK
NAMESPACE = kvtier.Namespace("tiny", GEOMETRY)
BLOCKS = 256


class Toy:
    """An engine of numpy blocks: its KV of a block is a pattern of the tokens before it."""

    def __init__(self, cache: kvtier.Cache) -> None:
        self.kv = np.zeros((2, 2, BLOCKS, BLOCK, 2, 8), np.uint16)
        self.cache = cache
        self.device = CpuDevice()
        self.connector = ReferenceConnector(cache, self.kv, self.device)

    def compute(self, tokens: NDArray[np.int32], blocks: range) -> None:
        """Compute the KV of a prompt into blocks."""
        for index, block in enumerate(blocks):
            self.kv[:, :, block] = pattern(tokens[: (index + 1) * BLOCK])

    def save(self, name: str, tokens: NDArray[np.int32], first_block: int = 0) -> None:
        """Compute and save a prompt, and wait until it is written down."""
        blocks = range(first_block, first_block + len(tokens) // BLOCK)
        self.compute(tokens, blocks)
        self.connector.save(name, tokens, list(blocks))
        if self.connector.finish(name):
            self.until(lambda update: name in update.released)
        if not self.cache.flush(timeout=20):
            raise TimeoutError

    def load(
        self, name: str, tokens: NDArray[np.int32], computed: int = 0, first_block: int = 128
    ) -> tuple[int, Loaded | None, bool]:
        """Load what is offered into fresh blocks; return offered, Loaded, and whether exact."""
        match = self.connector.match(name, tokens, computed)
        while match.pending:
            self.connector.wait(5)
            match = self.connector.match(name, tokens, computed)
        if not match.tokens:
            self.connector.finish(name)
            return match.tokens, None, True
        self.kv[:, :, first_block:] = 0xABAB
        blocks = list(range(first_block, first_block + match.tokens // BLOCK))
        self.connector.load(name, blocks)
        loaded = self.until(lambda update: update.loaded).loaded[0]
        self.connector.finish(name)
        exact = all(
            np.array_equal(
                self.kv[:, :, block],
                np.broadcast_to(
                    pattern(tokens[: computed + (index + 1) * BLOCK]), (2, 2, BLOCK, 2, 8)
                ),
            )
            for index, block in enumerate(blocks[: loaded.tokens // BLOCK])
        )
        untouched = bool((self.kv[:, :, first_block + match.tokens // BLOCK :] == 0xABAB).all())
        return match.tokens, loaded, exact and untouched

    def until(self, wanted: Callable[[Update], object]) -> Update:
        """Poll until an update is as wanted. Raises TimeoutError after 20 seconds."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            update = self.connector.poll()
            if wanted(update):
                return update
            self.connector.wait(1)
        raise TimeoutError

    def close(self) -> None:
        """Close connector, cache and device."""
        self.connector.close()
        self.cache.close()
        self.device.close()


def pattern(tokens: NDArray[np.int32]) -> NDArray[np.uint16]:
    """Return KV of one block that depends on every token up to its end."""
    seed = int.from_bytes(tokens.astype("<i4").tobytes()[-8:], "little") + int(tokens.sum())
    return np.random.default_rng(seed).integers(0, 1 << 16, (2, 2, BLOCK, 2, 8), np.uint16)


def prompt(length: int, seed: int = 0) -> NDArray[np.int32]:
    """Return a random prompt; the same seed gives prompts that share their beginning."""
    return np.random.default_rng(seed).integers(0, 30_000, length).astype(np.int32)


def opened(*urls: str, namespace: kvtier.Namespace = NAMESPACE) -> Toy:
    """Open a cache and put a toy engine on it."""
    return Toy(kvtier.open(*urls, namespace=namespace))


def dram(chunks: int) -> str:
    """Return the URL of a DRAM tier for a number of chunks."""
    return f"dram:{chunks * CHUNK_BYTES}B"
