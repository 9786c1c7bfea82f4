"""What an operator is told is so: flush, close, and what the cache does by itself now and then."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

import kvtier
from kvtier.catalog.sweep import Sweeper
from kvtier.config import TierConfig, load_store, store_types
from kvtier.errors import MisuseError
from kvtier.flow import Moves
from kvtier.testing.toy import CHUNK, NAMESPACE, Toy, dram, opened, prompt
from kvtier.tiers.store import Status

TOKENS = prompt(4 * CHUNK + 1)
WITHIN = 10.0


def save(toy: Toy, seeds: int = 1) -> None:
    """Save prompts without a flush."""
    for seed in range(seeds):
        toy.connector.save(f"{seed}", prompt(4 * CHUNK, seed=seed), range(4 * CHUNK // 16))
    while toy.connector._copying:
        toy.connector.poll()


def test_a_flush_waits_for_no_tier_that_fails_and_what_it_dropped_is_counted():
    kind = load_store(store_types()["memory"])
    store = kind.open("takes-nothing", 64 << 20, {k: o.default for k, o in kind.OPTIONS.items()})
    store.write_many = lambda writes: [Status.FAILED] * len(writes)
    tier = TierConfig("memory", "takes-nothing", 64 << 20, store=store)
    cache = kvtier.open(kvtier.Config(32 << 20, (tier,)), namespace=NAMESPACE)
    with contextlib.closing(Toy(cache)) as toy:
        save(toy)
        assert cache.flush(timeout=WITHIN)
        assert cache.metrics.get("dropped_spills", tier="memory", reason="failed") == 4


@pytest.mark.parametrize("seconds", [-1, float("nan"), "x", None])
def test_times_that_are_none_do_nothing(seconds):
    with contextlib.closing(opened(dram(8))) as toy:
        cache = toy.cache
        toy.save("a", TOKENS)
        for call in (cache.flush, cache.purge):
            with pytest.raises(MisuseError, match="no time to wait"):
                call(timeout=seconds)
        with pytest.raises(MisuseError, match="no time to wait"):
            cache.clear("dram", timeout=seconds)
        assert cache.match(TOKENS).tokens == 4 * CHUNK


def test_a_second_close_returns_when_the_first_has(monkeypatch):
    toy = opened(dram(8))
    cache = toy.cache
    depot = cache._desk.depot
    flush, seen = depot.flush, {}

    def meanwhile(timeout: float) -> bool:
        second = threading.Thread(target=cache.close)
        second.start()
        second.join(0.2)
        seen["waited"], seen["second"] = second.is_alive(), second
        with pytest.raises(MisuseError, match="this cache is closed"):
            cache.match(TOKENS)
        cache.close()  # as a signal's handler does: not for itself
        return flush(timeout)

    monkeypatch.setattr(depot, "flush", meanwhile)
    cache.close()
    assert seen["waited"]
    toy.close()
    seen["second"].join(WITHIN)
    assert not seen["second"].is_alive()


def test_saves_in_flight_at_the_end_are_no_errors(monkeypatch, caplog):
    toy = opened(dram(32))
    monkeypatch.setattr(toy.cache._desk.depot, "flush", lambda _: False)  # its time ran out
    save(toy, 64)
    toy.close()
    assert not caplog.records


def test_one_duty_that_fails_ends_no_other(monkeypatch, caplog):
    assert _expires(monkeypatch)
    assert sum("RuntimeError: defect" in line for line in caplog.messages) == 1


def test_twin_a_failed_duty_would_end_all_for_good(monkeypatch):
    async def reap(self: Moves) -> None:
        while True:
            await asyncio.sleep(0.02)
            await self.sweeper.expire()
            self._catalog.expire()

    monkeypatch.setattr(Moves, "reap", reap)
    assert not _expires(monkeypatch, within=0.5)


def _expires(monkeypatch, within: float = WITHIN) -> bool:
    """Say whether a lease ends by its deadline while another duty fails."""

    async def fail(_: Sweeper) -> None:
        raise RuntimeError("defect")

    monkeypatch.setattr(Sweeper, "expire", fail)
    with contextlib.closing(opened(dram(8))) as toy:
        cache = toy.cache
        toy.save("a", TOKENS)
        lease = cache.lease(cache.match(TOKENS), deadline=0.01)
        until = time.monotonic() + within
        while cache.figures()["kvtier_leased_parts"] and time.monotonic() < until:
            time.sleep(0.01)
        ended = not cache.figures()["kvtier_leased_parts"]
        lease.release()
        return ended


def test_what_a_step_computed_is_checked():
    with contextlib.closing(opened(dram(8))) as toy:
        for spans in (None, "x", 3, [(1,)], [None], [(0, 1, 2)], [(3, 1)], [(-1, 2)], ["ab"]):
            with pytest.raises(MisuseError):
                toy.cache.computed(spans, 0.1)


def test_the_connector_checks_what_it_is_given():
    toy = opened(dram(8))
    with pytest.raises(MisuseError, match="a connector's cache must be a Cache"):
        kvtier.connectors.reference.ReferenceConnector(None, toy.kv, toy.device)
    for name, tokens in ((["a"], [1]), (None, [1]), ("a", object()), ("a", None), ("a", [[1]])):
        with pytest.raises(MisuseError):
            toy.connector.match(name, tokens, 0)
        with pytest.raises(MisuseError):
            toy.connector.save(name, tokens, [1])
    toy.close()
