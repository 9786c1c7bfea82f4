"""What is of the wrong kind, or no number that can be meant, is said where it was passed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier.checks import check_ahead, check_seconds, check_wait, check_whole
from kvtier.errors import ConfigError, KvtierError, MisuseError
from kvtier.prefix import Namer
from kvtier.testing.toy import CHUNK, GEOMETRY, NAMESPACE, Toy, dram, opened, prompt
from kvtier.transfer import CopyResult, CopyStatus

TOKENS = prompt(4 * CHUNK + 1)
OTHER = prompt(4 * CHUNK + 1, seed=1)
BLOCKS = range(4 * CHUNK // 16)
OK = CopyResult(CopyStatus.OK)
NAN, HUGE = float("nan"), 10**400
WRONG: tuple[Any, ...] = (
    *(None, -1, 1.5, True, NAN, math.inf, HUGE, "x", b"x", [], {}, object(), ("a",), [None]),
    *(np.int64(3), np.zeros((2, 2))),
)


@pytest.fixture
def toy() -> Iterator[Toy]:
    """Return a cache that has a prompt."""
    one = opened(dram(32), "memory:x?capacity=1MiB")
    one.save("a", TOKENS)
    yield one
    one.close()


def ended(cache: kvtier.Cache, plan: Any) -> None:
    if plan is not None:
        cache.settle(plan, CopyResult(CopyStatus.FAILED))


def released(lease: Any) -> None:
    if lease is not None:
        lease.release()


def lease_of(cache: kvtier.Cache) -> Any:
    return cache.lease(cache.match(TOKENS), deadline=60)


def with_lease(cache: kvtier.Cache, call: Callable[[Any], object]) -> None:
    lease = lease_of(cache)
    try:
        call(lease)
    finally:
        lease.release()


CALLS: dict[str, Callable[[Toy, Any], object]] = {
    "prefix": lambda t, it: t.cache.prefix(it),
    "prefix of": lambda t, it: t.cache.prefix(TOKENS, it),
    "prefix after": lambda t, it: t.cache.prefix(TOKENS, None, it),
    "match": lambda t, it: t.cache.match(it),
    "match for": lambda t, it: t.cache.match(TOKENS, it),
    "explain": lambda t, it: t.cache.explain(it),
    "explain for": lambda t, it: t.cache.explain(TOKENS, request=it),
    "invalidate": lambda t, it: t.cache.invalidate(it),
    "invalidate for": lambda t, it: t.cache.invalidate(OTHER, request=it),
    "invalidate from": lambda t, it: t.cache.invalidate(OTHER, first=it),
    "invalidate within": lambda t, it: t.cache.invalidate(OTHER, timeout=it),
    "lease": lambda t, it: released(t.cache.lease(it, deadline=5)),
    "lease for": lambda t, it: released(t.cache.lease(t.cache.match(TOKENS), deadline=it)),
    "lease from": lambda t, it: released(
        t.cache.lease(t.cache.match(TOKENS), deadline=1, first=it)
    ),
    "renew": lambda t, it: with_lease(t.cache, lambda lease: lease.renew(it)),
    "fetch": lambda t, it: t.cache.fetch(it, timeout=1, deadline=5).abandon(),
    "fetch within": lambda t, it: t.cache.fetch(
        t.cache.match(TOKENS), timeout=it, deadline=5
    ).abandon(),
    "result": lambda t, it: t.cache.prefetch(
        t.cache.match(TOKENS), base=1, per_1024_tokens=0
    ).result(it),
    "pin": lambda t, it: t.cache.pin(it, seconds=1, timeout=1).abandon(),
    "pin for": lambda t, it: t.cache.pin(t.cache.match(TOKENS), seconds=it, timeout=1).abandon(),
    "prefetch": lambda t, it: t.cache.prefetch(it, base=1, per_1024_tokens=1),
    "prefetch base": lambda t, it: t.cache.prefetch(
        t.cache.match(TOKENS), base=it, per_1024_tokens=1
    ),
    "prefetch rate": lambda t, it: t.cache.prefetch(
        t.cache.match(TOKENS), base=1, per_1024_tokens=it
    ),
    "plan a load of": lambda t, it: ended(t.cache, t.cache.plan_load(it, BLOCKS)),
    "plan a load into": lambda t, it: with_lease(
        t.cache, lambda lease: ended(t.cache, t.cache.plan_load(lease, it))
    ),
    "plan a load into one of": lambda t, it: with_lease(
        t.cache, lambda lease: ended(t.cache, t.cache.plan_load(lease, [[it] * 16]))
    ),
    "plan a load at": lambda t, it: with_lease(
        t.cache, lambda lease: ended(t.cache, t.cache.plan_load(lease, BLOCKS, start=it))
    ),
    "plan a save of": lambda t, it: ended(t.cache, t.cache.plan_save(it, BLOCKS)),
    "plan a save out of": lambda t, it: ended(
        t.cache, t.cache.plan_save(t.cache.prefix(OTHER), it)
    ),
    "plan a save of block": lambda t, it: ended(
        t.cache, t.cache.plan_save(t.cache.prefix(OTHER), [it] * 16)
    ),
    "plan a save with": lambda t, it: ended(
        t.cache, t.cache.plan_save(t.cache.prefix(OTHER), BLOCKS, retention=it)
    ),
    "settle": lambda t, it: t.cache.settle(it, OK),
    "settle as": lambda t, it: with_lease(
        t.cache, lambda lease: t.cache.settle(t.cache.plan_load(lease, BLOCKS), it)
    ),
    "loaded": lambda t, it: t.cache.loaded(it, {"dram": 1}, 0),
    "loaded from": lambda t, it: t.cache.loaded(t.cache.match(TOKENS), it, 0),
    "loaded so many": lambda t, it: t.cache.loaded(t.cache.match(TOKENS), {"dram": it}, 0),
    "bind": lambda t, it: t.cache.bind(it, t.device),
    "bind on": lambda t, it: t.cache.bind(t.kv, it),
    "bind shard": lambda t, it: t.cache.bind(t.kv, t.device, shard=it),
    "bind stage": lambda t, it: t.cache.bind(t.kv, t.device, stage=it),
    "execute": lambda t, it: t.cache.bind(t.kv, t.device).execute(it, after=()),
    "clear": lambda t, it: t.cache.clear(it),
    "purge": lambda t, it: it is None or t.cache.purge(it),
    "purge to": lambda t, it: t.cache.purge(bytes(32), progress=it),
    "flush": lambda t, it: t.cache.flush(timeout=it),
    "bypass": lambda t, it: it is True or setattr(t.cache, "bypass", it),
    "share": lambda t, it: t.cache.share(it).close(),
    "share on": lambda t, it: t.cache.share(NAMESPACE, shards=it).close(),
    "share over": lambda t, it: t.cache.share(NAMESPACE, stages=it).close(),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_with_what_is_of_no_use_is_told_and_nothing_is_lost(toy, what):
    told = 0
    for wrong in WRONG:
        try:
            CALLS[what](toy, wrong)
        except KvtierError:
            told += 1
    assert told > len(WRONG) / 2
    assert toy.cache.flush(timeout=5)
    assert toy.cache.match(TOKENS).chunks == 4
    assert all(figure >= 0 for figure in toy.cache.figures().values())


SETTINGS: dict[str, Callable[[Any], object]] = {
    **{
        f"component {name}": lambda it, name=name: replace(GEOMETRY.components[0], **{name: it})
        for name in ("layers", "heads", "head_size", "planes", "window", "needs", "replicated")
    },
    **{
        f"geometry {name}": lambda it, name=name: replace(GEOMETRY, **{name: it})
        for name in ("components", "dtype", "block_tokens", "chunk_tokens")
    },
    "geometry of": lambda it: replace(GEOMETRY, components=(it,)),
    "geometry with blocks of": lambda it: replace(GEOMETRY, block_tokens=(it,)),
    **{
        f"namespace {name}": lambda it, name=name: replace(NAMESPACE, **{name: it})
        for name in ("model", "geometry", "revision", "quantisation", "kv_scales", "draft")
    },
    "namespace tenant": lambda it: replace(NAMESPACE, tenant=it),
    "request spans": lambda it: kvtier.Request(spans=it),
    "request span": lambda it: kvtier.Request(spans=(it,)),
    "span start": lambda it: kvtier.Span(it, 5, bytes(16)),
    "span stop": lambda it: kvtier.Span(0, it, bytes(16)),
    "quota floor": kvtier.Quota,
    "quota ceiling": lambda it: kvtier.Quota(0, it),
    "quotas": lambda it: kvtier.Config(1 << 20, quotas=it),
    "quotas of": lambda it: kvtier.Config(1 << 20, quotas={"a": it}),
    "tiers": lambda it: kvtier.Config(1 << 20, it),
    "tier": lambda it: kvtier.Config(1 << 20, (it,)),
    "tier scheme": lambda it: kvtier.TierConfig(it, "x", 1),
    "tier location": lambda it: kvtier.TierConfig("memory", it, 1),
    "tier admission": lambda it: kvtier.TierConfig("memory", "x", 1, it),
    "tier options": lambda it: kvtier.TierConfig("memory", "x", 1, None, it),
    "tier store": lambda it: kvtier.TierConfig("memory", "x", 1, store=it),
    "dram": kvtier.Config,
    "URLs": kvtier.Config.from_urls,
    "URL": lambda it: kvtier.Config.from_urls([it]),
    "TOML": kvtier.Config.from_toml,
    "open": lambda it: kvtier.open(it, namespace=NAMESPACE).close(),
    "open for": lambda it: kvtier.open(dram(4), namespace=it).close(),
    "open shards": lambda it: kvtier.open(dram(4), namespace=NAMESPACE, shards=it).close(),
    "open stages": lambda it: kvtier.open(dram(4), namespace=NAMESPACE, stages=it).close(),
    "retention start": lambda it: kvtier.Retention(it, 5),
    "retention stop": lambda it: kvtier.Retention(0, it),
    "retention priority": lambda it: kvtier.Retention(0, 5, it),
    "retention seconds": lambda it: kvtier.Retention(0, 5, seconds=it),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_a_setting_of_the_wrong_kind_is_refused_where_it_is_made(what):
    told = 0
    for wrong in WRONG:
        try:
            SETTINGS[what](wrong)
        except ConfigError:
            told += 1
    assert told > len(WRONG) / 2


def test_numbers_of_numpy_are_numbers_and_a_bool_is_none():
    check_whole("it", np.int64(3))
    check_seconds("it", -0.5)
    check_wait("it", np.float32(0))
    check_ahead("it", np.float64(0.1))
    for call in (check_whole, check_seconds, check_wait, check_ahead):
        with pytest.raises(MisuseError, match=r"it .*True"):
            call("it", True)
    with pytest.raises(MisuseError, match="from 1 to 3, not 4"):
        check_whole("it", 4, 1, 3)


@pytest.mark.parametrize(
    "forged", [{"tokens": 10**9}, {"tokens": -16}, {"tokens": NAN}, {"known": 99}, {"known": None}]
)
def test_a_match_that_no_prompt_has_is_refused(toy, forged):
    match = replace(toy.cache.match(TOKENS), **forged)
    for call in (
        lambda: toy.cache.lease(match, deadline=5),
        lambda: toy.cache.fetch(match, timeout=1, deadline=5),
        lambda: toy.cache.pin(match, timeout=1, seconds=5),
        lambda: toy.cache.prefetch(match, base=1, per_1024_tokens=1),
    ):
        with pytest.raises(MisuseError, match=r"a match's .* whole number"):
            call()


def test_copies_come_after_fences(toy):
    with_lease(
        toy.cache,
        lambda lease: ended(toy.cache, checked(toy, toy.cache.plan_load(lease, BLOCKS))),
    )


def test_a_model_with_states_cannot_share_one_block_table():
    geometry = replace(
        GEOMETRY,
        components=(
            *GEOMETRY.components,
            kvtier.Component(1, 2, 8, planes=1, name="state", needs=kvtier.Needs.LAST),
        ),
    )
    for model, says in ((geometry, "table each$"), (GEOMETRY, "table each, or share one$")):
        cache = kvtier.open(dram(32), namespace=kvtier.Namespace("model", model))
        with cache, pytest.raises(MisuseError, match=says):
            cache.plan_save(cache.prefix(TOKENS), [*BLOCKS, BLOCKS])


def test_a_connector_loads_nothing_for_a_request_that_it_does_not_know(toy):
    with pytest.raises(MisuseError, match="'stranger' was offered nothing to load"):
        toy.connector.load("stranger", list(BLOCKS))
    with pytest.raises(MisuseError, match="computed tokens must be a whole number from 0 on"):
        toy.connector.match("b", TOKENS, -16)
    assert toy.load("b", TOKENS)[2]


def checked(toy: Toy, plan: Any) -> Any:
    with pytest.raises(MisuseError, match="fences"):
        toy.cache.bind(toy.kv, toy.device).execute(plan, after=None)
    return plan


# ------------------------------------------------------------------- keys of others, as known ones


def known(toy: Toy) -> list[tuple[Any, str]]:
    other = toy.cache.share(kvtier.Namespace("other", GEOMETRY))
    with other:
        return [
            (other.prefix(TOKENS), "named by another cache"),
            (toy.cache.prefix(OTHER), "has other tokens"),
        ]


def test_a_prompt_is_not_named_by_what_is_known_of_another(toy):
    for prefix, says in known(toy):
        with pytest.raises(MisuseError, match=says):
            toy.cache.prefix(TOKENS, None, prefix)


def test_without_that_guard_the_keys_of_another_prompt_would_be_taken(toy, monkeypatch):
    monkeypatch.setattr(Namer, "_check_known", lambda *_: None)
    for prefix, _ in known(toy):
        assert toy.cache.prefix(TOKENS, None, prefix).keys == prefix.keys


def test_a_prefix_is_of_one_request_and_not_asked_for_as_anothers(toy):
    plain, adapted = toy.cache.prefix(TOKENS), kvtier.Request(adapter=bytes(32))
    assert toy.cache.match(plain, kvtier.Request()).chunks == 4
    with pytest.raises(MisuseError, match="named for another request"):
        toy.cache.match(plain, adapted)
