"""A Cache in a simulated world: clients, a device, slow and faulty stores, an oracle.

``run_world(seed)`` draws a small, crowded world from the seed and lives through it. In some the
process crashes, and another goes on with what the media still have.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.cache import Cache
from kvtier.config import Config, TierConfig
from kvtier.identity.geometry import Geometry
from kvtier.identity.namespace import Namespace
from kvtier.identity.record import HEADER_BYTES
from kvtier.identity.shape import chunk_shape
from kvtier.memory.sealed import PAGE_BYTES
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.faults import FaultyStore, faulty
from kvtier.testing.inside import inside
from kvtier.testing.oracle import Oracle
from kvtier.testing.simclient import FOREVER, Clients
from kvtier.testing.simconditions import Conditions
from kvtier.testing.simcrash import Crash, Ledger, Past, check_reopened, crash
from kvtier.testing.simdevice import SimDevice, Tables
from kvtier.testing.simdisk import SimDisk
from kvtier.testing.simflow import SimFlow
from kvtier.testing.simhost import PackedMemory, SharedMemory, write_as_another_host
from kvtier.testing.simloop import SimLoop, simulate
from kvtier.testing.simmodel import BLOCK, CHUNK, MODELS
from kvtier.testing.simreach import Neighbours, draw_quotas
from kvtier.testing.simrest import Ending
from kvtier.testing.simscenario import HANG_SECONDS, Scenario, TierShape
from kvtier.testing.simspill import Meter, SpillWatch
from kvtier.testing.simtask import SimError
from kvtier.tiers.pack import pair_bytes
from kvtier.tiers.store import Store, Write

_CHECK_STEPS: Final = 16
_CRASH_STEPS: Final = 300


@dataclass(frozen=True, slots=True)
class Engine:
    """What serves requests of one namespace."""

    cache: Cache
    device: SimDevice


class World:
    """One catalog, its stores, its clients. Everything it draws comes from the loop's seed.

    atomic: nothing else happens between a call on the cache and the look at what it did.

    engines: one, or two of different namespaces; cache: that of the first.
    past: what an earlier life left, None in the first. calls: on the cache so far, by clients
    and devices. saved_chunks, abandoned: what they asked for.
    """

    atomic = True

    def __init__(self, loop: SimLoop, scenario: Scenario, past: Past | None = None) -> None:
        self.loop = loop
        self.scenario = scenario
        self.past = past
        self.life = past.life if past is not None else 0
        self.model = MODELS[scenario.model]
        geometry = Geometry(self.model.components, "int8", (BLOCK,), CHUNK)
        shape = chunk_shape(geometry, self.model.shards, self.model.stages)
        self._largest = max(shape.nbytes) + HEADER_BYTES
        namespace = Namespace("simulated", geometry)
        self.prompts = past.prompts if past is not None else _prompts(loop.rng("world"))
        self.stores: list[FaultyStore] = []
        self.meters: list[Meter] = []
        self.ledgers: dict[int, Ledger] = {}
        settings = [self._open(number, one) for number, one in enumerate(scenario.tiers, 1)]
        quotas = draw_quotas(loop, scenario) if self.atomic else {}
        config = Config(
            scenario.dram_slots * PAGE_BYTES, tuple(settings), quotas, scenario.policy, scenario.ttl
        )
        flow = SimFlow(loop)
        self.cache = self.open_cache(config, namespace, flow)
        self.oracle = Oracle(self.cache, self.model, loop.time)
        self.spills = SpillWatch(self.cache, loop.time)
        self.calls = past.calls if past is not None else 0
        self.saved_chunks = 0
        self.abandoned = 0
        self.left: Past | None = None
        self.tables = Tables(self.model)
        self.engines = [self._engine(self.cache, "copy")]
        if scenario.strangers:
            ranks = {"shards": self.model.shards, "stages": self.model.stages}
            other = self.cache.share(Namespace("another", geometry), **ranks)
            self.engines.append(self._engine(other, "other"))
            self.oracle.caches.append(other)
        self.neighbours = Neighbours(self, quotas)

    def _engine(self, cache: Cache, name: str) -> Engine:
        return Engine(cache, SimDevice(self.loop, cache, self.oracle, self.after, name))

    def open_cache(self, config: Config, namespace: Namespace, flow: SimFlow) -> Cache:
        """Open the one cache of this world."""
        clock, ranks = self.loop.time, {"shards": self.model.shards, "stages": self.model.stages}
        return Cache(config, namespace, clock=clock, flow=flow, **ranks)

    def start_request(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Future[None]:
        """Start what an engine does for one request."""
        return self.loop.create_task(work, name=name)

    def check(self) -> None:
        """Check everything that holds between any two steps."""
        self.oracle.check()
        self.spills.check()
        for meter in self.meters:
            meter.check()

    def end(self) -> None:
        """Give back what outlives the loop."""
        inside(self.cache).depot.arena.close()

    def _open(self, number: int, shape: TierShape) -> TierConfig:
        """Open a tier's store: what an earlier life left there, or an empty one."""
        largest = self._largest
        if shape.packed:
            largest = -(-(pair_bytes(largest - HEADER_BYTES) + HEADER_BYTES) // 2)
        capacity = None if shape.records is None else shape.records * largest
        left = self.past.stores.get(number) if self.past is not None else None
        bound, name = capacity if shape.bounded else None, f"tier{number}"
        inner = left if left is not None else _new_store(shape, name, bound)
        rates = self.scenario.rates
        store = faulty(inner, self.loop.rng(f"store{number}"), rates)
        if self.scenario.hangs:
            store.THREADS = 1  # type: ignore[misc]  # one call that hangs takes them all
        if shape.durable:
            self.ledgers[number] = Ledger(store)
        self.stores.append(store)
        a_day = math.inf if shape.writes is None else shape.writes * largest
        self.meters.append(Meter(store, a_day, self.loop.time))
        return TierConfig(
            "memory",
            "",
            capacity,
            shape.admission,
            store=store,
            write_budget=a_day,
            policy=self.scenario.policy,
            ttl=None if shape.shared else self.scenario.ttl,
        )

    async def live(self) -> None:
        """Serve all requests, then wind down and check that nothing is left; or crash."""
        if self.past is not None:
            check_reopened(self, self.past)
        else:
            others = self.loop.rng("another host")
            for shape, store in zip(self.scenario.tiers, self.stores, strict=True):
                if shape.shared:
                    write_as_another_host(self.cache, store.inner, self.prompts, others)
        self._check_strangers()
        self.loop.on_step = self._step
        neighbours = self.neighbours.start()
        await Clients(self).serve()
        for neighbour in neighbours:
            await neighbour
        if self.life < len(self.scenario.crashes):  # it has come to rest before its time
            await self.idle()
            self.cache.flush(timeout=FOREVER)
            self._crash()
        await Ending(self).wind_down()

    @property
    def most_calls(self) -> int | None:
        """After how many calls no request begins in this life; None for as many as are drawn."""
        if self.scenario.ops is None:
            return None
        return self.scenario.ops * (self.life + 1) // (len(self.scenario.crashes) + 1)

    def _check_strangers(self) -> None:
        """No part of one namespace has a name in the other."""
        for tokens in self.prompts:
            names = [
                name
                for engine in self.engines
                for chunk in engine.cache.prefix(tokens).names
                for name in chunk
            ]
            if len(set(names)) < len(names):
                raise SimError("two namespaces share the name of a part")

    async def idle(self) -> None:
        """Return when every copy has ended."""
        for engine in self.engines:
            await engine.device.idle()

    def _step(self) -> None:
        if self._must_crash():
            self._crash()
        if self.loop.steps % _CHECK_STEPS == 0:
            self.check()

    def _must_crash(self) -> bool:
        if self.life == len(self.scenario.crashes):
            return False
        over = self.loop.steps - self.scenario.crashes[self.life]
        if over < 0 or not self.scenario.in_write or over > _CRASH_STEPS:
            return over >= 0
        return any(_writes(call.args) for call in self.loop.under_way.values())

    def _crash(self) -> None:
        self.loop.on_step = None
        self.left = crash(self)
        raise Crash

    def after(self, what: str) -> None:
        """Check everything after a call, and enter it and the state into the digest."""
        self.calls += 1
        self.check()
        self.loop.note(what, self.oracle.state())


def _new_store(shape: TierShape, name: str, capacity: int | None) -> Store:
    if shape.durable:
        return SimDisk(name, capacity, shape.sync_every, ordered=shape.ordered)
    if shape.packed:
        return PackedMemory(name, capacity)
    return SharedMemory(name, capacity) if shape.shared else MemoryStore(name, capacity)


def _writes(args: tuple[Any, ...]) -> bool:
    """Say whether a call's arguments are those of a Store's write."""
    return bool(args) and isinstance(args[0], list) and isinstance(args[0][0], Write)


def _prompts(rng: random.Random) -> list[NDArray[np.int32]]:
    """Return prompts that share prefixes: a few stems, each with a few branches."""
    prompts = []
    for _ in range(2):
        stem = [rng.randrange(1000) for _ in range(rng.randint(1, 3) * CHUNK)]
        for _ in range(2):
            tail = [rng.randrange(1000) for _ in range(rng.randint(1, 3) * CHUNK)]
            rest = [0] * rng.randrange(1, CHUNK)
            prompts.append(np.array(stem + tail + rest, np.int32))
    return prompts


def run_world(
    seed: int,
    scenario: Scenario | None = None,
    *,
    watch: Callable[[World], None] | None = None,
    kind: Callable[[SimLoop, Scenario, Past | None], World] = World,
) -> SimLoop:
    """Live through the world of a seed. Raises whatever goes wrong, naming the seed.

    watch: called with the world, and with that of each life after a crash, before anything
    happens in it. kind: what makes a world. Returns the loop of the last.
    """
    drawn = scenario or Scenario.draw(seed)
    worlds: list[World] = []

    async def main(loop: SimLoop) -> None:
        before = worlds[-1] if worlds else None
        if before is not None:
            loop.note("before", before.loop.digest)
        world = kind(loop, drawn, before.left if before is not None else None)
        worlds.append(world)
        if watch is not None:
            watch(world)
        await world.live()

    try:
        while True:
            try:
                return simulate(main, seed, _conditions(drawn, len(worlds)))
            except Crash:
                continue
    finally:
        for world in worlds:
            world.end()


def _conditions(drawn: Scenario, life: int) -> Conditions:
    conditions = Conditions(
        order=drawn.order,
        cancel_rate=drawn.cancel_rate,
        cancel_at=drawn.cancel_at,
        shuffle=drawn.shuffle,
        life=life,
    )
    if drawn.hangs:
        conditions = replace(
            conditions,
            slow_seconds=HANG_SECONDS,
            slow_rate=0.7,
            slow_from=drawn.round_seconds / 2,
            max_idle_seconds=1000.0,
        )
    if drawn.order == "fifo":
        conditions = replace(conditions, stall_rate=0.0)
    return conditions
