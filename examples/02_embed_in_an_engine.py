"""Embed kvtier in an engine of one's own, through a Connector.

The toy engine "computes" KV by summing token ids. It counts how many tokens it had to compute:
the second time a prompt is asked, hardly any.
"""

from __future__ import annotations

import sys

import numpy as np

import kvtier
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.cpu import CpuDevice

BLOCK = 16
GEOMETRY = kvtier.Geometry((kvtier.Component(layers=2, heads=1, head_size=8),), "float32", (BLOCK,))


class ToyEngine:
    """Serves one request at a time from 256 blocks of 16 tokens."""

    def __init__(self, cache: kvtier.Cache) -> None:
        self.kv = np.zeros((2, 2, 256, BLOCK, 1, 8), np.float32)
        self.device = CpuDevice()
        self.connector = ReferenceConnector(cache, self.kv, self.device)
        self.computed = 0

    def serve(self, name: str, tokens: np.ndarray, blocks: list[int]) -> None:
        """Answer a prompt: load what is cached, compute the rest, save what is new."""
        match = self.connector.match(name, tokens, computed=0)
        while match.pending:  # on its way up from disk or S3; a real engine serves others now
            self.connector.wait(0.05)
            match = self.connector.match(name, tokens, computed=0)
        start = 0
        if match.tokens:
            self.connector.load(name, blocks[: match.tokens // BLOCK])
            while not (loaded := self.connector.poll().loaded):
                self.connector.wait(0.05)
            start = loaded[0].tokens
        self.prefill(tokens, start, blocks)
        self.connector.save(name, tokens, blocks)
        if self.connector.finish(name):  # True: the blocks are still being read
            while name not in self.connector.poll().released:
                self.connector.wait(0.05)

    def prefill(self, tokens: np.ndarray, start: int, blocks: list[int]) -> None:
        """Compute the KV of tokens[start:] into the blocks."""
        for at in range(start, len(tokens)):
            self.kv[:, :, blocks[at // BLOCK], at % BLOCK] = tokens[: at + 1].sum()
        self.computed += len(tokens) - start


def main() -> int:
    """Ask one prompt twice; the second time into other blocks."""
    namespace = kvtier.Namespace(model="toy", geometry=GEOMETRY)
    with kvtier.open("dram:16MiB", namespace=namespace) as cache:
        engine = ToyEngine(cache)
        tokens = np.arange(1040, dtype=np.int32)
        engine.serve("first", tokens, list(range(65)))
        first, engine.computed = engine.computed, 0
        cache.flush(timeout=5)
        engine.serve("second", tokens, list(range(100, 165)))
        print(f"computed {first} tokens, then {engine.computed}")
        same = np.array_equal(engine.kv[:, :, :65], engine.kv[:, :, 100:165])
        engine.connector.close()
        engine.device.close()
    return 0 if same and engine.computed == 1040 - 1024 else 1


if __name__ == "__main__":
    sys.exit(main())
