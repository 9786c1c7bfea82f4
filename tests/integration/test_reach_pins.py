"""Pins: a prompt stays in DRAM until its time is over, bounded, whatever else wants the room."""

from __future__ import annotations

import pytest

from kvtier import MisuseError, Namespace
from kvtier.catalog.lease import LeaseState
from kvtier.catalog.pins import Pins
from kvtier.testing.toy import CHUNK, GEOMETRY, Toy, dram, opened, prompt

pytestmark = pytest.mark.everywhere

SLOTS = 16
TOKENS = prompt(4 * CHUNK + 1)


@pytest.fixture
def toy():
    """Room for sixteen chunks, a tier below, and a prompt of four that only that tier has."""
    one = opened(dram(SLOTS), "memory:below?capacity=unbounded")
    one.save("a", TOKENS)
    one.cache.clear("dram")
    yield one
    one.close()


def pin(toy, tokens=TOKENS, seconds=60.0):
    return toy.cache.pin(toy.cache.match(tokens), seconds=seconds, timeout=10).result(10)


def crowd(toy, start=1):
    """Save so much that everything that may leave DRAM has left it."""
    for seed in range(start, start + 6):
        toy.save(f"crowd{seed}", prompt(6 * CHUNK, seed))


def in_dram(toy, tokens=TOKENS) -> int:
    return toy.cache.match(tokens).tiers.count("dram")


def pinned(toy) -> float:
    toy.cache.figures()
    return toy.cache.metrics.get("pinned_parts")


def test_a_pin_brings_a_prompt_up_and_keeps_it_there(toy):
    lease = pin(toy)
    assert (lease.tokens, lease.sources, pinned(toy)) == (4 * CHUNK, ("memory",) * 4, 4)
    crowd(toy)
    assert in_dram(toy) == 4
    assert toy.load("a", TOKENS)[2]
    lease.release()
    assert pinned(toy) == 0
    crowd(toy, 20)
    assert in_dram(toy) == 0


@pytest.mark.inside("lets a deadline pass")
def test_a_pin_ends_when_its_time_is_over_and_is_no_lease_that_expired(toy):
    lease = pin(toy, seconds=0.05)
    while lease.state is LeaseState.HELD:
        toy.cache._desk.catalog.expire()
    assert pinned(toy) == 0
    assert toy.cache.metrics.get("expired_leases") == 0
    assert not lease.renew(60)
    lease.release()  # a no-op after its end
    lease.release()


def test_a_pin_that_is_renewed_in_time_lasts(toy):
    lease = pin(toy, seconds=0.2)
    assert lease.renew(60)
    crowd(toy)
    assert lease.held
    assert in_dram(toy) == 4
    lease.release()
    with pytest.raises(MisuseError, match="released before"):
        lease.release()
    assert not lease.renew(60)


def test_pins_hold_half_of_dram_at_most(toy):
    first = pin(toy)
    toy.save("b", prompt(8 * CHUNK + 1, seed=9))
    fetched = toy.cache.metrics.get("fetched_bytes")
    assert pin(toy, prompt(8 * CHUNK + 1, seed=9)) is None
    assert toy.cache.metrics.get("refused_pins") == 1
    assert toy.cache.metrics.get("fetched_bytes") == fetched, "read for nothing"
    second = pin(toy, prompt(4 * CHUNK + 1, seed=9))  # as much as there is
    assert pinned(toy) == 8
    first.release()
    assert pinned(toy) == 4
    second.release()
    toy.save("c", prompt(SLOTS * CHUNK, seed=10))  # nothing is held any more
    assert in_dram(toy, prompt(SLOTS * CHUNK, seed=10)) == SLOTS


@pytest.mark.inside("takes a bound away")
def test_without_the_bound_pins_would_take_all(toy, monkeypatch):
    monkeypatch.setattr(Pins, "fit", lambda *_: True)
    toy.save("b", prompt(12 * CHUNK + 1, seed=9))
    leases = [pin(toy), pin(toy, prompt(12 * CHUNK + 1, seed=9))]
    assert pinned(toy) == 16
    toy.save("c", prompt(CHUNK, seed=10))
    assert toy.cache.metrics.get("dropped_saves", reason="busy") == 1
    for lease in leases:
        lease.release()


def test_what_two_pin_counts_once_and_stays_for_the_second(toy):
    first, second = pin(toy), pin(toy)
    third = pin(toy)  # twelve in all, if they were counted each time
    assert (pinned(toy), toy.cache.metrics.get("refused_pins")) == (4, 0)
    first.release()
    third.release()
    crowd(toy)
    assert in_dram(toy) == 4
    second.release()
    assert pinned(toy) == 0


def test_pins_end_with_their_cache_and_others_do_not(toy):
    other = Toy(toy.cache.share(Namespace("other", GEOMETRY)))
    other.save("b", TOKENS)
    mine, its = pin(toy), pin(other)
    assert pinned(toy) == 8
    other.close()
    assert (mine.state, its.state) == (LeaseState.HELD, LeaseState.EXPIRED)
    assert pinned(toy) == 4
    its.release()  # a no-op
    mine.release()


def test_a_pin_that_comes_up_while_its_cache_closes_is_none(toy):
    """It is checked after the bytes came, since closing ends only what is there."""
    other = Toy(toy.cache.share(Namespace("other", GEOMETRY)))
    other.save("b", TOKENS)
    match = other.cache.match(TOKENS)
    other.cache._desk.unpin()  # it is closing now
    assert other.cache.pin(match, seconds=60, timeout=10).result(10) is None
    assert pinned(toy) == 0
    other.close()


def test_a_plan_can_be_made_of_a_pin(toy):
    lease = pin(toy)
    plan = toy.cache.plan_load(lease, range(4 * CHUNK // 16))
    pages = toy.cache.bind(toy.kv, toy.device)
    result = pages.execute(plan, after=()).result(20)
    toy.cache.settle(plan, result)
    assert (result.tokens, pinned(toy)) == (4 * CHUNK, 4)
    lease.release()
