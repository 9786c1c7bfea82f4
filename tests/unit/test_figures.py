"""The gauges of the Catalog: each says what it is named after."""

from __future__ import annotations

from kvtier.catalog.index import DRAM
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SHAPE, SmallCatalog, chain
from kvtier.testing.small_catalog import names as names_of


def test_the_gauges_say_what_is_where():
    small = SmallCatalog(4)
    parts, other = chain(3), chain(1, seed=1)
    small.save(parts)
    small.catalog.stored(parts[2], LMDB, 100)
    small.catalog.lost(small.rows(parts)[1], DRAM)
    held = small.lease(parts[:1], 9.0)
    pinned = small.catalog.lease(names_of(parts[:1]), SHAPE, 0, 16, 9.0, whole=True, pin=1)
    (slot,) = small.reserve(other)
    small.catalog.figures()

    def gauge(name, **labels):
        return small.metrics.get(name, **labels)

    assert gauge("tier_used_bytes", tier="dram") == 3 * PART_BYTES
    assert gauge("tier_used_bytes", tier="lmdb") == 100
    assert gauge("tier_parts", tier="dram") == 2
    assert gauge("tier_parts", tier="lmdb") == 1
    assert gauge("tier_capacity_bytes", tier="dram") == 4 * PART_BYTES
    assert 'kvtier_tier_capacity_bytes{tier="lmdb"}' not in small.metrics.snapshot()
    assert gauge("leased_parts") == 2
    assert gauge("pinned_parts") == 1
    assert gauge("quarantined_slots") == 0
    assert gauge("orphan_parts") == 1
    assert small.catalog.issue(held, 0)
    held.release()
    pinned.release()
    small.catalog.abort(other[0].name, slot)
    small.catalog.figures()
    assert gauge("quarantined_slots") == 1
    assert gauge("pinned_parts") == 0
    small.catalog.settle(held)
    small.close()


def test_no_gauge_is_set_to_what_is_not_so_in_between(monkeypatch):
    """Whoever reads at that moment would see an empty tier."""
    small = SmallCatalog(4)
    small.save(chain(3))
    said = []
    monkeypatch.setattr(
        small.metrics, "set", lambda name, value, **labels: said.append((name, *labels.values()))
    )
    small.catalog.figures()
    assert len(said) == len(set(said))
    small.close()
