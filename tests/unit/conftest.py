"""A Tier over a store that does what it is told, for the tests of tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtier.identity.record import Header
from kvtier.metrics import Metrics
from kvtier.seams import ThreadFlow
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.records import NAMESPACE, aligned, make_record
from kvtier.testing.small_spill import SmallSpill
from kvtier.tiers.store import Read, Status
from kvtier.tiers.tier import Fetched, Tier, Wanted

SIZE = 5000


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Faulty(MemoryStore):
    """A real store in memory that does what `fault` says before every call."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Callable[[str], None] = lambda verb: None
        self.answer: Callable[[list[Any]], Any] = lambda out: out
        self.headers: Callable[[Header], Header | None] = lambda header: header
        self.calls = 0

    def _do(self, verb: str, *args: Any) -> Any:
        self.calls += 1
        self.fault(verb)
        return self.answer(getattr(MemoryStore, verb)(self, *args))

    def contains_many(self, ids):
        return self._do("contains_many", ids)

    def write_many(self, records):
        return self._do("write_many", records)

    def delete_many(self, ids):
        return self._do("delete_many", ids)

    def read_many(self, ids, into):
        reads = self._do("read_many", ids, into)
        if not isinstance(reads, list):
            return reads
        return [
            Read(read.status, read.header and self.headers(read.header)) if read else read
            for read in reads
        ]


class Bench:
    """A Tier over such a store, with a clock that stands still."""

    def __init__(self, name: str = "mem") -> None:
        self.store, self.clock, self.metrics = Faulty(), Clock(), Metrics()
        self.flow = ThreadFlow()
        self.tier = Tier(name, self.store, self.flow, self.metrics, self.clock)
        self.record = make_record(1, SIZE)

    def start(self, verb: str):
        wanted = Wanted(self.record.header.id, NAMESPACE, SIZE, aligned(SIZE))
        items = {"read": [wanted], "write": [self.record]}.get(verb, [self.record.header.id])
        return self.flow.spawn(getattr(self.tier, verb)(items))

    def do(self, verb: str) -> Status:
        (outcome,) = self.start(verb).result(10)
        return outcome.status if isinstance(outcome, Fetched) else outcome

    def read(self, size: int = SIZE, **changes: Any) -> tuple[Fetched, memoryview]:
        buffer = aligned(size)
        buffer[:] = b"\xab" * size
        wanted = Wanted(self.record.header.id, NAMESPACE, size, buffer)._replace(**changes)
        (fetched,) = self.flow.spawn(self.tier.read([wanted])).result(10)
        return fetched, buffer

    def fail(self, error: BaseException) -> None:
        """Let every call of the store raise from now on."""

        def fault(verb: str) -> None:
            raise error

        self.store.fault = fault

    def heal(self) -> None:
        """Let the store work again."""
        self.store.fault = lambda verb: None

    def settle(self) -> None:
        """Return once the loop has done all that was ready."""
        self.flow.spawn(asyncio.sleep(0.001)).result(10)

    def count(self, name: str) -> float:
        return self.metrics.get(name, tier="mem")


@pytest.fixture
def new_bench() -> type[Bench]:
    """Return the class, for a test that closes its own."""
    return Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Return a Tier named "mem" over a faulty store in memory, and what belongs to it."""
    found = Bench()
    yield found
    found.tier.close()
    found.flow.close()


@pytest.fixture
def new_spill() -> Iterator[Callable[..., SmallSpill]]:
    """Return a function that makes the queue of a tier that does what it is told."""
    made: list[SmallSpill] = []

    def make(*args: Any) -> SmallSpill:
        made.append(SmallSpill(*args))
        return made[-1]

    yield make
    for one in made:
        one.close()
