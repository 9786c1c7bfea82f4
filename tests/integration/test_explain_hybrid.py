"""Explain, of models of several kinds of layers: which component's part ends the match."""

from __future__ import annotations

import pytest

import kvtier
from kvtier.plans import ABSENT
from kvtier.testing.toy import prompt
from kvtier.transfer import CopyResult, CopyStatus

pytestmark = [pytest.mark.everywhere, pytest.mark.usefixtures("unhurried")]

BLOCK, CHUNK, CHUNKS = 4, 16, 6
FULL = kvtier.Component(2, 2, 8, name="full")
WINDOW = kvtier.Component(3, 2, 4, name="window", needs=kvtier.Needs.TRAILING, window=20)
STATE = kvtier.Component(1, 2, 10, planes=1, name="state", needs=kvtier.Needs.LAST)
TOKENS = prompt(CHUNKS * CHUNK + 1)


@pytest.fixture
def hybrid():
    """Open a cache, and save a prompt of six chunks, with a state after the sixth."""
    opened = []

    def make(*components: kvtier.Component, shards: int = 1) -> kvtier.Cache:
        geometry = kvtier.Geometry(components, "bfloat16", (BLOCK,), CHUNK)
        namespace = kvtier.Namespace("hybrid", geometry)
        cache = kvtier.open("dram:1MiB", namespace=namespace, shards=shards)
        opened.append(cache)
        blocks = list(range(CHUNKS * CHUNK // BLOCK))
        states = [ABSENT] * (CHUNKS - 1) + [0]
        tables = [states if one.needs is kvtier.Needs.LAST else blocks for one in components]
        plan = cache.plan_save(cache.prefix(TOKENS), tables)
        cache.settle(plan, CopyResult(CopyStatus.OK))
        cache.flush(timeout=5)
        return cache

    yield make
    for cache in opened:
        cache.close()


def lose(cache: kvtier.Cache, chunk: int, at: int) -> None:
    catalog = cache._desk.catalog
    catalog.lost(catalog._index.find(cache.prefix(TOKENS).names[chunk][at]), 0)


def test_all_is_there(hybrid):
    cache = hybrid(FULL, WINDOW, STATE)
    found = cache.explain(TOKENS)
    assert (found.usable, found.end.chunk) == (96, None)
    assert [part.name for part in found.chunks[0].parts] == ["full", "window", "state"]


@pytest.mark.inside("loses parts")
def test_a_window_that_left_matters_where_it_is_needed_only(hybrid):
    cache = hybrid(FULL, WINDOW)
    lose(cache, 1, 1)
    assert cache.explain(TOKENS).usable == 96
    lose(cache, 5, 1)
    found = cache.explain(TOKENS)
    assert found.usable == cache.match(TOKENS).tokens == 80
    assert (found.end.chunk, found.end.why) == (5, "window: dram had lost it, just now.")
    assert found.chunks[5].where() == "full: dram; window: -"


@pytest.mark.inside("loses parts")
def test_a_state_that_was_never_stored_ends_it(hybrid):
    cache = hybrid(FULL, STATE)
    lose(cache, 5, 1)
    found = cache.explain(TOKENS)
    assert found.usable == cache.match(TOKENS).tokens == 0
    assert (found.end.chunk, found.end.why) == (0, "state: never seen, or gone for long.")


@pytest.mark.inside("loses parts")
def test_a_shard_that_is_missing_is_named(hybrid):
    cache = hybrid(FULL, shards=2)
    lose(cache, 3, 1)
    found = cache.explain(TOKENS)
    assert found.usable == cache.match(TOKENS).tokens == 48
    assert (found.end.chunk, found.end.why) == (3, "full shard 1: dram had lost it, just now.")
    assert "orphan" in found.chunks[4].why()
