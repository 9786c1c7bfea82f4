"""What a cache learns from its fetches: which tier the time went by for."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from kvtier.adviser import Adviser
from kvtier.cache import Cache
from kvtier.config import Config, TierConfig
from kvtier.seams import Future
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.hands import Hands
from kvtier.testing.toy import CHUNK, CHUNK_BYTES, GEOMETRY, NAMESPACE, Toy, prompt

TOKENS = prompt(12 * CHUNK + 1)


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


def test_estimate_outcome_and_regret_are_metrics(toy, clock):
    """A read that was thought to take 4 s takes 10, and computing would have taken 6."""
    costs, metrics = toy.cache._adviser.costs, toy.cache.metrics
    costs.believe_tier("lmdb", 0.0, 1 / CHUNK_BYTES)
    costs.believe_prefill(1.5 / CHUNK)
    match = toy.cache.match(TOKENS[: 4 * CHUNK + 1])
    kept, advice = toy.cache.advise(match)
    assert (advice.choice, advice.seconds) == ("load", pytest.approx(4.0))
    lease = toy.cache.fetch(match, timeout=50, deadline=1e6).result(20)
    lease.release()
    lease.sources = ("lmdb",) * 4
    running, before = Future(), metrics.get("load_seconds")
    toy.cache._adviser.costs.believe_tier("lmdb", 0.0, 1 / CHUNK_BYTES)
    toy.cache._adviser.timed(kept, 0, 50.0, running)
    clock.now += 10.0
    running.set_result(lease)
    assert metrics.get("load_decisions", choice="load") == 1
    assert metrics.get("load_seconds", tier="lmdb") - before == pytest.approx(10.0)
    assert metrics.get("load_regret_seconds", tier="lmdb") == pytest.approx(4.0)
    assert metrics.get("load_estimated_seconds", tier="lmdb") >= 4.0


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


class Forgetful(dict):
    """Does not know its keys."""

    def keys(self):
        return {}.keys()


@pytest.mark.parametrize("twin", [False, True])
def test_what_two_fetches_share_is_counted_once(toy, clock, twin):
    """And the twin: who does not know what is being read finds the tier twice as fast."""
    adviser = Adviser(toy.cache._desk, GEOMETRY, toy.cache.shape, clock)
    if twin:
        adviser._reading = Forgetful()
    match = toy.cache.match(TOKENS)
    leases = [toy.cache.fetch(match, timeout=20, deadline=1e6).result(20) for _ in range(2)]
    both = [Future(), Future()]
    for lease, running in zip(leases, both, strict=True):
        lease.sources = ("lmdb",) * 12
        adviser.timed(match, 0, 50.0, running)
    clock.now += 12.0
    for lease, running in zip(leases, both, strict=True):
        running.set_result(lease)
        lease.release()
    latency, rate = adviser.costs.figures()["lmdb"]
    assert (latency + CHUNK_BYTES / rate == pytest.approx(1.0)) is not twin
    assert not adviser._reading


def until(done) -> bool:
    limit = time.monotonic() + 20
    while not done() and time.monotonic() < limit:
        time.sleep(0.001)
    return done()


class Slow(Shared):
    """Here each read of a record takes as many seconds of a clock, and a look-up none.

    may_end: reads end only where it is set.
    """

    seconds = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()
        self.may_end.set()

    def contains_many(self, ids):
        return MemoryStore.contains_many(self, ids)

    def read_many(self, ids, into):
        assert self.may_end.wait(20)
        self.clock.now += self.seconds * len(ids)
        return super().read_many(ids, into)


@pytest.fixture
def others():
    """Records that another host has written to a shared tier: three prompts."""
    store = Shared()
    tier = TierConfig("s3", "", None, "through", store=store)
    one = Toy(Cache(Config(40 * CHUNK_BYTES, (tier,)), NAMESPACE))
    for seed in range(3):
        one.save(str(seed), prompt(12 * CHUNK + 1, seed))
    yield dict(store._records)
    one.close()


@pytest.fixture
def beside(others, clock):
    """Return a host beside it that computes a chunk in a second, and reads one in so many."""
    toys = []

    def make(seconds):
        store = Slow()
        store.clock, store.seconds, store._records = clock, seconds, others
        tier = TierConfig("s3", "", None, "on-evict", store=store)
        one = Toy(Cache(Config(60 * CHUNK_BYTES, (tier,)), NAMESPACE, clock=clock))
        one.cache.computed([(0, CHUNK)], 1.0)
        one.may_end = store.may_end
        toys.append(one)
        return one

    yield make
    for one in toys:
        one.close()


@pytest.mark.parametrize("seconds", [0.01, 20.0])
def test_nobody_waits_for_a_shared_tier_of_which_nothing_is_known(beside, clock, seconds):
    """It is asked in the background, and a little read; then who waits is decided by that."""
    one = beside(seconds)
    cache, costs = one.cache, one.cache._adviser.costs
    first, second, third = (prompt(12 * CHUNK + 1, seed) for seed in range(3))
    assert cache.match(first).unknown
    assert not one.connector.match("a", first, 0).pending
    assert until(lambda: cache.match(first).tokens)  # it has been asked
    assert not one.connector.match("a", first, 0).pending
    assert not costs.knows("s3")
    clock.now += 1.0
    one.may_end.clear()
    assert not one.connector.match("b", second, 0).pending  # nobody waits for the little read
    one.may_end.set()
    assert until(lambda: costs.knows("s3"))
    assert cache.metrics.get("fetched_bytes") == 4 * CHUNK_BYTES
    assert one.connector.match("c", third, 0).pending is (seconds < 1.0)


def test_what_it_looks_for_itself_is_no_request(beside, clock):
    one = beside(0.01)
    asked = prompt(12 * CHUNK + 1, 0)
    assert not one.connector.match("a", asked, 0).pending
    before = one.cache.metrics.get("match_tokens")
    clock.now += 1.0
    assert one.cache._adviser._asked
    one.cache._adviser._follow()
    assert not one.cache._adviser._asked
    assert one.cache.metrics.get("match_tokens") == before == len(asked)


def test_who_takes_what_is_not_known_for_fast_waits(beside, monkeypatch):
    """The twin."""
    one = beside(20.0)
    monkeypatch.setattr(type(one.cache._adviser.costs), "reading", lambda costs, tier, nbytes: 0.0)
    assert one.connector.match("a", prompt(12 * CHUNK + 1, 0), 0).pending
