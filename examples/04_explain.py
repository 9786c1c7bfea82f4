"""Ask why a prompt does not hit: where each chunk is, and which one ends the match."""

from __future__ import annotations

import sys

import numpy as np

import kvtier
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.cpu import CpuDevice

BLOCK = 16
GEOMETRY = kvtier.Geometry((kvtier.Component(layers=2, heads=1, head_size=8),), "float32", (BLOCK,))


def main() -> int:
    """Save a prompt, crowd its tail out of a memory that is too small, and ask."""
    namespace = kvtier.Namespace(model="toy", geometry=GEOMETRY)
    kv = np.zeros((2, 2, 256, BLOCK, 1, 8), np.float32)
    device = CpuDevice()
    with kvtier.open("dram:256KiB", namespace=namespace) as cache:  # eight chunks
        connector = ReferenceConnector(cache, kv, device)

        def save(name: str, tokens: np.ndarray) -> None:
            connector.save(name, tokens, list(range(len(tokens) // BLOCK)))
            if connector.finish(name):  # True: the blocks are still being read
                while name not in connector.poll().released:
                    connector.wait(0.05)
            cache.flush(timeout=5)

        mine = np.arange(1500, dtype=np.int32)
        save("mine", mine)
        print(cache.explain(mine))
        save("another's", np.arange(5000, 6280, dtype=np.int32))
        cache.invalidate(mine, first=1)
        found = cache.explain(mine)
        print(found)
        connector.close()
        device.close()
    return 0 if found.end.chunk == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
