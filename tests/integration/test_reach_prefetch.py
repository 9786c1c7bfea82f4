"""Prefetch: up into DRAM in a time that grows with the tokens, and in nobody's way."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtier import Config
from kvtier import open as open_cache
from kvtier.catalog.below import Below
from kvtier.config import TierConfig
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.toy import CHUNK, CHUNK_BYTES, NAMESPACE, Toy, prompt

SLOTS = 16
TOKENS = prompt(12 * CHUNK + 1)


class Gate(MemoryStore):
    """A store whose reads wait until they are let through."""

    THREADS = 2

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()

    def read_many(self, ids, into):
        self.open.wait(20)
        return super().read_many(ids, into)


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def toy(gate):
    """Room for sixteen chunks; two prompts of twelve and six lie below, behind a gate."""
    below = TierConfig("memory", "", None, store=gate)
    one = Toy(open_cache(Config(SLOTS * CHUNK_BYTES, (below,)), namespace=NAMESPACE))
    one.save("a", TOKENS)
    one.save("b", prompt(6 * CHUNK + 1, seed=1))
    one.cache.clear("dram")
    yield one
    gate.open.set()
    one.close()


def prefetch(toy, tokens=TOKENS, base=10.0, per_1024_tokens=1.0):
    return toy.cache.prefetch(toy.cache.match(tokens), base=base, per_1024_tokens=per_1024_tokens)


def test_what_lies_below_is_in_dram_then_and_nothing_is_held(toy):
    """It is more than a quarter of DRAM, so it comes by and by."""
    assert prefetch(toy).result(20) == 12 * CHUNK
    assert toy.cache.match(TOKENS).tiers == ("dram",) * 12
    toy.cache.figures()
    assert toy.cache.metrics.get("leased_parts") == 0
    assert toy.cache._desk.catalog._ahead_bytes == 0
    assert prefetch(toy).result(20) == 12 * CHUNK  # all is there
    assert toy.cache.metrics.get("fetched_bytes") == 12 * CHUNK_BYTES


def test_its_time_grows_with_the_tokens(toy, monkeypatch):
    seen = []

    async def noted(_prefix, _found, *, ask, within):
        seen.append(within)
        return 0

    monkeypatch.setattr(toy.cache._desk.moves, "prefetch", noted)
    for tokens in (TOKENS, prompt(6 * CHUNK + 1, seed=1)):
        prefetch(toy, tokens, base=0.5, per_1024_tokens=4.0).result(20)
    assert seen == [0.5 + 4.0 * 12 * CHUNK / 1024, 0.5 + 4.0 * 6 * CHUNK / 1024]


def test_when_its_time_is_over_it_says_how_much_there_is(toy, gate):
    gate.open.clear()
    assert prefetch(toy, base=0.01, per_1024_tokens=0).result(20) == 0
    gate.open.set()
    while toy.cache._desk.catalog._fetching_bytes:
        settle(toy)
    assert prefetch(toy).result(20) == 12 * CHUNK


def test_prefetches_fill_a_quarter_of_dram_and_fetches_are_not_refused_for_it(toy, gate):
    gate.open.clear()
    running = [prefetch(toy), prefetch(toy, prompt(6 * CHUNK + 1, seed=1))]
    settle(toy)
    assert toy.cache._desk.catalog._ahead_bytes == SLOTS // 4 * CHUNK_BYTES
    assert toy.cache.metrics.get("refused_prefetches") == 1
    match = toy.cache.match(prompt(6 * CHUNK + 1, seed=1))
    demand = toy.cache.fetch(match, timeout=20, deadline=60)
    settle(toy)
    gate.open.set()
    assert demand.result(20).tokens == 6 * CHUNK
    assert toy.cache.metrics.get("refused_fetches") == 0
    assert running[0].result(20) is not None
    assert running[1].result(20) is not None


def test_while_fetches_fill_a_quarter_no_prefetch_begins(toy, gate):
    gate.open.clear()
    match = toy.cache.match(prompt(6 * CHUNK + 1, seed=1))
    demand = toy.cache.fetch(match, timeout=20, deadline=60)
    settle(toy)
    assert prefetch(toy, base=0.01).result(20) == 0
    assert toy.cache._desk.catalog._ahead_bytes == 0
    assert toy.cache.metrics.get("refused_prefetches") == 1
    gate.open.set()
    assert demand.result(20).tokens == 6 * CHUNK


def test_without_the_bound_prefetches_would_take_dram_from_fetches(toy, gate, monkeypatch):
    monkeypatch.setattr(Below, "_busy", lambda _self, *, ahead: False)
    gate.open.clear()
    running = prefetch(toy)
    settle(toy)
    match = toy.cache.match(prompt(6 * CHUNK + 1, seed=1))
    demand = toy.cache.fetch(match, timeout=20, deadline=60)
    settle(toy)
    gate.open.set()
    assert demand.result(20).tokens == 4 * CHUNK  # there is no room for more
    assert running.result(20) is not None


def test_a_prefetch_is_no_second_touch(toy):
    """What is brought up on a guess was not used, and is not offered to slower tiers for it."""
    offered = []
    toy.cache._desk.moves.used = offered.append
    prefetch(toy).result(20)
    assert offered == []
    match = toy.cache.match(TOKENS)
    toy.cache.fetch(match, timeout=20, deadline=60).result(20).release()
    assert len(offered) == 1


def test_a_prompt_may_be_given_as_its_tokens_or_prefix(toy):
    for prompt_ in (TOKENS, toy.cache.prefix(TOKENS)):
        running = toy.cache.prefetch(prompt_, base=10, per_1024_tokens=1)
        assert running.result(20) == 12 * CHUNK


def test_awaiting_one_is_possible(toy):
    async def wait() -> int | None:
        return await prefetch(toy)

    assert toy.cache._desk.depot.flow.spawn(wait()).result(20) == 12 * CHUNK


def test_a_bypassed_namespace_prefetches_and_pins_nothing(toy):
    match = toy.cache.match(TOKENS)
    toy.cache.bypass = True
    running = toy.cache.prefetch(match, base=10, per_1024_tokens=0)
    assert running.result(20) == 0
    assert toy.cache.pin(match, seconds=10, timeout=10).result(20) is None
    assert toy.cache.metrics.get("fetched_bytes") == 0


def settle(toy) -> None:
    """Return when the flow loop has done what was ready."""

    async def turn() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    toy.cache._desk.depot.flow.spawn(turn()).result(20)
