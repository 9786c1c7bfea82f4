"""The same prompts, served cold, from the engine's own blocks, and from a cache below.

Any device can be asked: what a GPU is to show is rehearsed on the CPU by the same code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import kvtier
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.base import Device
from kvtier.engine import Engine, Sampling
from kvtier.engine.runner import AnyModel
from kvtier.errors import KvtierError

_BLOCK: Final = 16
_CHUNK: Final = 32
_FLUSH_SECONDS: Final = 30.0
Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Answers:
    """Output tokens of each prompt. hits: prompt tokens by where the second serving had them from.

    cold: without any cache. own: served again by the same engine. loaded: served again by an
    engine that keeps nothing itself, from a cache below. replayed: decode steps that were.
    """

    cold: list[Tokens]
    own: list[Tokens]
    loaded: list[Tokens]
    hits: dict[str, dict[str, int]]
    replayed: int

    @property
    def same(self) -> bool:
        """Whether it makes no difference where the KV came from."""
        return self.cold == self.own == self.loaded


def answers(
    model: AnyModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    copies: Device,
    **engine: Any,
) -> Answers:
    """Serve prompts in all three ways. Blocks.

    copies: what copies, where `engine` says that it computes. engine: options of the Engine,
    `device` and `graphs` say. Raises KvtierError when what was saved is not written in time.
    """
    sizes = {"num_blocks": 128, "block_tokens": _BLOCK, "chunk_tokens": _CHUNK} | engine
    cold = Engine(model, prefix_cache=False, **sizes)
    first, _ = _served(cold, prompts, sampling)
    own = Engine(model, **sizes)
    _served(own, prompts, sampling)
    second, own_hits = _served(own, prompts, sampling)
    dtype = str(own.kv[0].dtype).removeprefix("torch.")
    geometry = kvtier.Geometry(
        model.components, dtype=dtype, block_tokens=(_BLOCK,), chunk_tokens=_CHUNK
    )
    with kvtier.open("dram:64MiB", namespace=kvtier.Namespace("answers", geometry)) as cache:
        below = Engine(model, prefix_cache=False, **sizes)
        below.connect(ReferenceConnector(cache, below.kv, copies, always=True))
        _served(below, prompts, sampling)
        while not below.idle:
            below.step()
        if not cache.flush(timeout=_FLUSH_SECONDS):
            raise KvtierError("what was saved is not written yet")
        third, hits = _served(below, prompts, sampling)
        below.close()
    graphs = [one._runner.graphs for one in (cold, own, below)]
    replayed = sum(one.replayed for one in graphs if one is not None)
    return Answers(first, second, third, {"own": own_hits, "loaded": hits}, replayed)


def _served(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> tuple[list[Tokens], dict[str, int]]:
    """Return the answers, and the prompt tokens that were no computed ones, by tier."""
    hits: dict[str, int] = {}
    found = engine.generate(prompts, sampling)
    for one in found:
        for tier, tokens in one.finish.stats.hit_tokens.items():
            hits[tier] = hits.get(tier, 0) + tokens
    return [one.tokens for one in found], hits
