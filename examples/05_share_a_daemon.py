"""Two processes on one cache: what the first saved, the second loads, after the first has ended."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import kvtier
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.cpu import CpuDevice

BLOCK = 16
GEOMETRY = kvtier.Geometry((kvtier.Component(layers=2, heads=1, head_size=8),), "float32", (BLOCK,))
NAMESPACE = kvtier.Namespace(model="toy", geometry=GEOMETRY)
PROMPT = np.arange(1025, dtype=np.int32)
BLOCKS = list(range(64))


def serve(url: str, *, saves: bool) -> None:
    """Be an engine's process: save the prompt's KV, or load it and look at it."""
    kv = np.zeros((2, 2, 64, BLOCK, 1, 8), np.float32)
    device = CpuDevice()
    with kvtier.open(url, namespace=NAMESPACE) as cache:
        connector = ReferenceConnector(cache, kv, device)
        if saves:
            kv[:] = 7.0
            connector.save("first", PROMPT, BLOCKS)
            while connector.finish("first") and "first" not in connector.poll().released:
                connector.wait(0.05)
            print("saved, all of it:", cache.flush(timeout=10))
        else:
            while (match := connector.match("second", PROMPT, 0)).pending:
                connector.wait(0.05)
            connector.load("second", BLOCKS)
            while not (loaded := connector.poll().loaded):
                connector.wait(0.05)
            print(f"found {match.tokens} tokens, loaded {loaded[0].tokens}")
            print("the bytes are the other's:", bool((kv == 7.0).all()))
        connector.close()
    device.close()


def main() -> int:
    """Start a daemon, and one engine after the other."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder, "kv.sock")
        command = [sys.executable, "-m", "kvtier", "serve", "dram:8MiB", "--socket", str(socket)]
        daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603
        try:
            for turn in ("first", "second"):
                engine = [sys.executable, __file__, f"unix:{socket}", turn]
                subprocess.run(engine, check=True)  # noqa: S603
        finally:
            daemon.terminate()
            daemon.wait()
    return 0


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(sys.argv[1], saves=sys.argv[2] == "first")
    else:
        sys.exit(main())
