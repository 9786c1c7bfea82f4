"""Two ranks in processes of their own, under one scheduler with one Cache, small enough for tests.

A rank is a fork with two descriptors, of its socket to the scheduler and of that to the other rank:
see ``torch_forks``. It takes messages in order: "open", then steps and plans, and ends when the
scheduler does. The arena is a daemon's, which it finds by the engine's id, or the scheduler's, as a
descriptor: see ``shared_arena``.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

import kvtier
from kvtier.connectors.ranks import Channel, RankCopies, RankedPages
from kvtier.copier import Pages
from kvtier.daemon.mapped import MappedArena
from kvtier.device.cpu import CpuDevice
from kvtier.engine import HybridConfig, Kind, ModelConfig, Span, random_hybrid
from kvtier.engine.compute import CpuCompute
from kvtier.engine.layers import LayerHook
from kvtier.engine.ranks import RankModel
from kvtier.engine.runner import Runner
from kvtier.engine.spans import StateCopy
from kvtier.identity.geometry import Component
from kvtier.memory.arena import Arena
from kvtier.memory.sealed import sealed_memory
from kvtier.testing.inside import inside
from kvtier.testing.torch_forks import TorchForks

RANKS: Final = 2
KINDS: Final = (Kind.WINDOW, Kind.LATENT, Kind.RECURRENT, Kind.FULL)
SHAPE: Final = HybridConfig(
    ModelConfig(
        vocab_size=97,
        layers=len(KINDS),
        hidden_size=48,
        heads=4,
        kv_heads=2,
        head_size=16,
        intermediate_size=80,
        context_tokens=1024,
    ),
    KINDS,
    window=40,
)
"""A model with every kind of layer, small enough for tests."""

_ANSWER_SECONDS: Final = 30.0
_IDLE_SECONDS: Final = 0.001


class Ranks:
    """Both processes, as the scheduler sees them: a model, and pages for a connector.

    seed: of the random weights. cache: opened with two shards, and with a `shared_arena` if it is
    in this process. num_blocks, num_states: of a rank's pools, at least what the engine thinks of.
    forks: what starts them. engine: the id that the cache was opened with, where that is a
    daemon's; path: of its socket, unless it is a private daemon.
    """

    def __init__(
        self,
        shape: HybridConfig,
        seed: int,
        cache: kvtier.Cache,
        *,
        forks: TorchForks,
        num_blocks: int,
        num_states: int,
        engine: str = "",
        path: str = "",
    ) -> None:
        self.config = shape.sizes
        self.geometry = cache.geometry
        peers = socket.socketpair()
        links = [socket.socketpair() for _ in range(RANKS)]
        arena = () if engine else (inside(cache).depot.arena.fd,)
        self.processes = [
            forks.start("ranked", [], [theirs.fileno(), peers[rank].fileno(), *arena])
            for rank, (_, theirs) in enumerate(links)
        ]
        for theirs in (*peers, *(pair[1] for pair in links)):
            theirs.close()
        self.channels = [Channel(ours) for ours, _ in links]
        places = [process.descriptor for process in self.processes]
        self.pages = RankedPages(self.channels, places)
        order = (dataclasses.asdict(shape), seed, num_blocks, num_states, engine, path)
        for rank, channel in enumerate(self.channels):
            channel.send("open", *order, self.geometry.chunk_tokens, rank)

    @property
    def components(self) -> tuple[Component, ...]:
        """What KV the ranks keep, all together."""
        return self.geometry.components

    def forward(
        self, spans: Sequence[Span], kv: Sequence[torch.Tensor], hook: LayerHook | None = None
    ) -> torch.Tensor:
        """See ``Model``. The pools are the ranks' own; raises OSError when one is gone."""
        del kv, hook  # copies of ranks are told of as a whole
        step = [(list(each.tokens), each.start, each.tables, each.logits) for each in spans]
        for channel in self.channels:
            channel.send("step", step)
        answers = [self._answer(rank) for rank in range(RANKS)]
        logits = np.frombuffer(answers[0], np.float32).reshape(-1, self.config.vocab_size)
        return torch.from_numpy(logits.copy())

    def copy_states(self, copies: Sequence[StateCopy], kv: Sequence[torch.Tensor]) -> None:
        """See ``Model``."""
        del kv
        for channel in self.channels:
            channel.send("states", copies)

    def close(self) -> None:
        """End the processes. Blocks."""
        for channel in self.channels:
            channel.close()
        while self.processes:
            process = self.processes.pop()
            process.wait(_ANSWER_SECONDS)
            process.close()

    def _answer(self, rank: int) -> bytes:
        while (message := self.channels[rank].receive(_ANSWER_SECONDS)) is not None:
            if message[0] == "logits":
                return bytes(message[1])
            self.pages.take(rank, message)
        raise OSError(f"rank {rank} does not answer")


def shared_arena(capacity: int, part_bytes: Sequence[int], *, nodes: Sequence[int] = ()) -> Arena:
    """Return what a Depot makes an Arena of, but of memory that ranks can map."""
    return Arena(0, part_bytes, fd=sealed_memory(capacity), nodes=nodes)


class _Rank:
    """The other side: one process's share of the model, of the KV, and of the copies."""

    def __init__(self, channel: Channel, peer: Channel, arena: list[int], order: list[Any]) -> None:
        _, shape, seed, num_blocks, num_states, engine, path, chunk_tokens, self._rank = order
        whole = random_hybrid(_shape(shape), seed)
        self._channel, self._peer = channel, peer
        self._model = RankModel(whole, self._rank, RANKS, self._exchange)
        geometry = kvtier.Geometry(whole.components, chunk_tokens=chunk_tokens)
        block = geometry.block_tokens[0]
        runner = Runner(
            self._model,
            num_blocks=num_blocks,
            num_states=num_states,
            block_tokens=block,
            kv_dtype=torch.bfloat16,
            compute=CpuCompute(),
        )
        self._kv = runner.kv
        self.device = CpuDevice()
        place = (self._rank, RANKS, 0, 1)
        if engine:
            worker = kvtier.Worker(engine, path or None)
            pages = worker.bind(geometry, self._kv, self.device, rank=place)
            self._copies = RankCopies(channel, pages, self.device, worker.ended)
            return
        mapped = MappedArena()
        mapped.map(*arena)
        pages = Pages(geometry, mapped, self._kv, self.device, place)
        self._copies = RankCopies(channel, pages, self.device)

    def serve(self) -> None:
        """Do what comes, in order, until the scheduler is gone."""
        while not self._channel.closed:
            busy = self._copies.report()
            message = self._channel.receive(_IDLE_SECONDS if busy else None)
            if message is None:
                continue
            kind, content = message
            if kind == "plan":
                self._copies.execute(content)
            elif kind == "states":
                self._model.copy_states(content, self._kv)
            else:
                logits = self._model.forward([Span(*each) for each in content], self._kv)
                self._channel.send("logits", logits.numpy().tobytes())

    def _exchange(self, partial: torch.Tensor) -> list[torch.Tensor]:
        """Swap partial sums with the other rank. Rank 0 speaks first, so that both never do."""
        mine = partial.numpy().tobytes()
        if self._rank == 0:
            self._peer.send(mine)
        message = self._peer.receive(_ANSWER_SECONDS)
        if message is None:
            raise OSError("the other rank is gone")
        if self._rank:
            self._peer.send(mine)
        theirs = torch.from_numpy(np.frombuffer(message[0], np.float32).copy()).view_as(partial)
        return [theirs, partial] if self._rank else [partial, theirs]


def _shape(data: dict[str, Any]) -> HybridConfig:
    sizes, kinds = ModelConfig(**data["sizes"]), tuple(map(Kind, data["kinds"]))
    return HybridConfig(**(data | {"sizes": sizes, "kinds": kinds}))


def main(arguments: Sequence[str]) -> None:
    """Be a rank until the scheduler is gone. Blocks."""
    torch.set_num_threads(1)
    scheduler, peer, *arena = map(int, arguments)
    channel, other = (Channel(socket.socket(fileno=number)) for number in (scheduler, peer))
    order = channel.receive(_ANSWER_SECONDS)
    if order is None:
        return
    rank = _Rank(channel, other, arena, order)
    try:
        rank.serve()
    except OSError as error:
        raise SystemExit(f"rank: {error}") from error
    finally:
        rank.device.close()
