"""How a simulated world ends: faults off, everything at rest, read back, emptied, closed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.cache import Cache
from kvtier.identity.record import RecordId
from kvtier.testing.faults import FaultyStore, Rates
from kvtier.testing.inside import inside
from kvtier.testing.simclient import FOREVER
from kvtier.testing.simcrash import torn_in
from kvtier.testing.simtask import SimError
from kvtier.tiers.pack import order_of
from kvtier.tiers.tier import Tier

if TYPE_CHECKING:
    from kvtier.testing.simworld import World

_OTHER_PARTS: Final = 20  # a shorter prefix may need windows and states that nobody read before
_SETTLED_SECONDS: Final = 8.0  # longer than any lease


class Ending:
    """The end of one world, and what is checked there."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._loop = world.loop
        self._cache = world.cache
        self._oracle = world.oracle
        self._scenario = world.scenario
        self._stores = world.stores
        torn = any(torn_in(store.inner) for store in world.stores)
        self._faultless = world.scenario.faultless and not torn

    async def wind_down(self) -> None:
        """Let everything come to rest, and check what is left; then close the cache."""
        await self._world.idle()
        for store in self._stores:
            store.rates = Rates()
        self._loop.calm()
        if not self._cache.flush(timeout=FOREVER):
            raise SimError("flush did not end")
        while self._loop.calls_out:  # noqa: ASYNC110  (calls that hang end by themselves)
            await asyncio.sleep(_SETTLED_SECONDS)
        await asyncio.sleep(_SETTLED_SECONDS)
        self._oracle.check_rest()
        self._check_figures()
        self._check_stores()
        self._world.after("rest")
        if len(self._stores) > 1:
            await self._read_with_one_down(self._world.prompts[0])
        for engine in self._world.engines:
            for number, tokens in enumerate(self._world.prompts):
                await self._read_back(engine.cache, number, tokens)
        self._empty()
        for engine in self._world.engines:
            engine.cache.close()

    async def _read_back(self, cache: Cache, number: int, tokens: NDArray[np.int32]) -> None:
        """With all faults gone, what is matched arrives, or turns out to be lost below, once."""
        came, full, matched = await self._read_all(cache, tokens)
        self._loop.note("read", f"{number} {matched} {came}")
        if came < full and self._faultless:
            raise SimError("not all of the chunks that were matched came")
        for _ in range(1 if self._world.model.plain else _OTHER_PARTS):
            if came < full:
                came, full, _ = await self._read_all(cache, tokens)
        if came < full:
            raise SimError("a part that was lost is matched, and fails a second time")

    async def _read_with_one_down(self, tokens: NDArray[np.int32]) -> None:
        """What two tiers have arrives although the first of them does not answer."""
        self._cache.clear("dram", timeout=FOREVER)
        self._stores[0].rates = Rates(unavailable=1.0)
        await self._read_all(self._cache, tokens)
        self._stores[0].rates = Rates()
        await asyncio.sleep(_SETTLED_SECONDS)  # longer than a breaker rests

    async def _read_all(self, cache: Cache, tokens: NDArray[np.int32]) -> tuple[int, int, int]:
        """Fetch all that is matched; return the tokens that came, should have, and were matched.

        More than DRAM has room for need not come.
        """
        match = cache.match(tokens)
        self._oracle.expect_match(match)
        slots, copies = self._scenario.dram_slots, self._oracle.copies(self._kept_names())
        full = self._oracle.readable(match, slots, bool)
        sure = self._oracle.readable(match, slots, copies)
        if match.unknown and not self._world.model.plain:  # it may become longer, and need others
            full = sure = 0
        lease = await cache.fetch(match, timeout=FOREVER, deadline=FOREVER)
        came = lease.tokens if lease else 0
        if came < sure:
            raise SimError(f"{came} tokens came, although another copy of {sure} could be read")
        if lease is not None:
            self._oracle.expect_leased(lease)
            lease.release()
        self._cache.flush(timeout=FOREVER)
        await asyncio.sleep(1.0)
        self._oracle.check_rest()
        return came, full, match.tokens

    def _empty(self) -> None:
        """Clear every tier until nothing is left; what is only below leaves after what is above."""
        names = list(inside(self._cache).depot.numbers)
        for _ in range(len(self._world.prompts) * 8):
            for name in names:
                self._cache.clear(name, timeout=FOREVER)
            if not len(self._oracle._index):
                break
        self._oracle.check_empty()
        if any(store.kept_bytes() for _, store in self._local_stores()):
            raise SimError("a store has records after it was cleared")

    def _check_figures(self) -> None:
        figures = self._cache.figures()
        bad = [name for name, value in figures.items() if value < 0]
        if bad:
            raise SimError(f"negative figures: {', '.join(bad)}")
        metrics = self._cache.metrics
        ended = sum(metrics.get("dropped_saves", reason=why) for why in ("copy", "orphan"))
        ended += metrics.get("saved_chunks")
        if ended != self._world.saved_chunks:
            raise SimError(f"{self._world.saved_chunks} chunks were to be saved, {ended:.0f} were")
        self._loop.note("figures", repr(sorted(figures.items())))

    def _check_stores(self) -> None:
        """What a Store has is indexed or known to be astray; it never was over its budget."""
        lossless = not self._scenario.rates.lost_write
        for number, store in self._local_stores():
            kept = {header.id for header in store.scan()}
            self._loop.note("store", repr((number, sorted(kept), sorted(store.counts.items()))))
            indexed = set(self._oracle.indexed(number))
            capacity = self._oracle.capacity(number)
            if capacity is not None and store.peak_bytes > capacity:
                raise SimError(f"store {number} had {store.peak_bytes} bytes of {capacity}")
            if not kept - indexed <= self._oracle.strays(number):
                raise SimError(f"store {number} has records that nobody knows of")
            if lossless and indexed - kept:
                raise SimError(f"store {number} lacks records that the index names")
            if self._faultless and store.counts["again"]:
                raise SimError(f"{store.counts['again']} records were written twice")

    def _kept_names(self) -> dict[int, set[RecordId]]:
        """Return the names of what each Store that answers really has."""
        tiers = inside(self._cache).depot.tiers
        return {
            number: _found_in(tiers[number], store) - torn_in(store.inner).keys()
            for number, store in enumerate(self._stores, 1)
            if tiers[number].available and not store.rates.unavailable
        }

    def _local_stores(self) -> list[tuple[int, FaultyStore]]:
        numbered = enumerate(zip(self._scenario.tiers, self._stores, strict=True), 1)
        return [(number, store) for number, (shape, store) in numbered if not shape.shared]


def _found_in(tier: Tier, store: FaultyStore) -> set[RecordId]:
    """Return the names of the parts that a Store has, where its Tier looks for them."""
    there = {one.id for one in store.scan()}
    known = tier._packer.places._places if tier._packer is not None else {}
    packed = {part for part, place in known.items() if place.pack in there}
    return packed | {name for name in there if not order_of(name) and name not in known}
