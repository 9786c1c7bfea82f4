"""Open a cache, keep a prompt's KV in it, and read it back from disk after a restart.

The engine here is a numpy array: blocks of 16 tokens, filled with random bytes. What comes back
must be those bytes.
"""

from __future__ import annotations

import sys
import tempfile

import numpy as np

import kvtier
from kvtier.device.cpu import CpuDevice

GEOMETRY = kvtier.Geometry((kvtier.Component(layers=4, heads=2, head_size=64),))
NAMESPACE = kvtier.Namespace(model="example", geometry=GEOMETRY)
TOKENS = np.arange(1025, dtype=np.int32)  # four chunks of 256, and one token to compute
BLOCKS = list(range(64))


def save(folder: str, kv: np.ndarray) -> None:
    """Copy blocks into DRAM; the cache writes them to disk in the background."""
    device = CpuDevice()
    with kvtier.open("dram:64MiB", f"lmdb:{folder}?capacity=256MiB", namespace=NAMESPACE) as cache:
        pages = cache.bind(kv, device)
        plan = cache.plan_save(cache.prefix(TOKENS), BLOCKS)
        copied = pages.execute(plan, after=[device.host_fence()]).result(timeout=5)
        cache.settle(plan, copied)
        cache.flush(timeout=10)
    device.close()


def load(folder: str) -> np.ndarray:
    """Open the same folder again, as a new process would, and fill fresh blocks."""
    kv = np.zeros((4, 2, 64, 16, 2, 64), np.uint16)
    device = CpuDevice()
    with kvtier.open("dram:64MiB", f"lmdb:{folder}?capacity=256MiB", namespace=NAMESPACE) as cache:
        match = cache.match(TOKENS)
        print(f"{match.tokens} of {len(TOKENS)} tokens are cached, in {set(match.tiers)}")
        with cache.fetch(match, timeout=5, deadline=30).result(timeout=5) as lease:
            plan = cache.plan_load(lease, into=BLOCKS)
        loaded = cache.bind(kv, device).execute(plan, after=[device.host_fence()]).result(timeout=5)
        cache.settle(plan, loaded)
    device.close()
    return kv


def main() -> int:
    """Save, restart, load, compare."""
    kv = np.random.default_rng(0).integers(0, 1 << 16, (4, 2, 64, 16, 2, 64), np.uint16)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        save(folder, kv)
        same = np.array_equal(load(folder), kv)
    print("the bytes are the same" if same else "the bytes differ")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
