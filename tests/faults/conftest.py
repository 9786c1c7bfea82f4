"""What the tests of field faults share: engines that are recounted at the end of each test."""

from __future__ import annotations

import math
import random
import threading
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import kvtier
from kvtier.clock import Clock, monotonic
from kvtier.config import Config, TierConfig, parse_tier
from kvtier.device.cpu import CpuDevice
from kvtier.identity.geometry import Needs, component_shards, stage_layers
from kvtier.identity.record import Header, RecordId, split_record_id
from kvtier.identity.shape import chunk_shape
from kvtier.memory.arena import Slot, slot_bytes_for
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.faults import FaultyStore, Rates
from kvtier.testing.oracle import Oracle
from kvtier.testing.simmodel import Model
from kvtier.testing.toy import CHUNK_BYTES, NAMESPACE, Toy
from kvtier.tiers.store import Capabilities, Read, Status, Store, Write
from kvtier.transfer import CopyStatus

T = TypeVar("T")

# ---------------------------------------------------------------------------------------- stores


class Disk(MemoryStore):
    """Outlives the cache that uses it, as a disk does. gate: calls wait until it is open."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[str, int]] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(durable=True, shared=self.shared)

    def contains_many(self, ids: list[RecordId]) -> list[Status]:
        self._enter("contains", len(ids))
        return super().contains_many(ids)

    def read_many(self, ids: list[RecordId], into: list[memoryview]) -> list[Read]:
        self._enter("read", len(ids))
        return super().read_many(ids, into)

    def write_many(self, records: list[Write]) -> list[Status]:
        self._enter("write", len(records))
        return super().write_many(records)

    def close(self) -> None:
        pass

    def _enter(self, verb: str, count: int) -> None:
        self.calls.append((verb, count))
        self.gate.wait(30)


class FaultyAt(FaultyStore):
    """Fails in one way wherever a record of one of some depths is concerned, until it is healed."""

    THREADS = 1

    def __init__(self, kind: str, depths: Collection[int], inner: Store | None = None) -> None:
        super().__init__(inner or Disk(), random.Random(0), Rates())
        self.fault = Rates(**{kind: 1.0})
        self.depths = depths
        self.reads = 0
        self.writes = 0  # that were acknowledged
        self._asked: tuple[int, ...] = ()

    def heal(self) -> None:
        self.depths = ()

    def read_many(self, ids: list[RecordId], into: list[memoryview]) -> list[Read]:
        self.reads += len(ids)
        self._asked = tuple(map(self._depth, ids))
        self._aim(*self._asked)
        return super().read_many(ids, into)

    def write_many(self, records: list[Write]) -> list[Status]:
        self._asked = tuple(record.header.depth for record in records)
        self._aim(*self._asked)
        statuses = super().write_many(records)
        self.writes += statuses.count(Status.OK)
        return statuses

    def delete_many(self, ids: list[RecordId]) -> list[Status]:
        self._asked = tuple(map(self._depth, ids))
        self._aim(*self._asked)
        return super().delete_many(ids)

    def _cut(self, answers: list[T]) -> list[T]:
        self._aim(*self._asked)
        return super()._cut(answers)

    def _read(self, name: RecordId, into: memoryview) -> Read:
        self._aim(self._depth(name))
        return super()._read(name, into)

    def _write(self, record: Write) -> Status:
        self._aim(record.header.depth)
        return super()._write(record)

    def _depth(self, name: RecordId) -> int:
        return next((header.depth for header in self.inner.scan() if header.id == name), -1)

    def _aim(self, *depths: int) -> None:
        self.rates = self.fault if any(depth in self.depths for depth in depths) else Rates()


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def new_disk() -> type[Disk]:
    return Disk


@pytest.fixture
def faulty_at() -> type[FaultyAt]:
    return FaultyAt


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def lmdb(folder: Path) -> str:
    return f"lmdb:{folder}?capacity=64MiB"


# --------------------------------------------------------------------------- engines, recounted


class Recount(Oracle):
    """Recounts a cache from outside. What the bytes must be, the toy engine knows."""

    def __init__(self, cache: kvtier.Cache, clock: Clock) -> None:
        super().__init__(cache, Model(cache.geometry.components, *cache.ranks), clock)

    def expect_bytes(self, name: RecordId, slot: Slot, size: int, what: str) -> None:
        self._expect(self._arena.holds(slot), f"a {what} slot is not in use")

    def check_end(self) -> None:
        """Check that nothing is held, and that every byte of a tier is accounted for."""
        assert self.cache.flush(timeout=20)
        self.check_rest()
        for number, tier in self.cache._desk.depot.tiers.items():
            if tier.store.capabilities.shared:
                continue
            kept: dict[RecordId, Header] = {header.id: header for header in tier.store.scan()}
            known = {*self.indexed(number), *self.strays(number)}
            assert not kept.keys() - known, "a record is in the store and in no account"


class Engines:
    """Opens toy engines. Those still open when the test has ended are recounted and closed."""

    def __init__(self) -> None:
        self._open: list[tuple[Toy, Recount | None]] = []

    def __call__(
        self,
        *below: str | Store,
        chunks: int = 32,
        capacity: int | None = None,
        namespace: kvtier.Namespace = NAMESPACE,
        clock: Clock = monotonic,
        recount: bool = True,
    ) -> Toy:
        """Open one on dram for some chunks. below: tiers as URLs, or open stores.

        recount: False where the test ruins a tier beyond what can be listed.
        """
        tiers = tuple(
            parse_tier(tier)
            if isinstance(tier, str)
            else TierConfig("disk", "", capacity, "through", store=tier, write_budget=math.inf)
            for tier in below
        )
        cache = kvtier.Cache(Config(chunks * CHUNK_BYTES, tiers), namespace, clock=clock)
        toy = Toy(cache)
        self._open.append((toy, Recount(cache, clock) if recount else None))
        return toy

    def close(self, toy: Toy) -> None:
        """Recount one engine and close it."""
        (found,) = (one for one in self._open if one[0] is toy)
        self._open.remove(found)
        _, recount = found
        toy.connector.close()
        try:
            if recount is not None and not toy.cache._closed:
                recount.check_end()
        finally:
            toy.close()

    def close_all(self) -> None:
        while self._open:
            self.close(self._open[-1][0])


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Return what opens engines; each is recounted and closed at the end of the test."""
    found = Engines()
    yield found
    found.close_all()


# ----------------------------------------------------------------------------- ranks, kinds of KV


class Ranks:
    """An engine of several ranks and kinds of layers: each rank has tensors, and copies, its own.

    What it computes of a block, or of a state, is one number that follows from the tokens up to
    there, and tells whose it is.
    """

    def __init__(
        self,
        geometry: kvtier.Geometry,
        *,
        shards: int = 1,
        stages: int = 1,
        store: Store | None = None,
        capacity: int | None = None,
        chunks: int = 16,
        most: int = 8,
    ) -> None:
        """Open a cache with dram for `chunks`. most: chunks of the longest prompt."""
        self.geometry = geometry
        self.ranks = [(shard, stage) for stage in range(stages) for shard in range(shards)]
        self.most, self.block = most, geometry.block_tokens[0]
        shape = chunk_shape(geometry, shards, stages)
        below = [TierConfig("disk", "", capacity, "through", store=store)] if store else []
        config = Config(chunks * sum(map(slot_bytes_for, shape.nbytes)), tuple(below))
        namespace = kvtier.Namespace("ranks", geometry)
        self.cache = kvtier.Cache(config, namespace, shards=shards, stages=stages)
        self.recount = Recount(self.cache, monotonic)
        self.devices = [CpuDevice() for _ in self.ranks]
        self.kv = [self._tensors(*rank, shards, stages) for rank in self.ranks]
        self.pages = [
            self.cache.bind(kv, device, shard=shard, stage=stage)
            for kv, device, (shard, stage) in zip(self.kv, self.devices, self.ranks, strict=True)
        ]
        self._owner = [
            [shard * component_shards(one, shards) // shards for one in geometry.components]
            for shard, _ in self.ranks
        ]

    def _tensors(self, shard: int, stage: int, shards: int, stages: int) -> list[np.ndarray]:
        """Return a rank's tensors: places for the longest prompt, and as many to load into."""
        del shard
        found = []
        for one in self.geometry.components:
            layers = len(stage_layers(one, stage, stages))
            heads = one.heads // component_shards(one, shards)
            tokens = () if one.needs is Needs.LAST else (self.block,)
            count = 2 * self._places(one)
            shape = (layers, one.planes, count, *tokens, heads, one.head_size)
            found.append(np.zeros(shape, np.uint16))
        return found

    def _places(self, component: kvtier.Component) -> int:
        per_chunk = self.geometry.chunk_tokens // self.block
        return self.most * (1 if component.needs is Needs.LAST else per_chunk)

    def _number(self, rank: int, component: int, place: int, tokens: np.ndarray) -> int:
        state = self.geometry.components[component].needs is Needs.LAST
        end = (place + 1) * (self.geometry.chunk_tokens if state else self.block)
        whose = (component, self._owner[rank][component], self.ranks[rank][1])
        return zlib.crc32(tokens[:end].astype("<i4").tobytes() + bytes(whose)) & 0x7FFF

    def save(self, tokens: np.ndarray, absent: Collection[tuple[int, int]] = ()) -> list[int]:
        """Compute and save a prompt; return how many parts each rank was to copy.

        absent: components with a place that the engine has not got any more.
        """
        tables: list[list[int]] = []
        for at, one in enumerate(self.geometry.components):
            for rank in range(len(self.ranks)):
                for place in range(self._places(one)):
                    self.kv[rank][at][:, :, place] = self._number(rank, at, place, tokens)
            places = range(self._places(one))
            tables.append([-1 if (at, place) in absent else place for place in places])
        plan = self.cache.plan_save(self.cache.prefix(tokens), tables)
        if plan is None:
            return [0] * len(self.ranks)
        results = [pages.execute(plan, ()).result(10) for pages in self.pages]
        assert {result.status for result in results} == {CopyStatus.OK}
        self.cache.settle(plan, results[0])
        assert self.cache.flush(timeout=20)
        memory = self.cache._desk.arena.memory
        placed = [[each._place(p, memory, saves=True) for p in plan.parts] for each in self.pages]
        return [len(parts) - parts.count(None) for parts in placed]

    def load(self, tokens: np.ndarray) -> int:
        """Load what there is into all ranks; return its length. All that is needed is exact."""
        match = self.cache.match(tokens)
        if not match.tokens and not match.unknown:
            return 0
        lease = self.cache.fetch(match, timeout=10, deadline=60).result(20)
        if lease is None:
            return 0
        with lease:
            length = lease.tokens
            tables = [self._into(one, length) for one in self.geometry.components]
            plan = self.cache.plan_load(lease, tables)
        for kv in self.kv:
            for at, one in enumerate(self.geometry.components):
                kv[at][:, :, self._places(one) :] = 0xABAB
        results = [pages.execute(plan, ()).result(10) for pages in self.pages]
        self.cache.settle(plan, results[0])
        assert {(result.status, result.tokens) for result in results} == {(CopyStatus.OK, length)}
        for rank in range(len(self.ranks)):
            for at in range(len(self.geometry.components)):
                self._check(rank, at, length, tokens)
        return length

    def _into(self, component: kvtier.Component, length: int) -> list[int]:
        first = self._places(component)
        if component.needs is Needs.LAST:
            return [first]
        skipped = max(length - component.window, 0) // self.block if component.window else 0
        return [-1 if at < skipped else first + at for at in range(length // self.block)]

    def _check(self, rank: int, at: int, length: int, tokens: np.ndarray) -> None:
        """Check each place: loaded ones hold what was computed, and the others were not touched."""
        component = self.geometry.components[at]
        first = self._places(component)
        into = self._into(component, length)
        if component.needs is Needs.LAST:
            right = {first: length // self.geometry.chunk_tokens - 1}
        else:
            right = {place: index for index, place in enumerate(into) if place >= 0}
        for place in range(first, 2 * first):
            found = np.unique(self.kv[rank][at][:, :, place]).tolist()
            wanted = self._number(rank, at, right[place], tokens) if place in right else 0xABAB
            assert found == [wanted], (self.ranks[rank], component.name, place)

    def names(self, tokens: np.ndarray, chunk: int, **fields: int) -> list[RecordId]:
        """Return the names of a chunk's parts whose fields are those: component, shard, stage."""
        names = self.cache.prefix(tokens).names[chunk]
        parts = [(name, split_record_id(name)[1]) for name in names]
        return [
            name
            for name, part in parts
            if all(getattr(part, field) == value for field, value in fields.items())
        ]

    def close(self) -> None:
        """Recount, and close everything, once."""
        if self.cache._closed:
            return
        try:
            self.recount.check_end()
        finally:
            self.cache.close()
            for device in self.devices:
                device.close()


@pytest.fixture
def new_ranks() -> Iterator[Callable[..., Ranks]]:
    """Return what opens engines of several ranks; each is recounted and closed at the end."""
    found: list[Ranks] = []

    def opened(*args: Any, **kwargs: Any) -> Ranks:
        found.append(Ranks(*args, **kwargs))
        return found[-1]

    yield opened
    for one in found:
        one.close()


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """Return a way to ask which warnings kvtier has logged that contain some words."""
    caplog.set_level("WARNING", logger="kvtier")
    return lambda words: [text for text in caplog.messages if words in text]
