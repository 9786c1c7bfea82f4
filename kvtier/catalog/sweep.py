"""Sweep: delete from the Stores what was withdrawn, and all of a namespace. On the flow loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from kvtier.catalog.below import LOT
from kvtier.catalog.catalog import Catalog
from kvtier.catalog.index import DRAM, NO_ROW
from kvtier.catalog.strays import Strays
from kvtier.clock import Clock
from kvtier.identity.record import RecordId
from kvtier.tiers.tier import Tier
from kvtier.tiers.unopened import UnopenedStore

_RETRY_SECONDS: Final = 5.0
_COUNTED: Final = 4096


class Removed(NamedTuple):
    """What came of a removal.

    parts: that were in a tier, or on their way into one, and are matched no more; of a shared
    tier those that it listed. unconfirmed: deletions that no Store has confirmed yet; they are
    tried again for as long as the cache is open, and after that such a record may come back; so
    may those that Strays gives up.
    unlisted: tiers that could not be listed to their end.
    """

    parts: int
    unconfirmed: int
    unlisted: tuple[str, ...] = ()


class Sweeper:
    """For all tiers and all namespaces of one Depot."""

    def __init__(
        self,
        catalog: Catalog,
        tiers: Mapping[int, Tier],
        strays: Mapping[int, Strays],
        clock: Clock,
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._strays = strays
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._idling: dict[int, asyncio.Task[None]] = {}
        self._again = 0.0

    async def sweep(self) -> None:
        """Try once to delete all that was withdrawn. A tier that hangs keeps no other from it."""
        await asyncio.gather(*(self._sweep(strays) for strays in self._strays.values()))

    async def _sweep(self, strays: Strays) -> None:
        if len(strays):
            async with strays.changing:
                await strays.delete({})

    async def sweep_for(self, names: Sequence[RecordId]) -> int:
        """Do so; return of how many records with these names the deletion is not confirmed."""
        await self.sweep()
        return await self._unconfirmed(names)

    async def _unconfirmed(self, names: Sequence[RecordId]) -> int:
        count = 0
        for start in range(0, len(names), _COUNTED):
            if start:
                await asyncio.sleep(0)  # the loop's other callbacks have their turn
            some = names[start : start + _COUNTED]
            count += sum(strays.count(some) for strays in self._strays.values())
        return count

    async def expire(self) -> None:
        """Withdraw what is due. What has to be deleted is, by a task of its own, now and then."""
        count, more = self._catalog.withdraw_due()
        while more:
            await asyncio.sleep(0)  # engine threads wait for the Catalog's lock
            lot, more = self._catalog.withdraw_due()
            count += lot
        if self._task is not None and not self._task.done():
            return
        if count or (self._clock() >= self._again and any(map(len, self._strays.values()))):
            self._again = self._clock() + _RETRY_SECONDS
            self._task = asyncio.create_task(self.sweep(), name="sweep")

    def expire_idle(self) -> None:
        """Let what was not used for a tier's time leave: a task for each tier, which may hang."""
        for number in (DRAM, *self._strays):
            task = self._idling.get(number)
            if (task is None or task.done()) and self._catalog.any_idle(number):
                self._idling[number] = asyncio.create_task(self._drop_idle(number), name="idle")

    async def _drop_idle(self, number: int) -> None:
        victims: dict[RecordId, int] = {}
        strays = self._strays.get(number)
        async with contextlib.nullcontext() if strays is None else strays.changing:
            while lot := self._catalog.take_idle(number):
                victims |= {victim.name: victim.charged for victim in lot}
                await asyncio.sleep(0)  # engine threads wait for the Catalog's lock
            if strays is not None:
                await strays.delete(victims)

    # ---- a namespace

    async def purge(self, digest: bytes, tell: Callable[[int], None]) -> Removed:
        """Take all parts of a namespace out of all tiers. tell: how many, now and then."""
        names: list[RecordId] = []
        unlisted = [t.name for t in self._tiers.values() if isinstance(t.store, UnopenedStore)]
        row = 0
        while row != NO_ROW:
            lot, row = self._catalog.withdraw_namespace(digest, row)
            names += lot
            if lot:
                tell(len(names))
            for strays in self._strays.values():
                strays.collect()  # lot by lot: all of a namespace would keep the loop
            await asyncio.sleep(0)  # engine threads wait for the Catalog's lock
        await self.sweep()
        for number, tier in self._tiers.items():
            if tier.name in unlisted or not tier.store.capabilities.shared:
                continue
            if not await self._purge_listed(number, digest, names, tell):
                unlisted.append(tier.name)
        return Removed(len(names), await self._unconfirmed(names), tuple(unlisted))

    async def _purge_listed(
        self, number: int, digest: bytes, names: list[RecordId], tell: Callable[[int], None]
    ) -> bool:
        """Withdraw what a shared tier lists of a namespace; False when it cannot be listed."""
        strays = self._strays[number]
        async for headers in self._tiers[number].listed(LOT):
            if headers is None:
                return False
            lot = [header.id for header in headers if header.namespace == digest]
            if lot:
                self._catalog.withdraw(lot, "purged")
                names += lot
                await self._sweep(strays)
                tell(len(names))
        return True
