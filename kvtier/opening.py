"""Opening: from a Config to tiers, and from what durable tiers hold to the index."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.catalog.catalog import Catalog, Part
from kvtier.clock import Clock
from kvtier.config import Config, load_store, store_types
from kvtier.identity.record import record_id
from kvtier.metrics import Metrics
from kvtier.seams import Flow
from kvtier.tiers.tier import Tier

__all__ = ["index_tiers", "open_tiers"]


def open_tiers(config: Config, flow: Flow, metrics: Metrics, clock: Clock) -> dict[int, Tier]:
    """Open the tiers below DRAM, numbered from 1. Blocks. On an error none stays open."""
    types = store_types()
    tiers: dict[int, Tier] = {}
    try:
        for number, setting in enumerate(config.tiers, 1):
            store = setting.store
            if store is None:
                store_type = load_store(types[setting.scheme])
                store = store_type.open(setting.location, setting.capacity, setting.options)
            taken = {tier.name for tier in tiers.values()}
            name = setting.scheme if setting.scheme not in taken else f"{setting.scheme}{number}"
            usual = "second-touch" if store.capabilities.shared else "through"
            admission = setting.admission or usual
            tiers[number] = Tier(name, store, flow, metrics, clock, admission=admission)
    except BaseException:
        for tier in tiers.values():
            tier.close()
        raise
    return tiers


def index_tiers(catalog: Catalog, tiers: Mapping[int, Tier]) -> None:
    """Index what the tiers of this host hold, before anything is served. Blocks.

    Records of other namespaces count against the budget and may be evicted, and are never
    matched. A shared tier is not listed: it is asked, prompt by prompt.
    """
    for number, tier in tiers.items():
        capabilities = tier.store.capabilities
        if capabilities.shared or not capabilities.durable:
            continue
        for header in tier.store.scan():
            parent = record_id(header.parent, header.part) if header.depth else None
            part = Part(header.id, parent, header.depth, header.raw_bytes)
            catalog.stored(part, number, tier.store.footprint(header.stored_bytes))
