"""A real engine in a process of its own, on a daemon's cache, for tests.

``python -m kvtier.testing.served URL`` takes one prompt a line, a JSON list of token ids, and
answers each with a line: what it said, and how many tokens came from which tier.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final, Self

import torch

import kvtier
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.cpu import CpuDevice
from kvtier.engine import Engine, Sampling
from kvtier.testing.serving import BLOCK, CHUNK, small_model
from kvtier.testing.with_parent import with_parent

_END_SECONDS: Final = 30.0
_FLUSH_SECONDS: Final = 10.0


class Served:
    """The engine's process, as its tests see it. url: of the cache, ``unix:PATH``; "" for none."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", __name__, url]
        self.process = subprocess.Popen(  # noqa: S603  (this module itself)
            with_parent(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, prompt: Sequence[int]) -> None:
        """Hand over a prompt. Never waits for the answer."""
        if self.process.stdin is not None:
            self.process.stdin.write(json.dumps(list(prompt)) + "\n")
            self.process.stdin.flush()

    def answer(self) -> tuple[list[int], dict[str, int]]:
        """Return the next answer: tokens, and tokens found by tier. Blocks until it is there."""
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line:
            raise EOFError("the engine has ended")
        said: dict[str, Any] = json.loads(line)
        return said["tokens"], said["hit_tokens"]

    def close(self) -> None:
        """End it. Blocks."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(_END_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.close()


def main(arguments: Sequence[str]) -> None:
    """Serve what comes by standard input until it ends. Blocks."""
    (url,) = arguments
    torch.set_num_threads(1)
    model = small_model()
    engine = Engine(model, num_blocks=64, chunk_tokens=CHUNK, prefix_cache=False)
    device = CpuDevice()
    geometry = kvtier.Geometry(model.components, block_tokens=(BLOCK,), chunk_tokens=CHUNK)
    cache = None
    if url:
        cache = kvtier.open(url, namespace=kvtier.Namespace("small", geometry))
        engine.connect(ReferenceConnector(cache, engine.kv, device, always=True))
    for line in sys.stdin:
        (completion,) = engine.generate([json.loads(line)], Sampling(max_tokens=8))
        while not engine.idle:
            engine.step()
        if cache is not None:
            cache.flush(timeout=_FLUSH_SECONDS)
        hits = completion.finish.stats.hit_tokens
        print(json.dumps({"tokens": completion.tokens, "hit_tokens": hits}), flush=True)  # noqa: T201
    engine.close()
    if cache is not None:
        cache.close()
    device.close()


if __name__ == "__main__":
    main(sys.argv[1:])
