"""Opening: from a Config to tiers, and from what durable tiers hold to the index."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.catalog.catalog import Catalog, Part
from kvtier.clock import Clock
from kvtier.config import Config, load_store, store_types
from kvtier.errors import ConfigError
from kvtier.identity.record import Part as PartName
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


def index_tiers(catalog: Catalog, tiers: Mapping[int, Tier], sizes: Mapping[PartName, int]) -> None:
    """Index what the tiers of this host hold, before anything is served. Blocks.

    Records of other namespaces count against the budget and may be evicted, and are never
    matched. A shared tier is not listed: it is asked, prompt by prompt.
    sizes: raw bytes of each of this namespace's parts, whatever a record says of itself.
    Raises ConfigError when a tier cannot be listed: what is not counted would exceed its budget.
    """
    for number, tier in tiers.items():
        capabilities = tier.store.capabilities
        if capabilities.shared or not capabilities.durable:
            continue
        try:
            for header in tier.store.scan():
                parent = record_id(header.parent, header.part) if header.depth else None
                nbytes = sizes.get(header.part, header.raw_bytes)
                part = Part(header.id, parent, header.depth, nbytes)
                catalog.stored(part, number, tier.footprint(header.stored_bytes))
        except Exception as error:
            raise ConfigError(
                f"the records of tier {tier.name!r} cannot be listed "
                f"({type(error).__name__}: {error}); repair its medium, or open without it"
            ) from error
