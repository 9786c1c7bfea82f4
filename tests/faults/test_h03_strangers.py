"""H03: what one cache hands out means nothing to another, and is refused there."""

from __future__ import annotations

import dataclasses

import pytest

import kvtier
from kvtier.errors import MisuseError
from kvtier.testing.toy import BLOCK, CHUNK, NAMESPACE, dram, prompt
from kvtier.transfer import CopyResult, CopyStatus

TOKENS = 4 * CHUNK
BLOCKS = list(range(TOKENS // BLOCK))
LARGER = kvtier.Geometry(
    (kvtier.Component(layers=1, heads=1, head_size=8),), block_tokens=(BLOCK,), chunk_tokens=32
)
OTHERS = {
    "tenant": dataclasses.replace(NAMESPACE, tenant="b"),
    "same": NAMESPACE,
    "geometry": kvtier.Namespace("other", LARGER),
}


def refused(call) -> bool:
    try:
        call()
    except MisuseError:
        return True
    return False


@pytest.fixture(params=["shared", "apart"])
def other_of(request, engines):
    """Return what opens another cache, on the memory of the first or on its own."""
    opened = []

    def open_other(toy, namespace):
        shared = request.param == "shared"
        opened.append(
            toy.cache.share(namespace) if shared else kvtier.open(dram(8), namespace=namespace)
        )
        return opened[-1]

    yield open_other
    for cache in opened:
        cache.close()


@pytest.mark.parametrize("name", OTHERS)
def test_prefixes_leases_and_plans_of_another_cache_are_misuse(engines, other_of, name):
    """But a lease of the same namespace in the same memory, which holds what it should."""
    toy, tokens = engines(), prompt(TOKENS + 1)
    toy.save("one", tokens[:TOKENS])
    other = other_of(toy, OTHERS[name])
    match = toy.cache.match(tokens)
    lease = toy.cache.lease(match, deadline=60)
    plan = toy.cache.plan_load(lease, BLOCKS)
    calls = {
        "match": lambda: other.match(match.prefix),
        "lease": lambda: other.lease(match, deadline=1),
        "fetch": lambda: other.fetch(match, timeout=1, deadline=1),
        "plan_load": lambda: other.plan_load(lease, BLOCKS),
        "plan_save": lambda: other.plan_save(match.prefix, BLOCKS),
        "explain": lambda: other.explain(match.prefix),
        "invalidate": lambda: other.invalidate(match.prefix),
        "settle": lambda: other.settle(plan, CopyResult(CopyStatus.OK)),
    }
    right = name == "same" and other._desk.depot is toy.cache._desk.depot
    if right:
        del calls["plan_load"]
    assert [which for which, call in calls.items() if not refused(call)] == []
    assert lease.held
    toy.cache.settle(plan, CopyResult(CopyStatus.OK))
    lease.release()
    assert toy.load("two", tokens)[::2] == (TOKENS, True), "and the first one has lost nothing"
