"""What a cache learns from its fetches: which tier the time went by for."""

from __future__ import annotations

import dataclasses
import time

import pytest

from kvtier.adviser import Adviser
from kvtier.cache import Cache
from kvtier.config import Config, TierConfig
from kvtier.seams import Future
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.toy import CHUNK, CHUNK_BYTES, GEOMETRY, NAMESPACE, Toy, prompt

TOKENS = prompt(12 * CHUNK + 1)


class Hands:
    """A clock that goes on when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Shared(MemoryStore):
    """A store that hosts share, of which each look-up takes three seconds of a clock."""

    clock: Hands | None = None

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, shared=True)

    def contains_many(self, ids):
        if self.clock is not None:
            self.clock.now += 3.0
        return super().contains_many(ids)


@pytest.fixture
def clock():
    return Hands()


@pytest.fixture
def shared():
    return Shared()


@pytest.fixture
def toy(clock, shared):
    """Two tiers below DRAM; the first one has a prompt of twelve chunks."""
    tiers = (
        TierConfig("lmdb", "", None, "through", store=MemoryStore()),
        TierConfig("s3", "", None, "on-evict", store=shared),
    )
    one = Toy(Cache(Config(16 * CHUNK_BYTES, tiers), NAMESPACE, clock=clock))
    one.save("a", TOKENS)
    one.cache.clear("dram")
    yield one
    one.close()


@pytest.fixture
def fetched(toy, clock):
    """Return what is learnt of a fetch of these tiers that took so long, and what came of it."""
    adviser = Adviser(toy.cache._desk, GEOMETRY, toy.cache.shape, clock)

    def learn(tiers, seconds, came=None, asked=0.0):
        match = toy.cache.match(TOKENS)
        match = dataclasses.replace(match, where=bytes(map(match.stack.index, tiers)))
        lease = None
        if came:
            lease = toy.cache.fetch(match, timeout=20, deadline=1e6).result(20)
            lease.sources, lease.asked = came, asked
        running = Future()
        adviser.timed(dataclasses.replace(match, unknown=bool(asked)), 0, 5.0, running)
        clock.now += seconds
        running.set_result(lease)
        if lease is not None:
            lease.release()
        return {
            tier: latency + CHUNK_BYTES / rate
            for tier, (latency, rate) in adviser.costs.figures().items()
        }

    return learn


def test_of_a_fetch_from_two_tiers_the_slower_one_is_learnt(fetched):
    both = ("lmdb",) * 4 + ("s3",) * 2
    assert fetched(both, 4.0, both) == {"s3": pytest.approx(2.0)}
    fetched(("lmdb",) * 4, 0.4, ("lmdb",) * 4)
    found = fetched(both, 4.0, both)
    assert found == {"lmdb": pytest.approx(0.1), "s3": pytest.approx(2.0)}


def test_asking_is_no_part_of_reading(fetched):
    assert fetched(("lmdb",) * 4, 3.4, ("lmdb",) * 4, asked=3.0) == {"lmdb": pytest.approx(0.1)}


def test_a_lease_says_how_long_was_asked(toy, clock, shared):
    shared.clock = clock
    match = dataclasses.replace(toy.cache.match(TOKENS[: 4 * CHUNK]), unknown=True)
    match = dataclasses.replace(match, prefix=toy.cache.prefix(TOKENS), known=3)
    lease = toy.cache.fetch(match, timeout=30, deadline=1e6).result(20)
    with lease:
        assert lease.asked >= 3.0
        assert set(lease.sources) == {"lmdb"}


def test_a_fetch_that_runs_out_of_time_tells_of_what_did_not_come(fetched):
    both = ("lmdb",) * 4 + ("s3",) * 2
    assert fetched(both, 5.0, ("lmdb",) * 4) == {"s3": pytest.approx(2.5)}
    assert fetched(("lmdb",) * 4, 5.0)["lmdb"] == pytest.approx(1.25)


def test_a_fetch_that_ends_early_with_nothing_tells_nothing(fetched):
    assert fetched(("lmdb",) * 4, 1.0) == {}


def test_a_probe_reads_a_little_and_no_more(toy):
    costs = toy.cache._adviser.costs
    costs.believe_tier("lmdb", 0.0, 1.0)
    toy.cache.computed([(0, CHUNK)], 1e-3)
    _, advice = toy.cache.advise(toy.cache.match(TOKENS))
    assert (advice.choice, advice.skipped) == ("recompute", "lmdb")
    until = time.monotonic() + 20
    while costs._queued["lmdb"] and time.monotonic() < until:
        time.sleep(0.001)
    assert not costs._queued["lmdb"]
    assert toy.cache.metrics.get("fetched_bytes") == 4 * CHUNK_BYTES
