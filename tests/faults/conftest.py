"""What the tests of field faults share: engines that are recounted at the end of each test."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import kvtier
from kvtier.clock import Clock, monotonic
from kvtier.config import Config, TierConfig, parse_tier
from kvtier.identity.record import Header, RecordId
from kvtier.memory.arena import Slot
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.faults import FaultyStore, Rates
from kvtier.testing.oracle import Oracle
from kvtier.testing.toy import CHUNK_BYTES, NAMESPACE, Toy
from kvtier.tiers.store import Capabilities, Read, Status, Store, Write

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
    """Return a store in memory that outlives its caches."""
    return Disk()


@pytest.fixture
def new_disk() -> type[Disk]:
    return Disk


@pytest.fixture
def faulty_at() -> type[FaultyAt]:
    return FaultyAt


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a directory, not there yet, for an lmdb tier."""
    return tmp_path / "kv"


@pytest.fixture
def lmdb(folder: Path) -> str:
    """Return the URL of an lmdb tier in that directory."""
    return f"lmdb:{folder}?capacity=64MiB"


# --------------------------------------------------------------------------- engines, recounted


class Recount(Oracle):
    """Recounts a cache from outside. What the bytes must be, the toy engine knows."""

    def expect_bytes(self, name: RecordId, slot: Slot, size: int, what: str) -> None:
        self._expect(self._arena.holds(slot), f"a {what} slot is not in use")

    def check_end(self) -> None:
        """Check that nothing is held, and that every byte of a tier is accounted for."""
        assert self.cache.flush(timeout=20)
        self.check_rest()
        for number, tier in self.cache._depot.tiers.items():
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
            else TierConfig("disk", "", capacity, store=tier)
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


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """Return a way to ask which warnings kvtier has logged that contain some words."""
    caplog.set_level("WARNING", logger="kvtier")
    return lambda words: [text for text in caplog.messages if words in text]
