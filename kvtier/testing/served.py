"""A real engine in a process of its own, on a daemon's cache, for tests.

It is a fork with the URL of its cache and a socket: see ``torch_forks``. It takes one prompt a
line, a JSON list of token ids, and answers each with a line: what it said, and how many tokens came
from which tier.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any, Final, Self

import torch

import kvtier
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.cpu import CpuDevice
from kvtier.engine import Engine, Sampling
from kvtier.testing.serving import BLOCK, CHUNK, small_model
from kvtier.testing.torch_forks import TorchForks

_END_SECONDS: Final = 30.0
_FLUSH_SECONDS: Final = 10.0


class Served:
    """The engine's process, as its tests see it.

    forks: what starts it. url: of the cache, ``unix:PATH``; "" for none.
    """

    def __init__(self, forks: TorchForks, url: str) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.process = forks.start("served", [url], [theirs.fileno()])
            self._asked, self._said = ours.makefile("w"), ours.makefile("r")

    def ask(self, prompt: Sequence[int]) -> None:
        """Hand over a prompt. Never waits for the answer."""
        self._asked.write(json.dumps(list(prompt)) + "\n")
        self._asked.flush()

    def answer(self) -> tuple[list[int], dict[str, int]]:
        """Return the next answer: tokens, and tokens found by tier. Blocks until it is there."""
        line = self._said.readline()
        if not line:
            raise EOFError("the engine has ended")
        said: dict[str, Any] = json.loads(line)
        return said["tokens"], said["hit_tokens"]

    def close(self) -> None:
        """End it. Blocks."""
        try:
            self._said.close()
            self._asked.close()
            self.process.wait(_END_SECONDS)
        finally:
            self.process.kill()
            self.process.close()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.close()


def main(arguments: Sequence[str]) -> None:
    """Serve what comes by a socket until that ends. Blocks. arguments: the URL, the descriptor."""
    url, number = arguments
    torch.set_num_threads(1)
    model = small_model()
    engine = Engine(model, num_blocks=64, chunk_tokens=CHUNK, prefix_cache=False)
    device = CpuDevice()
    geometry = kvtier.Geometry(model.components, block_tokens=(BLOCK,), chunk_tokens=CHUNK)
    cache = None
    if url:
        cache = kvtier.open(url, namespace=kvtier.Namespace("small", geometry))
        engine.connect(ReferenceConnector(cache, engine.kv, device, always=True))
    with (
        socket.socket(fileno=int(number)) as link,
        link.makefile("r") as asked,
        link.makefile("w") as said,
    ):
        for line in asked:
            (completion,) = engine.generate([json.loads(line)], Sampling(max_tokens=8))
            while not engine.idle:
                engine.step()
            if cache is not None:
                cache.flush(timeout=_FLUSH_SECONDS)
            hits = completion.finish.stats.hit_tokens
            said.write(json.dumps({"tokens": completion.tokens, "hit_tokens": hits}) + "\n")
            said.flush()
    engine.close()
    if cache is not None:
        cache.close()
    device.close()
