"""Late: a tier whose Store could not be opened is opened as soon as it can be. On the flow loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import TypeVar

from kvtier.catalog.catalog import LOT, Catalog, Parts
from kvtier.catalog.strays import Strays
from kvtier.errors import MisuseError
from kvtier.opening import listed
from kvtier.tiers.tier import Tier
from kvtier.tiers.unopened import AGAIN_SECONDS, UnopenedStore

T = TypeVar("T")


async def open_late(number: int, tier: Tier, catalog: Catalog, strays: Strays) -> None:
    """Try to open a tier's Store until that works, index what it has, and then use it.

    strays: what was withdrawn since is among them, and not indexed.
    """
    unopened = tier.store
    if not isinstance(unopened, UnopenedStore):
        return
    while not await _opened(number, tier, unopened, catalog, strays):
        pass


async def _opened(
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
