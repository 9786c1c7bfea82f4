"""Opening: from a Config to tiers, and from what durable tiers hold to the index.

What cannot be opened yet is opened, and indexed, as soon as it can be.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from kvtier.catalog.catalog import LOT, Catalog, Parts
from kvtier.catalog.strays import Strays
from kvtier.clock import Clock
from kvtier.codecs.door import load_codec
from kvtier.config import Config, TierConfig, load_store, store_types
from kvtier.errors import ConfigError, MisuseError, Unreachable, check_known, unknown
from kvtier.identity.record import PartName
from kvtier.metrics import Metrics
from kvtier.seams import Flow
from kvtier.tiers.budget import WriteBudget
from kvtier.tiers.coding import Coding
from kvtier.tiers.stock import Stock, StockedStore, stock_of
from kvtier.tiers.store import Capabilities, LateStore, Store
from kvtier.tiers.tier import Tier
from kvtier.tiers.unopened import AGAIN_SECONDS, UnopenedStore
from kvtier.units import format_bytes, format_least

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


def open_tiers(
    config: Config,
    flow: Flow,
    metrics: Metrics,
    clock: Clock,
    part_bytes: Sequence[int],
    *,
    again: bool = False,
) -> dict[int, Tier]:
    """Open the tiers below DRAM, numbered from 1. Blocks. On an error none stays open.

    part_bytes: of each part of one chunk, for which every tier must have room; or none yet.
    again: they were open before, by the same config. What cannot be opened then, and what does
    not answer at any time, is a tier all the same, with an UnopenedStore: see ``open_late``.
    """
    types = store_types()
    tiers: dict[int, Tier] = {}
    try:
        for number, setting in enumerate(config.tiers, 1):
            store = setting.store
            if store is None:
                store = _opened(setting, types, again=again)
            taken = {tier.name for tier in tiers.values()}
            name = setting.scheme if setting.scheme not in taken else f"{setting.scheme}{number}"
            admission = setting.admission or _usual_admission(store.capabilities)
            writes = WriteBudget(_write_budget(setting, store.capabilities), clock)
            tier = Tier(name, store, flow, metrics, clock, admission=admission, writes=writes)
            tiers[number] = tier
            codec = setting.codec or ("auto" if store.capabilities.shared else "raw")
            if codec != "raw":
                always = codec != "auto"
                tier.encode_by(Coding(name, load_codec(codec), clock, metrics, always=always))
            check_room(tier, setting.capacity, part_bytes)
    except BaseException:
        for tier in tiers.values():
            tier.close()
        raise
    return tiers


def _opened(setting: TierConfig, types: Mapping[str, EntryPoint], *, again: bool) -> Store:
    """Open the Store that a setting names. A setting made by hand was not checked before."""
    if setting.scheme not in types:
        raise unknown("tier", setting.scheme, types)
    kind = load_store(types[setting.scheme])
    secrets = getattr(kind, "CREDENTIALS", "")
    check_known(f"option of {setting.scheme}", setting.options, kind.OPTIONS, secrets)
    opens = functools.partial(kind.open, setting.location, setting.capacity, setting.options)
    try:
        return opens()
    except ConfigError as error:
        if not hasattr(kind, "PROMISES") or not (again or isinstance(error, Unreachable)):
            raise
        return UnopenedStore(cast("type[LateStore]", kind), opens, str(error))


def _usual_admission(capabilities: Capabilities) -> str:
    if capabilities.shared:
        return "second-touch"
    return "auto" if capabilities.durable else "through"


def _write_budget(setting: TierConfig, capabilities: Capabilities) -> float:
    """Return bytes a day: as was set, or one capacity for a durable tier of this host."""
    if setting.write_budget is not None:
        return setting.write_budget
    wears = capabilities.durable and not capabilities.shared
    return math.inf if setting.capacity is None or not wears else setting.capacity


def check_room(tier: Tier, capacity: int | None, part_bytes: Sequence[int]) -> None:
    """Refuse a tier that would never hold one chunk, and so never anything."""
    chunk = sum(map(tier.footprint, part_bytes))
    need = tier.store.capabilities.overhead + chunk
    if capacity is not None and capacity < need:
        raise ConfigError(
            f"{tier.name} capacity {format_bytes(capacity)} is below one chunk, which takes "
            f"{format_least(need)} there; give it at least that, better a hundred times as much"
        )
    if tier.writes.a_day < chunk:
        raise ConfigError(
            f"{tier.name} write_budget {format_bytes(int(tier.writes.a_day))} a day is below one "
            f"chunk, which takes {format_least(chunk)} there; give it more, or 'unlimited'"
        )


def index_tiers(
    catalog: Catalog, tiers: Mapping[int, Tier], sizes: Mapping[tuple[bytes, PartName], int]
) -> None:
    """Index what the tiers of this host hold, before anything is served. Blocks.

    Records of other namespaces count against the budget and may be evicted, and are never
    matched. A shared tier is not listed: it is asked, prompt by prompt.
    sizes: raw bytes of parts, by namespace and part, whatever a record says of itself.
    Raises ConfigError when a tier cannot be listed: what is not counted would exceed its budget.
    """
    for number, tier in tiers.items():
        if isinstance(tier.store, UnopenedStore):
            continue
        if (parts := listed(catalog, tier, tier.store, sizes)) is not None:
            catalog.stored_many(parts, number)


def listed(
    catalog: Catalog, tier: Tier, store: Store, sizes: Mapping[tuple[bytes, PartName], int]
) -> Parts | None:
    """Return what a tier of this host has in its Store, None of any other. Blocks.

    See ``index_tiers``.
    """
    if store.capabilities.shared or not store.capabilities.durable:
        return None
    try:
        stock = store.stock() if isinstance(store, StockedStore) else stock_of(store.scan())
        footprint = functools.partial(tier.footprint, store=store)
        return _parts(catalog, footprint, stock, sizes)
    except Exception as error:
        raise ConfigError(
            f"the records of tier {tier.name!r} cannot be listed "
            f"({type(error).__name__}: {error}); repair its medium, or open without it"
        ) from error


def _parts(
    catalog: Catalog,
    footprint: Callable[..., int],
    stock: Stock,
    sizes: Mapping[tuple[bytes, PartName], int],
) -> Parts:
    """Return what a tier has as the catalog takes it. Of few kinds there are many records."""
    owners = np.array([catalog.owner(namespace) for namespace, _ in stock.kinds], np.uint16)
    known = np.array([sizes.get(kind, -1) for kind in stock.kinds], np.int64)
    nbytes = np.where(known[stock.kind] < 0, stock.raw_bytes, known[stock.kind])
    encoded = stock.stored_bytes < stock.raw_bytes  # or a codec would not have been used
    lengths, which = np.unique(stock.stored_bytes * 2 + encoded, return_inverse=True)
    footprints = np.array(
        [footprint(length >> 1, encoded=bool(length & 1)) for length in lengths.tolist()],
        np.int64,
    )
    return Parts(
        stock.names,
        stock.parents,
        stock.depths,
        nbytes,
        owners[stock.kind],
        footprints[which],
    )


# ---- late, on the flow loop


async def open_late(number: int, tier: Tier, catalog: Catalog, strays: Strays) -> None:
    """Try to open a tier's Store until that works, index what it has, and then use it.

    strays: what was withdrawn since is among them, and not indexed.
    """
    unopened = tier.store
    if not isinstance(unopened, UnopenedStore):
        return
    while not await _opened_now(number, tier, unopened, catalog, strays):
        pass


async def _opened_now(
    number: int, tier: Tier, unopened: UnopenedStore, catalog: Catalog, strays: Strays
) -> bool:
    """Try once, after a while; say whether that was the last time."""
    look = functools.partial(listed, catalog, tier, sizes={})
    await asyncio.sleep(AGAIN_SECONDS)
    try:
        found = await tier.io(_tried, lambda: unopened.again(look))
        if isinstance(found, BaseException):
            tier.fails_to_open(str(found) or type(found).__name__)
            return False
        store, parts = found
        if parts is not None:
            await _take_in(parts, number, catalog, strays)
        tier.take(store)
    except MisuseError:  # the tier was closed
        return True
    except Exception as error:  # noqa: BLE001  (a defect must not leave it away for good)
        tier.fails_to_open(f"{type(error).__name__}: {error}")
        return False
    catalog.lists(number)
    return True


def _tried(call: Callable[[], T]) -> T | BaseException:
    """Return what a call returns, or raises: a plug-in may raise what a loop takes for its own."""
    try:
        return call()
    except BaseException as error:  # noqa: BLE001  (P2)
        return error


async def _take_in(parts: Parts, number: int, catalog: Catalog, strays: Strays) -> None:
    """Index parts in a catalog that is in use; those that were withdrawn are charged as strays."""
    withdrawn = catalog.watch()
    try:
        for count, at in enumerate(parts.heads_first(), 1):
            name, charged = parts.names[at], int(parts.charged[at])
            if name in strays:
                strays.charge(name, charged)
            else:
                catalog.stored(parts.part(at), number, charged, withdrawn)
            if not count % LOT:
                await asyncio.sleep(0)  # engine threads wait for the Catalog's lock
    finally:
        catalog.unwatch(withdrawn)
