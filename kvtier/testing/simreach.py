"""Other tenants of the cache in a simulated world: quotas, pins, prefetches, going without.

They live beside the clients of a world, on namespaces of their own. Their draws are their own,
too: what others draw stays as it is.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvtier.cache import Cache, Match
from kvtier.catalog.lease import Lease, LeaseState
from kvtier.catalog.owners import Quota
from kvtier.errors import ConfigError
from kvtier.identity.namespace import Namespace
from kvtier.prefix import Prefix
from kvtier.testing.inside import inside
from kvtier.testing.simdevice import SimDevice, pause
from kvtier.testing.simtask import SimError

if TYPE_CHECKING:
    from kvtier.testing.simloop import SimLoop
    from kvtier.testing.simscenario import Scenario
    from kvtier.testing.simworld import World

_BOUND, _FREE = "bound", "free"
_FOREVER: Final = 10_000.0
_SECONDS: Final = (0.01, 0.02, 0.3, 5.0)  # as long as any lease, so that all have ended at rest


def draw_quotas(loop: SimLoop, scenario: Scenario) -> dict[str, Quota]:
    """Return the quotas of a world with neighbours: a floor for its clients, a ceiling for one.

    Where a process crashes there are none: what a disk brings back counts for nobody. Nor where a
    tier is shared, where a ceiling is a target only.
    """
    rng = loop.rng("quotas")
    shared = any(shape.shared for shape in scenario.tiers)
    if scenario.crashes or shared or rng.random() < 0.6:
        return {}
    floor, ceiling = rng.choice((0.2, 0.4, 0.6)), rng.choice((0.3, 0.5, 0.7))
    return {"": Quota(floor=floor), _BOUND: Quota(ceiling=ceiling)}


class Neighbours:
    """Tenants with a ceiling and without a quota, where a world has quotas; nobody otherwise."""

    def __init__(self, world: World, quotas: dict[str, Quota]) -> None:
        self._world = world
        self._loop = world.loop
        self._caches: list[Cache] = []
        self._devices: list[SimDevice] = []
        if quotas:
            for tenant in (_BOUND, _FREE):
                self._join(tenant)
            _Shares(world.cache, quotas, world.oracle.also)
        world.oracle.also.append(self._check_pins)
        world.oracle.also.append(self._check_ahead)

    def _join(self, tenant: str) -> None:
        first = self._world.cache
        shards, stages = first.ranks
        namespace = Namespace("simulated", first.geometry, tenant=tenant)
        try:
            cache = first.share(namespace, shards=shards, stages=stages)
        except ConfigError:  # its ceiling is below one chunk
            return
        self._caches.append(cache)
        world = self._world
        self._devices.append(SimDevice(self._loop, cache, world.oracle, world.after, tenant))
        world.oracle.caches.append(cache)

    def start(self) -> list[asyncio.Task[None]]:
        """Start what ends when each has done what it does, and has left; nothing without them."""
        serving = [self._serve()] if self._caches else []
        return [self._loop.create_task(work, name="neighbours") for work in serving]

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(2 * len(self._caches)):
                group.create_task(self._live(number), name=f"neighbour-{number}")
        for cache, device in zip(self._caches, self._devices, strict=True):
            await device.idle()
            cache.close()

    async def _live(self, number: int) -> None:
        rng, world = self._loop.rng(f"neighbour-{number}"), self._world
        places = [at for at in (-1, 0, 0, 1) if at < len(self._caches)]
        for _ in range(rng.randint(3, 5)):
            await asyncio.sleep(rng.uniform(0, world.scenario.round_seconds))
            at = rng.choice(places)  # -1: what the world's clients have
            cache = self._caches[at] if at >= 0 else world.cache
            tokens = rng.choice(world.prompts)
            prefix = cache.prefix(tokens[: rng.randint(len(tokens) // 2, len(tokens))])
            match = cache.match(prefix)
            if cache.bypass and match.tokens:
                raise SimError("a namespace that goes without has a match")
            _expect_explained(cache, match)
            world.after("neighbour's match")
            await pause(rng)
            if rng.random() < 0.5:
                await self._pin(rng, cache, match)
            else:
                await self._prefetch(rng, cache, match)
            if at >= 0:
                await self._save(rng, cache, prefix, self._devices[at])
                await self._go_without(rng, cache, prefix)

    async def _pin(self, rng: random.Random, cache: Cache, match: Match) -> None:
        seconds, within = rng.choice(_SECONDS), rng.choice((0.0, 0.05, 2.0))
        without = cache.bypass
        lease = await cache.pin(match, seconds=seconds, timeout=within)
        self._world.after(f"pin {'refused' if lease is None else lease.serial}")
        if lease is None:
            return
        if without and cache.bypass:
            raise SimError("a namespace that goes without was given a pin")
        due = seconds < 1 and rng.random() < 0.5  # or it lasts
        await (asyncio.sleep(seconds) if due else pause(rng))
        if rng.random() < 0.8:
            self._expect_renewed(lease, rng.choice(_SECONDS))
        if rng.random() < 0.5:
            with lease:
                await pause(rng)

    def _expect_renewed(self, lease: Lease, seconds: float) -> None:
        due = lease.deadline <= self._loop.time()
        if lease.renew(seconds) == due:
            raise SimError(f"a pin was {'renewed' if due else 'not renewed'}, due or not")
        self._world.after("renew")

    async def _prefetch(self, rng: random.Random, cache: Cache, match: Match) -> None:
        if rng.random() < 0.5:  # or there is nothing to bring up
            cache.clear("dram", timeout=_FOREVER)
        base = rng.choice((0.0, 0.02, 1.0))
        tokens = await cache.prefetch(match, base=base, per_1024_tokens=rng.choice((0.0, 9.0)))
        if tokens is None or tokens > match.prefix.limit:
            raise SimError(f"a prefetch brought up {tokens} of {match.prefix.limit} tokens")
        self._world.after(f"prefetch of {tokens}")

    async def _save(
        self, rng: random.Random, cache: Cache, prefix: Prefix, device: SimDevice
    ) -> None:
        plan = cache.plan_save(prefix, self._world.tables.of(rng, len(prefix.names)))
        self._world.after(f"neighbour's plan {'of nothing' if plan is None else plan.id}")
        if plan is not None:
            if cache.bypass:
                raise SimError("a namespace that goes without was given a plan")
            self._world.saved_chunks += device.chunks(plan)
            copy = device.save(rng, plan, prefix, good=rng.random() > 0.1)
            if rng.random() < 0.5:
                await asyncio.shield(copy)

    async def _go_without(self, rng: random.Random, cache: Cache, prefix: Prefix) -> None:
        if rng.random() > 0.2:
            return
        cache.bypass = True
        await pause(rng)
        if cache.bypass and cache.match(prefix).tokens:
            raise SimError("a namespace that goes without has a match")
        cache.bypass = False
        self._world.after("bypass")

    # ---- at any moment

    def _check_pins(self) -> None:
        """Recount what is pinned: it is in DRAM, and not more than half of that."""
        catalog = inside(self._world.cache).catalog
        index, pins = catalog._index, catalog._leases.pins
        leases = [one for one in catalog._leases._all.values() if one.pinned]
        counted = Counter(row for lease in leases for row in lease.rows)
        if counted != pins._rows:
            raise SimError(f"{len(counted)} parts are pinned, counted {len(pins)}")
        if pins.nbytes != sum(index.slot(row).nbytes for row in counted):
            raise SimError("the bytes that pins hold are not those counted")
        if pins.nbytes > catalog._room.arena.nbytes // 2:
            raise SimError(f"pins hold {pins.nbytes} bytes, more than half of DRAM")
        for lease in leases:
            late = lease.deadline <= self._loop.time()
            if lease.state is LeaseState.HELD and not late:
                self._world.oracle.expect_leased(lease)

    def _check_ahead(self) -> None:
        """Recount what prefetches read: it is being read, and little."""
        cache = self._world.cache
        catalog, index = inside(cache).catalog, inside(cache).catalog._index
        read = sum(index.slot(row).nbytes for row in catalog._ahead)
        chunk = sum(-(-size // 4096) * 4096 for size in cache.shape.nbytes)
        if read != catalog._ahead_bytes or read > catalog._fetching_bytes:
            raise SimError("the bytes that prefetches read are not those counted")
        if read >= catalog._room.arena.nbytes // 4 + chunk:
            raise SimError(f"prefetches read {read} bytes, more than a quarter of DRAM")


def _expect_explained(cache: Cache, match: Match) -> None:
    """Check that an explanation agrees with the match, and tells of each part where it is."""
    told = cache.explain(match.prefix)
    if told.usable != match.tokens:
        raise SimError(f"{match.tokens} tokens are matched, and {told.usable} explained: {told}")
    more = match.prefix.limit - told.usable >= cache.shape.chunk_tokens
    if more and told.end.chunk is None:
        raise SimError(f"nothing is said to end a match: {told}")
    for part in (part for chunk in told.chunks for part in chunk.parts):
        if not (part.tiers or part.state or part.reason):
            raise SimError(f"a part is nowhere, and nobody says why: {told}")


class _Shares:
    """Watches what calls for one tenant take from another, and how much each has."""

    def __init__(self, cache: Cache, quotas: dict[str, Quota], also: list[Any]) -> None:
        self._room = inside(cache).catalog._room
        self._shelves = inside(cache).catalog._shelves
        self._exact = [
            not tier or not inside(cache).depot.tiers[tier].store.capabilities.shared
            for tier in range(len(self._shelves))
        ]
        self._quotas = list(quotas.values())
        catalog: Any = inside(cache).catalog
        self._reserve, self._hold, self._evict = (
            catalog.reserve,
            catalog.hold_for_fetch,
            catalog.evict,
        )
        catalog.reserve, catalog.hold_for_fetch = self._reserved, self._held
        catalog.evict = self._evicted
        also.append(self.check)

    def _reserved(self, chunks: Sequence[Any]) -> Any:
        before = self._used()
        result = self._reserve(chunks)
        self._expect_floors(before, [part.owner for chunk in chunks for part in chunk])
        return result

    def _held(self, *args: Any, **more: Any) -> Any:
        before = self._used()
        result = self._hold(*args, **more)
        self._expect_floors(before, [args[4]])
        return result

    def _evicted(self, tier: int, nbytes: dict[int, int], **more: Any) -> Any:
        before = self._used()
        result = self._evict(tier, nbytes, **more)
        self._expect_floors(before, list(nbytes))
        return result

    def _used(self) -> list[list[int]]:
        return [list(shelf.used_by) for shelf in self._shelves]

    def _expect_floors(self, before: list[list[int]], owners: list[int]) -> None:
        """Check that nobody but these went below a floor."""
        asking = {self._room.owners.shares[owner] for owner in owners}
        for shelf, used in zip(self._shelves, before, strict=True):
            for share, quota in enumerate(self._quotas, 1):
                floor = int(quota.floor * (shelf.capacity or 0))
                if share not in asking and shelf.used_by[share] < min(used[share], floor):
                    raise SimError(f"{shelf.name}: a tenant was brought below its floor")

    def check(self) -> None:
        """Recount what each share has in each tier; none is above its ceiling."""
        index, room = self._room.index, self._room
        rows = [*index.rows.values(), *room.withdrawn.values()]
        for tier, shelf in enumerate(self._shelves):
            counts = [0] * len(shelf.used_by)
            for row in dict.fromkeys(rows):
                size = index.slot(row).nbytes if index.serial[row] else 0
                counts[room.share(row)] += index.charged[tier][row] if tier else size
            if counts != shelf.used_by:
                raise SimError(f"{shelf.name}: tenants have {counts}, counted {shelf.used_by}")
            for share, quota in enumerate(self._quotas, 1):
                most = quota.ceiling * (shelf.capacity or float("inf"))
                if counts[share] > most and self._exact[tier]:
                    raise SimError(
                        f"{shelf.name}: a tenant has {counts[share]} bytes of {most}, "
                        "above its ceiling"
                    )
