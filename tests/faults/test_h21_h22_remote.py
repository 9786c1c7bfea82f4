"""H21, H22: a remote store's errors are counted misses, and a look-up asks it a few times only."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest

import kvtier
from kvtier.asking import Asking
from kvtier.config import Config, TierConfig
from kvtier.testing.faults import FaultyStore, Rates
from kvtier.testing.hands import Hands
from kvtier.testing.inside import inside
from kvtier.testing.toy import CHUNK, prompt
from kvtier.transfer import CopyResult, CopyStatus

CHUNKS = 4
TOKENS = CHUNKS * CHUNK


@pytest.fixture
def remote(new_disk):
    """Return a store that other hosts see."""
    return new_disk(shared=True)


# -------------------------------------------------------------------------------------- H21


class Remote(FaultyStore):
    THREADS = 1


def put(toy, name, tokens):
    """Save a prompt, and use it once more, since shared tiers take what is used again."""
    toy.save(name, tokens[:TOKENS])
    toy.load(f"{name} again", tokens)
    assert toy.cache.flush(timeout=20)


@pytest.mark.parametrize("kind", Rates.__slots__)
def test_whatever_a_remote_answers_nothing_wrong_is_served(engines, remote, kind, caplog):
    """Every fault, always: no exception, no wrong byte, and what failed is not said to be there."""
    caplog.set_level(logging.CRITICAL, logger="kvtier")
    store, clock, tokens = Remote(remote, random.Random(1), Rates()), Hands(), prompt(TOKENS + 1)
    mine, other = engines(store, clock=clock), engines(store, clock=clock)
    store.rates = Rates(**{kind: 1.0})
    put(mine, "save", tokens)
    if kind in {"failed", "unavailable", "lost_write"}:
        assert list(remote.scan()) == []
    for toy in (mine, other):
        toy.cache.clear("dram")
        for turn in range(3):
            offered, _, exact = toy.load(f"load-{turn}", tokens)
            assert exact
            assert offered == (TOKENS if kind == "lost_ack" else 0), "there, though nobody was told"
            clock.now += 6.0  # what was missing is asked for again
    store.rates = Rates()
    clock.now += 6.0
    put(mine, "once more", tokens)
    mine.cache.clear("dram")
    other.cache.clear("dram")
    for toy in (mine, other):
        assert toy.load("healed", tokens)[::2] == (TOKENS, True)


def test_a_remote_that_answers_no_more_is_left_alone_and_comes_back(engines, remote, warnings_of):
    """Five failures in a row, then one try in five seconds; told once."""
    store, clock = Remote(remote, random.Random(1), Rates()), Hands()
    toy, tokens = engines(store, clock=clock), prompt(TOKENS + 1)
    put(toy, "save", tokens)
    toy.cache.clear("dram")
    store.rates = Rates(unavailable=1.0)
    for turn in range(20):
        assert toy.load(f"dead-{turn}", prompt(TOKENS + 1, 100 + turn))[0] == 0
    assert store.counts["unavailable"] == 5
    assert toy.cache.metrics.get("tier_errors", tier="disk") == 5
    assert len(warnings_of("injected")) == 1
    clock.now += 5.0
    assert toy.load("one try", prompt(TOKENS + 1, 200))[0] == 0
    assert store.counts["unavailable"] == 6
    store.rates = Rates()
    clock.now += 5.0
    assert toy.load("alive", tokens)[::2] == (TOKENS, True)


def asked_for_while_it_rests(engines, remote) -> tuple[int, str, int]:
    """Ask for what another host has stored, once while the remote is left alone, and once after.

    Returns what is offered then and now, and what explain says in between.
    """
    tokens = prompt(TOKENS + 1)
    put(engines(remote), "save", tokens)
    store, clock = Remote(remote, random.Random(1), Rates(unavailable=1.0)), Hands()
    toy = engines(store, clock=clock)
    for turn in range(5):
        assert toy.load(f"dead-{turn}", prompt(TOKENS + 1, 100 + turn))[0] == 0
    clock.now += 4.5
    resting = toy.load("resting", tokens)[0]
    said = toy.cache.explain(tokens).end.why
    store.rates = Rates()
    clock.now += 0.5
    return resting, said, toy.load("alive", tokens)[0]


def test_what_is_asked_for_while_a_remote_rests_is_found_as_soon_as_it_is_back(engines, remote):
    """It was not asked: no answer of it is remembered."""
    resting, said, alive = asked_for_while_it_rests(engines, remote)
    assert (resting, alive) == (0, TOKENS)
    assert said.startswith("never seen, or gone for long. disk does not answer (look up: ")


def test_asked_while_it_rests_it_would_be_missing_for_longer(engines, remote, monkeypatch):
    monkeypatch.setattr(Asking, "worth", lambda self, name: self._probe.due(name))
    assert asked_for_while_it_rests(engines, remote)[::2] == (0, 0)


def test_a_remote_that_hangs_is_a_miss_by_the_deadline(engines, remote):
    toy, tokens = engines(remote), prompt(TOKENS + 1)
    put(toy, "save", tokens)
    toy.cache.clear("dram")
    remote.gate.clear()
    for asked in (tokens, prompt(TOKENS + 1, 5)):  # to be read, and to be looked up
        fetch = toy.cache.fetch(toy.cache.match(asked), timeout=0.05, deadline=60)
        assert fetch.result(20) is None
        assert fetch.poll(), "by its own timeout, not by ours"
    remote.gate.set()
    toy.until(lambda update: not toy.cache.figures()["kvtier_leased_parts"])
    assert toy.load("alive", tokens)[::2] == (TOKENS, True)


# -------------------------------------------------------------------------------------- H22

BLOCK, MANY = 16, 512
TINY = kvtier.Namespace(
    "tiny", kvtier.Geometry((kvtier.Component(1, 1, 1),), "int8", (BLOCK,), BLOCK)
)


@pytest.fixture
def counted(remote):
    """Return what opens a cache on the remote, on which a prompt of 512 chunks is stored."""
    caches = []

    def opened():
        config = Config(8 << 20, (TierConfig("far", "", None, "through", store=remote),))
        caches.append(kvtier.Cache(config, TINY))
        return caches[-1]

    first = opened()
    tokens = np.arange(MANY * BLOCK + 1, dtype=np.int32)
    plan = first.plan_save(first.prefix(tokens), list(range(MANY)))
    first.settle(plan, CopyResult(CopyStatus.OK))
    assert first.flush(timeout=30)
    remote.calls.clear()
    yield opened
    remote.gate.set()
    for cache in caches:
        cache.close()


def test_a_long_prompt_is_looked_up_in_three_rounds(counted, remote):
    """And read, all of it, by a host that knew nothing of it."""
    cache, tokens = counted(), np.arange(MANY * BLOCK + 1, dtype=np.int32)
    match = cache.match(tokens)
    assert (match.tokens, match.unknown) == (0, True)
    with cache.fetch(match, timeout=30, deadline=60).result(40) as lease:
        assert lease.chunks == MANY
    asked = [count for verb, count in remote.calls if verb == "contains"]
    assert len(asked) <= 3
    assert max(asked) <= 16
    assert cache.match(tokens).tokens == MANY * BLOCK


@pytest.mark.parametrize("common", [0, 1, 2, 15, 16, 17, 255, 256, 257, 500, 511, 512])
def test_wherever_it_ends_the_answer_takes_three_rounds_and_is_never_too_long(
    counted, remote, common
):
    cache = counted()
    tokens = np.arange(MANY * BLOCK + 1, dtype=np.int32)
    tokens[common * BLOCK :] += 1_000_000
    lease = cache.fetch(cache.match(tokens), timeout=30, deadline=60).result(40)
    chunks = 0 if lease is None else lease.chunks
    assert common - 1 <= chunks <= common
    asked = [count for verb, count in remote.calls if verb == "contains"]
    assert len(asked) <= 3
    assert max(asked) <= 16
    if lease is not None:
        lease.release()
    if not common:
        assert not cache.match(tokens).unknown, "what was missing is remembered for a while"


def test_asking_a_thousand_times_sends_nothing_new(engines, remote):
    """While the remote is silent, an engine polls: pending each time, and one call under way."""
    first, tokens = engines(remote), prompt(TOKENS + 1)
    put(first, "save", tokens)
    toy = engines(remote)
    remote.calls.clear()
    remote.gate.clear()
    for _ in range(1000):
        assert toy.connector.match("r", tokens, 0).pending
    toy.cache._desk.depot.flow.spawn(nothing()).result(20)
    assert [verb for verb, _ in remote.calls] in ([], ["contains"])
    remote.gate.set()
    assert toy.load("r", tokens)[::2] == (TOKENS, True)
    verbs = [verb for verb, _ in remote.calls]
    assert verbs.count("contains") <= 3
    assert verbs.count("read") == 1


async def nothing() -> None:
    """Return when the loop has come round."""


def many_at_once(engines, remote, under_way: type[dict] = dict) -> list[tuple[str, int]]:
    """Ask for one prompt fifty times before the remote answers; return what that has asked it."""
    first, tokens = engines(remote), prompt(TOKENS + 1)
    put(first, "save", tokens)
    toy = engines(remote)
    inside(toy.cache).depot.moves.asking._under_way = under_way()
    remote.calls.clear()
    names = [f"r{n}" for n in range(50)]
    waiting = set(names)
    remote.gate.clear()
    for name in names:
        assert toy.connector.match(name, tokens, 0).pending
    toy.cache._desk.depot.flow.spawn(nothing()).result(20)
    remote.gate.set()
    while waiting:
        for name in sorted(waiting):
            offer = toy.connector.match(name, tokens, 0)
            if not offer.pending:
                assert offer.tokens == TOKENS
                waiting.remove(name)
        if waiting:
            toy.connector.wait(1)
    for name in names:
        toy.connector.finish(name)
    return remote.calls


def test_many_requests_for_one_prompt_look_it_up_and_read_it_once(engines, remote):
    calls = many_at_once(engines, remote)
    assert sum(count for verb, count in calls if verb == "read") == CHUNKS
    assert sum(verb == "contains" for verb, _ in calls) <= 3


def test_twin_without_a_memory_of_what_is_under_way_each_would_look_it_up(engines, remote):
    class Forgets(dict):
        def __setitem__(self, key, value) -> None:
            """Keep nothing."""

    calls = many_at_once(engines, remote, Forgets)
    assert sum(verb == "contains" for verb, _ in calls) > 10
