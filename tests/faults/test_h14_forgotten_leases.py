"""H14: whatever an engine forgets, after its deadline nothing is held any more."""

from __future__ import annotations

import random

import pytest

from kvtier.testing.hands import Hands
from kvtier.testing.mortal import Mortal, figure
from kvtier.testing.toy import BLOCK, CHUNK, dram, prompt
from kvtier.testing.waiting import until
from kvtier.transfer import CopyResult, CopyStatus

POOL, PINNED, TTL = 64, 8, 30.0
TOKENS = PINNED * CHUNK


@pytest.fixture
def clock():
    return Hands()


def use_and_release(toy, match):
    with toy.cache.lease(match, deadline=TTL) as lease:
        plan = toy.cache.plan_load(lease, list(range(128, 128 + TOKENS // BLOCK)))
    transfer = toy.pages.execute(plan, ())
    toy.cache.settle(plan, transfer.result(20))


def release_only(toy, match):
    toy.cache.lease(match, deadline=TTL).release()


def never_again(toy, match):
    toy.cache.lease(match, deadline=TTL)


def fetch_and_forget(toy, match):
    toy.cache.fetch(match, timeout=5, deadline=TTL)


def fetch_and_abandon(toy, match):
    toy.cache.fetch(match, timeout=5, deadline=TTL).abandon()


def release_too_late(toy, match):
    lease = toy.cache.lease(match, deadline=TTL)
    toy.clock.now += TTL
    toy.cache._desk.catalog.expire()
    assert not lease.held
    lease.release()


def plan_too_late(toy, match):
    lease = toy.cache.lease(match, deadline=TTL)
    toy.clock.now += TTL
    assert toy.cache.plan_load(lease, list(range(TOKENS // BLOCK))) is None


def pin_and_forget(toy, match):
    toy.cache.pin(match, seconds=TTL, timeout=5)


def pin_and_release(toy, match):
    pin = toy.cache.pin(match, seconds=TTL, timeout=5).result(20)
    assert pin.chunks == PINNED
    pin.release()


def prefetch_and_forget(toy, match):
    toy.cache.prefetch(match, base=1.0, per_1024_tokens=1.0)


def ask_and_end(toy, match):
    assert toy.connector.match("r", match.prefix.tokens, 0).tokens == TOKENS
    toy.connector.finish("r")


def ask_and_vanish(toy, match):
    """An engine that never ends its request."""
    toy.count += 1
    assert toy.connector.match(f"r{toy.count}", match.prefix.tokens, 0).tokens == TOKENS


WAYS = [
    use_and_release,
    release_only,
    never_again,
    fetch_and_forget,
    fetch_and_abandon,
    release_too_late,
    plan_too_late,
    pin_and_forget,
    pin_and_release,
    prefetch_and_forget,
    ask_and_end,
    ask_and_vanish,
]


def ready(engines, clock):
    toy = engines(chunks=POOL, clock=clock)
    toy.clock, toy.count = clock, 0
    toy.pages = toy.cache.bind(toy.kv, toy.device)
    toy.save("one", prompt(TOKENS))
    return toy, toy.cache.match(prompt(TOKENS + 1))


def expect_free(toy, clock):
    """After the time of a lease and a second, all slots can be had for something new."""
    assert toy.cache.flush(timeout=20)
    clock.now += TTL + 1
    assert toy.cache._desk.catalog.expire() == 0
    assert toy.cache.figures()["kvtier_leased_parts"] == 0
    fresh = prompt(POOL * CHUNK + 1, 1)
    blocks = list(range(256)) * 4
    plan = toy.cache.plan_save(toy.cache.prefix(fresh), blocks[: POOL * CHUNK // BLOCK])
    assert len(plan.parts) == POOL
    toy.cache.settle(plan, toy.pages.execute(plan, ()).result(20))
    assert toy.cache.flush(timeout=20)
    assert toy.cache.match(fresh).tokens == POOL * CHUNK


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_way_to_forget_ends(engines, clock, way):
    toy, match = ready(engines, clock)
    for _ in range(200):
        clock.now += 0.01
        way(toy, match)
    expect_free(toy, clock)


def test_ten_thousand_requests_of_all_ways_end(engines, clock):
    toy, match = ready(engines, clock)
    rng = random.Random(14)
    for _ in range(10_000):
        clock.now += rng.choice((0.0, 0.01, 1.0))
        rng.choice(WAYS)(toy, match)
    expect_free(toy, clock)


def test_without_deadlines_the_pool_would_be_pinned_for_good(engines, clock, monkeypatch):
    """The twin."""
    toy, match = ready(engines, clock)
    monkeypatch.setattr("kvtier.catalog.lease.Leases.expire", lambda self: None)
    lease = toy.cache.lease(match, deadline=TTL)
    clock.now += TTL + 1
    fresh = toy.cache.prefix(prompt(POOL * CHUNK, 1))
    plan = toy.cache.plan_save(fresh, list(range(256)))
    assert len(plan.parts) == POOL - PINNED
    toy.cache.settle(plan, toy.pages.execute(plan, ()).result(20))
    lease.release()


def test_what_a_daemons_clients_forget_ends_by_itself(nursery):
    """They lease and forget, and close while plans are out; then the pool is free for others."""
    daemon, rng = Mortal(nursery, dram(POOL)), random.Random(14)
    careful = daemon.open()
    careful.save("a", prompt(TOKENS, 1))
    until(lambda: careful.cache.match(prompt(TOKENS + 1, 1)).tokens)
    for _ in range(20):
        careless, plans = daemon.open().cache, []
        for _ in range(50):
            match = careless.match(prompt(TOKENS + 1, 1))
            lease = careless.lease(match, deadline=rng.choice([0.05, 600]))
            if lease is not None and rng.random() < 0.5:
                plans.append(careless.plan_load(lease, list(range(TOKENS // BLOCK))))
            if lease is not None and rng.random() < 0.2:
                lease.release()
        careless.close()
        for plan in filter(None, plans):  # its copies end after it
            careless.settle(plan, CopyResult(CopyStatus.OK))
    until(lambda: figure(careful, "leased_parts") == figure(careful, "plans_out") == 0)
    careful.save("b", prompt(POOL * CHUNK, 2))
    until(lambda: careful.cache.match(prompt(POOL * CHUNK + 1, 2)).tokens == POOL * CHUNK)
    daemon.close()
