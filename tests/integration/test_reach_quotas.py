"""Tenants of one cache, end to end: shares of DRAM and of a disk that spilling keeps to."""

from __future__ import annotations

from dataclasses import replace

import pytest

import kvtier
from kvtier import Config, Namespace, Quota
from kvtier.catalog.catalog import Catalog
from kvtier.testing.toy import CHUNK, CHUNK_BYTES, GEOMETRY, Toy, prompt

pytestmark = pytest.mark.everywhere

RECORD = CHUNK_BYTES + 256  # in the memory store: the payload and its header


def tenants(folder: str | None, *names: str, **quotas: Quota) -> list[Toy]:
    """Open one cache for several tenants; each gets a toy engine."""
    urls = ["dram:1MiB", folder or f"memory:shared?capacity={10 * RECORD}B"]
    config = replace(Config.from_urls(urls), dram=20 * CHUNK_BYTES, quotas=quotas)
    first = kvtier.open(config, namespace=Namespace("tiny", GEOMETRY, tenant=names[0]))
    others = [first.share(Namespace("tiny", GEOMETRY, tenant=name)) for name in names[1:]]
    return [Toy(cache) for cache in (first, *others)]


def close(toys: list[Toy]) -> None:
    for toy in toys:
        toy.close()


def tokens(chunks: int, seed: int):
    return prompt(chunks * CHUNK + 1, seed)


def used(toy: Toy, tenant: str, tier: str) -> float:
    toy.cache.figures()
    return toy.cache.metrics.get("tenant_used_bytes", tenant=tenant, tier=tier)


@pytest.mark.inside("reads footprints")
def test_spilling_keeps_to_a_ceiling_and_to_another_tenants_floor():
    acme, beta = toys = tenants(None, "acme", "beta", acme=Quota(0.3, 0.5), beta=Quota(0.3, 0.8))
    tier = next(iter(acme.cache._desk.depot.tiers.values()))
    record = tier.footprint(CHUNK_BYTES)
    most = acme.cache._desk.catalog.capacity(1) // record
    acme.save("a", tokens(6, 1))
    assert used(acme, "acme", "memory") <= 0.5 * most * record
    for seed in range(2, 6):
        beta.save(f"b{seed}", tokens(6, seed))
        assert used(acme, "acme", "memory") >= 0.3 * most * record
        assert used(acme, "beta", "memory") <= 0.8 * most * record
    acme.cache.clear("dram")
    assert acme.load("again", tokens(6, 1))[2]
    assert acme.cache.match(tokens(6, 1)).chunks >= 3
    close(toys)


@pytest.mark.inside("takes a bound away")
def test_what_does_not_fit_under_a_ceiling_is_dropped_and_counted(monkeypatch):
    """A prompt longer than its tenant's share of the tier is kept up to there."""
    (acme,) = tenants(None, "acme", acme=Quota(ceiling=0.5))
    acme.save("a", tokens(9, 1))
    assert acme.cache.metrics.get("dropped_spills", tier="memory", reason="quota") > 0
    acme.cache.clear("dram")
    kept = acme.cache.match(tokens(9, 1)).chunks
    assert 3 <= kept <= 5
    acme.close()
    monkeypatch.setattr(
        Catalog, "over_ceilings", lambda _self, _tier, parts: [False for _ in parts]
    )
    (acme,) = tenants(None, "acme", acme=Quota(ceiling=0.5))
    acme.save("a", tokens(9, 1))
    capacity = acme.cache._desk.catalog.capacity(1)
    assert used(acme, "acme", "memory") > 0.5 * capacity
    acme.close()


def test_records_found_at_reopening_count_for_nobody_until_their_namespace_joins(folder):
    acme, beta = tenants(folder, "acme", "beta")
    acme.save("a", tokens(4, 1))
    close([acme, beta])
    beta, _ = toys = tenants(folder, "beta", "gamma", acme=Quota(0.2, 0.5))
    assert used(beta, "acme", "lmdb") == 0
    late = beta.cache.share(Namespace("tiny", GEOMETRY, tenant="acme"))
    assert used(beta, "acme", "lmdb") > 0
    assert late.match(tokens(4, 1)).chunks == 4
    late.close()
    close(toys)


@pytest.mark.parametrize("quotas", [{"acme": Quota(0.4)}, {}])
def test_a_busy_neighbour_does_not_push_a_floor_out_of_dram(quotas):
    acme, beta = toys = tenants(None, "acme", "beta", **quotas)
    acme.save("a", tokens(4, 1))
    for seed in range(2, 9):
        beta.save(f"b{seed}", tokens(6, seed))
    match = acme.cache.match(tokens(4, 1))
    assert (match.tiers.count("dram") == 4) == bool(quotas)
    close(toys)
