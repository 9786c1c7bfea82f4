"""A real engine over a real Cache, small enough for tests, with gates that hold copies back."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import torch

import kvtier
from kvtier.config import TierConfig, parse_tier
from kvtier.connectors.reference import ReferenceConnector
from kvtier.device.base import Role
from kvtier.device.cpu import CpuDevice
from kvtier.engine import (
    Completion,
    Engine,
    HybridConfig,
    Kind,
    Model,
    ModelConfig,
    Sampling,
    random_hybrid,
    random_weights,
)
from kvtier.engine.runner import AnyModel
from kvtier.engine.spans import Inputs
from kvtier.identity.record import RecordId
from kvtier.identity.shape import chunk_shape
from kvtier.memory.arena import slot_bytes_for
from kvtier.storage_backends.memory import MemoryStore
from kvtier.tiers.store import Read, Status, Write

BLOCK: Final = 16
CHUNK: Final = 64
_GIVE_UP_SECONDS: Final = 20.0
_SHORT: Final = Sampling(max_tokens=8)


def small_model(layers: int = 2) -> Model:
    """Return a random Llama, of two layers by default, whose answers depend on every bit of KV."""
    config = ModelConfig(
        vocab_size=97,
        layers=layers,
        hidden_size=48,
        heads=6,
        kv_heads=2,
        head_size=16,
        intermediate_size=80,
        context_tokens=1024,
    )
    return Model(random_weights(config, seed=1))


@functools.cache
def one_model() -> Model:
    """Return ``small_model()``, the same object each time; from now on torch has one thread."""
    torch.set_num_threads(1)
    return small_model()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens for any of the small models."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, 97, length).tolist()
    return tokens


@functools.cache
def _alone(tokens: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    engine = Engine(one_model(), num_blocks=64, prefix_cache=False)
    return engine.generate([tokens], sampling)[0].tokens


def alone(tokens: Sequence[int], sampling: Sampling = _SHORT) -> tuple[int, ...]:
    """Return what ``one_model()`` answers without any cache."""
    return _alone(tuple(tokens), sampling)


@functools.cache
def small_hybrid(kinds: tuple[Kind, ...], window: int) -> AnyModel:
    """Return a random model with a layer of each kind, the same object each time."""
    config = ModelConfig(
        vocab_size=97,
        layers=len(kinds),
        hidden_size=48,
        heads=4,
        kv_heads=2,
        head_size=16,
        intermediate_size=80,
        context_tokens=1024,
    )
    return random_hybrid(HybridConfig(config, kinds, window=window), seed=3)


class GatedStore(MemoryStore):
    """A Store in memory that counts what is written, and whose reads wait while it is shut."""

    OPTIONS: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__("gated")
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.reading = threading.Event()
        self.writes: Counter[RecordId] = Counter()

    def read_many(self, ids: Sequence[RecordId], into: Sequence[memoryview]) -> list[Read]:
        """See Store. Blocks while the gate is shut, twenty seconds at most."""
        self.reading.set()
        self.open_gate.wait(_GIVE_UP_SECONDS)
        return super().read_many(ids, into)

    def write_many(self, records: Sequence[Write]) -> list[Status]:
        """See Store."""
        self.writes.update(record.header.id for record in records)
        return super().write_many(records)


class Serving:
    """An engine, its cache of dram and one tier below, and the connector between them.

    chunks: room in dram. below: URL of the other tier; a GatedStore by default. device: copies.
    groups: of layers, see ``Cache.bind``. engine: options of the Engine; its own prefix cache is
    off unless asked for, so that what was served before comes from the Cache.
    """

    def __init__(
        self,
        model: AnyModel,
        *,
        chunks: int = 64,
        below: str | None = None,
        device: CpuDevice | None = None,
        groups: int | None = None,
        **engine: Any,
    ) -> None:
        geometry = kvtier.Geometry(
            model.components,
            dtype=str(engine.get("kv_dtype", "torch.bfloat16")).removeprefix("torch."),
            block_tokens=(BLOCK,),
            chunk_tokens=CHUNK,
        )
        self.store = GatedStore()
        tier = parse_tier(below) if below else TierConfig("memory", "", None, store=self.store)
        chunk = sum(map(slot_bytes_for, chunk_shape(geometry).nbytes))
        config = kvtier.Config(chunks * chunk, (tier,))
        self.cache = kvtier.open(config, namespace=kvtier.Namespace("small", geometry))
        self.device = CpuDevice() if device is None else device
        options: dict[str, Any] = {"num_blocks": 64, "chunk_tokens": CHUNK, "prefix_cache": False}
        self.engine = Engine(model, **(options | engine))
        kv, device = self.engine.kv, self.device
        self.connector = ReferenceConnector(self.cache, kv, device, always=True, groups=groups)
        self.engine.connect(self.connector)

    def answer(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        identity: kvtier.Request | None = None,
        inputs: Inputs | None = None,
    ) -> Completion:
        """Serve one prompt to its end, then wait until all that it saved can be found."""
        outputs = list(self.engine.stream(prompt, sampling, identity, inputs))
        self.settle()
        finish = outputs[-1].finish
        if finish is None:
            raise TimeoutError
        tokens = tuple(output.token for output in outputs if output.token is not None)
        return Completion(outputs[-1].request_id, tokens, finish)

    def settle(self) -> None:
        """Run until every request has ended, and every copy and save after it."""
        while not self.engine.idle:
            self.engine.step()
        if not self.cache.flush(timeout=_GIVE_UP_SECONDS):
            raise TimeoutError

    @contextlib.contextmanager
    def held(self, role: Role) -> Iterator[None]:
        """Let no copy of one direction, "load" or "store", begin before the block ends."""
        gate = threading.Event()
        self.device.stream(role).enqueue(lambda: _wait(gate))
        try:
            yield
        finally:
            gate.set()

    @property
    def saved_chunks(self) -> int:
        """Chunks that were committed so far."""
        return int(self.cache.metrics.get("saved_chunks"))

    def close(self) -> None:
        """Close everything. Blocks."""
        self.store.open_gate.set()
        self.engine.close()
        self.cache.close()
        self.device.close()


def _wait(gate: threading.Event) -> None:
    gate.wait(_GIVE_UP_SECONDS)


@contextlib.contextmanager
def servings() -> Iterator[Callable[..., Serving]]:
    """Yield what makes a Serving of a model and options; they are closed at the end."""
    with contextlib.ExitStack() as opened:

        def open_one(model: AnyModel, **options: Any) -> Serving:
            one = Serving(model, **options)
            opened.callback(one.close)
            return one

        yield open_one
