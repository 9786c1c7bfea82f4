"""Removals in a simulated world: invalidate, purge, saves for a time, and what must hold then."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from kvtier.cache import Cache
from kvtier.catalog.catalog import Part
from kvtier.catalog.expiry import NEVER
from kvtier.catalog.index import NO_ROW
from kvtier.identity.record import RecordId
from kvtier.prefix import Prefix
from kvtier.retention import Retention
from kvtier.testing.inside import inside
from kvtier.testing.simhost import parts_in
from kvtier.testing.simtask import SimError

if TYPE_CHECKING:
    from kvtier.testing.simworld import World

_RATES: Final = (0.0, 0.1, 0.3)
_FOREVER: Final = 10_000.0
_ANSWER_SECONDS: Final = 0.005  # of a store that is not slow


class _Absent:
    """Names that no tier may have: withdrawn, and not saved anew since.

    What the Catalog does to a part is noted under its lock, so that threads don't matter.
    """

    def __init__(self, cache: Cache) -> None:
        self._index = inside(cache).catalog._index
        self._names: dict[RecordId, None] = {}
        self._until: dict[RecordId, float] = {}
        self._saves: dict[RecordId, int] = {}
        self._late = ""
        self._clock = inside(cache).depot.clock
        catalog: Any = inside(cache).catalog
        sweeper = inside(cache).moves.sweeper
        self._withdraw, self._begin, self._keep = catalog._withdraw, catalog._begin, catalog._keep
        self._expire = sweeper.expire
        catalog._withdraw, catalog._begin, catalog._keep = self._withdrawn, self._begun, self._kept
        sweeper.expire = self._expired  # type: ignore[method-assign]

    def _withdrawn(self, names: Iterable[RecordId], reason: str) -> Any:
        result = self._withdraw(names, reason)
        for name in names:
            self._names[name] = None
            self._until.pop(name, None)
        return result

    def _begun(self, row: int, part: Part) -> None:
        self._names.pop(part.name, None)
        self._saves[part.name] = self.saves(part.name) + 1
        if not self._index.present[row]:
            self._until[part.name] = self._clock() + part.seconds
        self._begin(row, part)

    def _kept(self, part: Part) -> None:
        row = self._index.find(part.name)
        if row != NO_ROW and (self._index.present[row] or self._index.serial[row]):
            later = max(self._until.get(part.name, NEVER), self._clock() + part.seconds)
            self._until[part.name] = later
        self._keep(part)

    async def _expired(self) -> None:
        """Look, after the reaper has, for what was due when it began."""
        now = self._clock()
        await self._expire()
        for name, until in self._until.items():
            if until <= now and self._there(name):
                self._late = f"{name.hex()[:8]} was due at {until:.3f}, and is there still"

    def saves(self, name: RecordId) -> int:
        """Return how many saves of a part have begun."""
        return self._saves.get(name, 0)

    def check(self) -> None:
        """Check that none of them is in a tier, and none that was due."""
        if self._late:  # raised here: the reaper must go on until then
            raise SimError(self._late)
        for name in self._names:
            if self._there(name):
                raise SimError(f"{name.hex()[:8]} was withdrawn, and is in a tier again")

    def in_store(self, kept: Iterable[RecordId]) -> list[RecordId]:
        """Return which of them a Store has."""
        return [name for name in kept if name in self._names]

    def expect(self, names: Iterable[RecordId], saves: dict[RecordId, int]) -> None:
        """Check that parts are in no tier, but for what was saved since ``saves``."""
        for name in names:
            if self._there(name) and self.saves(name) == saves[name]:
                raise SimError(f"{name.hex()[:8]} was invalidated, and is in a tier")

    def _there(self, name: RecordId) -> bool:
        row = self._index.find(name)
        return row != NO_ROW and bool(self._index.present[row])


class Removals:
    """What clients remove, in some worlds. Its draws are its own: others' stay as they are."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cache = world.cache
        self._rng = world.loop.rng("removals")
        self._rate = self._rng.choice(_RATES)
        self._absent = _Absent(world.cache)
        world.oracle.also.append(self._absent.check)
        world.oracle.also_at_rest.append(self._check_rest)

    def retention(self, prefix: Prefix) -> list[Retention]:
        """Return how a prompt is to be saved: as usual, or with priorities and for a time."""
        rng, tokens = self._rng, len(prefix.tokens)
        if rng.random() >= self._rate:
            return []
        return [_drawn(rng, tokens) for _ in range(rng.randint(1, 2))]

    async def while_asked(self, prefix: Prefix) -> None:
        """Remove a prompt, mostly, for which a shared tier is asked after its fetch was given up.

        Not where what others wrote spoils: it would be gone before.
        """
        rng, asking = self._rng, inside(self._cache).moves.asking._under_way
        if self._rate and asking and not self._world.scenario.decaying and rng.random() < 0.7:
            await asyncio.sleep(rng.uniform(0.0, _ANSWER_SECONDS))
            self._remove(prefix)

    def maybe(self, prefix: Prefix) -> None:
        """Remove something, sometimes; most often a part of this prompt."""
        if self._rng.random() < self._rate:
            self._remove(prefix)

    def _remove(self, prefix: Prefix) -> None:
        rng = self._rng
        if rng.random() < 0.2:
            self._cache.purge(timeout=_FOREVER)
            self._world.after("purge")
            return
        first = rng.randrange(len(prefix.names) + 1) if rng.random() < 0.5 else 0
        names = [name for chunk in prefix.names[first:] for name in chunk]
        saves = {name: self._absent.saves(name) for name in names}
        timeout = rng.choice((0.0, 0.0, 0.01, _FOREVER))
        removed = self._cache.invalidate(prefix, first=first, timeout=timeout)
        self._absent.expect(names, saves)
        if removed.parts > len(names) or removed.unconfirmed < 0:
            raise SimError(f"of {len(names)} parts {removed} were removed")
        self._world.after("invalidate")

    def _check_rest(self) -> None:
        """At rest no Store has what was withdrawn, unless that is known."""
        catalog = inside(self._cache).catalog
        if catalog._room.withdrawn or catalog._watching or any(catalog._records):
            raise SimError("something withdrawn was never dealt with")
        for number, store in enumerate(self._world.stores, 1):
            kept = parts_in(store.inner)
            known = self._world.oracle.strays(number) | _deleted(self._world, number)
            if not known.issuperset(self._absent.in_store(kept)):
                raise SimError(f"store {number} has what was withdrawn, and nobody knows")


def _deleted(world: World, number: int) -> set[RecordId]:
    """Return what a tier takes for deleted, in whatever pack another host has it still."""
    packer = inside(world.cache).depot.tiers[number]._packer
    return set(packer.places._deleted) if packer is not None else set()


def _drawn(rng: random.Random, tokens: int) -> Retention:
    start = rng.randrange(tokens)
    stop = None if rng.random() < 0.5 else rng.randint(start + 1, tokens)
    seconds = rng.choice((None, 0.001, 0.1, 0.3, 5.0))
    return Retention(start, stop, rng.choice((-100, -1, 0, 0, 1, 100)), seconds)
