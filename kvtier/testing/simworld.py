"""A Cache in a simulated world: engine requests, a device, slow and faulty stores, an oracle.

``run_world(seed)`` draws a small, crowded world from the seed and lives through it. The requests
call the Cache as an engine's threads do, with an await between every two calls, so that
everything else may happen there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.cache import Cache, Match
from kvtier.catalog.lease import Lease, LeaseState
from kvtier.config import Config, TierConfig
from kvtier.identity.geometry import Component, Geometry
from kvtier.identity.namespace import Namespace
from kvtier.identity.record import HEADER_BYTES, RecordId
from kvtier.memory.arena import PAGE_BYTES
from kvtier.prefix import Namer, Prefix
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.faults import FaultyStore, Rates
from kvtier.testing.oracle import Oracle
from kvtier.testing.simdevice import SimDevice, pause
from kvtier.testing.simflow import SimFlow
from kvtier.testing.simhost import SharedMemory, write_as_another_host
from kvtier.testing.simloop import Conditions, SimLoop, simulate
from kvtier.testing.simscenario import Scenario
from kvtier.testing.simtask import SimError

__all__ = ["World", "run_world"]

_BLOCK: Final = 4
_CHUNK: Final = 8
_GEOMETRY: Final = Geometry(
    components=(Component(1, 2, 4), Component(1, 2, 8, name="second")),
    dtype="int8",
    block_tokens=(_BLOCK,),
    chunk_tokens=_CHUNK,
)
_FOREVER: Final = 10_000.0
_SETTLED_SECONDS: Final = 8.0  # longer than any lease, and than any read whose waiter is gone
_HANG_SECONDS: Final = (60.0, 270.0)  # a third on the thread; for a Tier, 30 seconds there hang


class World:
    """One cache, its stores, its engine. Everything it draws comes from the loop's seed."""

    def __init__(self, loop: SimLoop, scenario: Scenario) -> None:
        self.loop = loop
        self.scenario = scenario
        rng = loop.rng("world")
        geometry = replace(_GEOMETRY, components=_GEOMETRY.components[: scenario.components])
        namespace = Namespace("simulated", geometry)
        self._namer = Namer(namespace, scenario.shards)
        largest = max(self._namer.nbytes) + HEADER_BYTES
        self.stores: list[FaultyStore] = []
        settings = []
        for number, shape in enumerate(scenario.tiers, 1):
            capacity = None if shape.records is None else shape.records * largest
            kind = SharedMemory if shape.shared else MemoryStore
            inner = kind(f"tier{number}", capacity if shape.bounded else None)
            store = FaultyStore(inner, loop.rng(f"store{number}"), scenario.rates)
            if scenario.hangs:
                store.THREADS = 1  # type: ignore[misc]  # one call that hangs takes them all
            self.stores.append(store)
            settings.append(TierConfig("memory", "", capacity, shape.admission, store=store))
        config = Config(scenario.dram_slots * PAGE_BYTES, tuple(settings))
        flow = SimFlow(loop)
        self.cache = Cache(config, namespace, shards=scenario.shards, clock=loop.time, flow=flow)
        self.oracle = Oracle(self.cache, loop.time)
        self.prompts = _prompts(rng)
        self.saved_chunks = 0
        self.rounds = 0
        self.abandoned = 0
        self._turn = 0
        self.device = SimDevice(loop, self.cache, self.oracle, self.after)

    # ---- the run

    async def live(self) -> None:
        """Serve all requests, then wind down and check that nothing is left."""
        self.loop.on_step = self._check_now_and_then
        others = self.loop.rng("another host")
        for shape, store in zip(self.scenario.tiers, self.stores, strict=True):
            if shape.shared:
                write_as_another_host(self.cache, store.inner, self.prompts, others)
        async with asyncio.TaskGroup() as group:
            for number in self.scenario.kept_requests:
                name = f"request-{number}"
                group.create_task(self._request(self.loop.rng(name)), name=name)
        await self._wind_down()

    def _check_now_and_then(self) -> None:
        if self.loop.steps % 16 == 0:
            self.oracle.check()

    def after(self, what: str) -> None:
        """Check everything after a call, and enter it and the state into the digest."""
        self.oracle.check()
        self.loop.note(what, self.oracle.state())

    async def _wind_down(self) -> None:
        await self.device.idle()
        for store in self.stores:
            store.rates = Rates()
        if not self.cache.flush(timeout=_FOREVER):
            raise SimError("flush did not end")
        hung = _HANG_SECONDS[1] if self.scenario.hangs else 0.0
        await asyncio.sleep(_SETTLED_SECONDS + 2 * hung)
        self.oracle.check_rest()
        self._check_figures()
        self._check_stores()
        self.after("rest")
        if len(self.stores) > 1:
            await self._read_with_one_down(self.prompts[0])
        for number, tokens in enumerate(self.prompts):
            await self._read_back(number, tokens)
        self._empty()
        self.cache.close()

    async def _read_back(self, number: int, tokens: NDArray[np.int32]) -> None:
        """With all faults gone, what is matched arrives, or turns out to be lost below, once.

        Unless calls still hang.
        """
        whole, chunks, tokens_matched = await self._read_all(tokens)
        if not whole and not self.scenario.hangs:
            if self.scenario.faultless:
                raise SimError("not all of the chunks that were matched came")
            if not (await self._read_all(tokens))[0]:
                raise SimError("a part that was lost is matched, and fails a second time")
        self.loop.note("read", f"{number} {tokens_matched} {chunks}")

    async def _read_with_one_down(self, tokens: NDArray[np.int32]) -> None:
        """What two tiers have arrives although the first of them does not answer."""
        self.cache.clear("dram", timeout=_FOREVER)
        self.stores[0].rates = Rates(unavailable=1.0)
        await self._read_all(tokens)
        self.stores[0].rates = Rates()
        await asyncio.sleep(_SETTLED_SECONDS)  # longer than a breaker rests

    async def _read_all(self, tokens: NDArray[np.int32]) -> tuple[bool, int, int]:
        """Fetch all that is matched; say whether it came, with its chunks and the match's tokens.

        More than DRAM has room for need not come.
        """
        match = self.cache.match(tokens)
        self.oracle.expect_match(match)
        room = self.scenario.dram_slots // len(self._namer.names)
        sure = self.oracle.kept_somewhere(match, self._kept_names())
        lease = await self.cache.fetch(match, timeout=_FOREVER, deadline=_FOREVER)
        chunks = lease.chunks if lease else 0
        if chunks < min(sure, room) and not self.scenario.hangs:
            raise SimError(f"{chunks} chunks came, although another copy of {sure} could be read")
        if lease is not None:
            self.oracle.expect_leased(lease)
            lease.release()
        self.cache.flush(timeout=_FOREVER)
        await asyncio.sleep(1.0)
        self.oracle.check_rest()
        return chunks >= min(match.chunks, room), chunks, match.tokens

    def _empty(self) -> None:
        """Clear every tier until nothing is left; what is only below leaves after what is above."""
        names = list(self.cache._numbers)
        for _ in range(len(self.prompts) * 8):
            for name in names:
                self.cache.clear(name, timeout=_FOREVER)
            if not len(self.oracle._index):
                break
        self.oracle.check_empty()
        if any(store.kept_bytes() for _, store in self._local_stores()):
            raise SimError("a store has records after it was cleared")

    def _check_figures(self) -> None:
        figures = self.cache.figures()
        bad = [name for name, value in figures.items() if value < 0]
        if bad:
            raise SimError(f"negative figures: {', '.join(bad)}")
        metrics = self.cache.metrics
        ended = sum(metrics.get("dropped_saves", reason=why) for why in ("copy", "orphan"))
        ended += metrics.get("saved_chunks")
        if ended != self.saved_chunks:
            raise SimError(f"{self.saved_chunks} chunks were to be saved, {ended:.0f} were")
        self.loop.note("figures", repr(sorted(figures.items())))

    def _check_stores(self) -> None:
        """What a Store has is indexed or known to be astray; it never was over its budget."""
        lossless = not self.scenario.rates.lost_write
        for number, store in self._local_stores():
            kept = {header.id for header in store.scan()}
            self.loop.note("store", repr((number, sorted(kept), sorted(store.counts.items()))))
            indexed = set(self.oracle.indexed(number))
            capacity = self.oracle.capacity(number)
            if capacity is not None and store.peak_bytes > capacity:
                raise SimError(f"store {number} had {store.peak_bytes} bytes of {capacity}")
            if not kept - indexed <= self.oracle.strays(number):
                raise SimError(f"store {number} has records that nobody knows of")
            if lossless and indexed - kept:
                raise SimError(f"store {number} lacks records that the index names")
            if self.scenario.faultless and store.counts["again"]:
                raise SimError(f"{store.counts['again']} records were written twice")

    def _kept_names(self) -> dict[int, set[RecordId]]:
        """Return the names of what each Store that answers really has."""
        return {
            number: {header.id for header in store.scan()}
            for number, store in enumerate(self.stores, 1)
            if self.cache._tiers[number].available and not store.rates.unavailable
        }

    def _local_stores(self) -> list[tuple[int, FaultyStore]]:
        numbered = enumerate(zip(self.scenario.tiers, self.stores, strict=True), 1)
        return [(number, store) for number, (shape, store) in numbered if not shape.shared]

    # ---- a request

    async def _request(self, rng: random.Random) -> None:
        rounds = max(rng.randint(2, 4), self.scenario.rounds_at_least)
        for _ in range(rounds):
            tokens = await self._next_prompt(rng)
            if self.rounds == self.scenario.ops:
                return
            self.rounds += 1
            prefix = self.cache.prefix(tokens[: rng.randint(len(tokens) // 2, len(tokens))])
            await pause(rng)
            match = self.cache.match(prefix)
            self.oracle.expect_match(match)
            self.after(f"match {match.chunks} of {len(prefix.names)} chunks")
            await pause(rng)
            first = rng.randrange(match.chunks + 1) if rng.random() < 0.3 else 0
            lease = await self._acquire(rng, match, first)
            if lease is not None:
                await self._load(rng, match, lease)
            await self._save(rng, prefix)
            if self.scenario.clears and rng.random() < 0.3:
                tier = rng.choice(("dram", *self.cache._numbers))
                self.cache.clear(tier, timeout=_FOREVER)
                self.after("clear")

    async def _next_prompt(self, rng: random.Random) -> NDArray[np.int32]:
        """Wait for the next round and return its prompt: a herd has both in common."""
        wait = self.scenario.round_seconds
        if not self.scenario.herd:
            await asyncio.sleep(rng.uniform(0, wait))
            return rng.choice(self.prompts)
        turn = int(self._now() / wait) + 1
        await asyncio.sleep(turn * wait - self._now())
        if self._turn != turn:
            self._turn = turn
            self.cache.clear("dram", timeout=_FOREVER)
        return self.prompts[turn % len(self.prompts)]

    async def _acquire(self, rng: random.Random, match: Match, first: int) -> Lease | None:
        hold = rng.choice((0.001, 0.02, 5.0))
        if rng.random() < 0.5 and all(tier == "dram" for tier in match.tiers[first:]):
            lease = self.cache.lease(match, deadline=hold, first=first)
            self.after(f"lease {'refused' if lease is None else lease.serial}")
            return lease
        within = rng.choice((0.0, 0.002, 0.05, 2.0))
        transfer = self.cache.fetch(match, timeout=within, deadline=hold, first=first)
        self.after("fetch")
        if rng.random() < 0.1:
            self.abandoned += 1
            transfer.abandon()
            return None
        asked = self.loop.time()
        try:
            lease = await transfer
        except asyncio.CancelledError:
            transfer.abandon()
            raise
        self._expect_in_time(asked + within)
        if lease is not None and lease.state is LeaseState.HELD and lease.deadline > self._now():
            self.oracle.expect_leased(lease)
        return lease

    def _expect_in_time(self, deadline: float) -> None:
        late = self._now() - deadline
        if late > 2 * self.loop.conditions.stall_seconds:
            raise SimError(f"a fetch ended {late:.3f} s after its timeout")

    async def _load(self, rng: random.Random, match: Match, lease: Lease) -> None:
        with lease:
            await pause(rng)
            if rng.random() < 0.2:
                return
            skip = rng.randrange(lease.chunks * _CHUNK // _BLOCK)
            start = lease.first * _CHUNK + skip * _BLOCK
            stop = (lease.first + lease.chunks) * _CHUNK
            blocks = range(start // _BLOCK, stop // _BLOCK)
            plan = self.cache.plan_load(lease, blocks, start=start)
            self.after(f"plan load {'refused' if plan is None else plan.id}")
            if plan is None:
                if self._now() < lease.deadline:
                    raise SimError("a plan was refused before the lease's deadline")
                return
            if self._now() >= lease.deadline:
                raise SimError("a plan was issued after its lease's deadline")
            copy = self.device.load(rng, plan, match.prefix)
            await pause(rng)
        await asyncio.shield(copy)
        tiers = dict.fromkeys(lease.sources, _CHUNK)
        self.cache.loaded(match, tiers, lease.first)
        self.after("loaded")

    async def _save(self, rng: random.Random, prefix: Prefix) -> None:
        chunks = len(prefix.names)
        saved = 0
        for upto in sorted({rng.randint(0, chunks), chunks}):
            await pause(rng)
            computed = prefix.head(prefix.tokens, upto)
            blocks = range(upto * _CHUNK // _BLOCK)
            known = self.oracle.known(prefix)
            plan = self.cache.plan_save(computed, blocks, first=saved)
            if known >= saved:  # otherwise the chain was broken before
                self.oracle.expect_known(prefix, known)
            saved = upto
            self.after(f"plan save {'of nothing' if plan is None else plan.id}")
            if plan is None:
                continue
            self.saved_chunks += len({part.blocks for part in plan.parts})
            good = rng.random() > 0.1
            copy = self.device.save(rng, plan, prefix, good=good)
            if rng.random() < 0.5:
                await asyncio.shield(copy)

    def _now(self) -> float:
        return self.loop.time()


def _prompts(rng: random.Random) -> list[NDArray[np.int32]]:
    """Return prompts that share prefixes: a few stems, each with a few branches."""
    prompts = []
    for _ in range(2):
        stem = [rng.randrange(1000) for _ in range(rng.randint(1, 3) * _CHUNK)]
        for _ in range(2):
            tail = [rng.randrange(1000) for _ in range(rng.randint(1, 3) * _CHUNK)]
            rest = [0] * rng.randrange(1, _CHUNK)
            prompts.append(np.array(stem + tail + rest, np.int32))
    return prompts


def run_world(
    seed: int,
    scenario: Scenario | None = None,
    *,
    watch: Callable[[World], None] | None = None,
) -> SimLoop:
    """Live through the world of a seed. Raises whatever goes wrong, naming the seed.

    watch: called with the world before anything happens in it.
    """
    drawn = scenario or Scenario.draw(seed)
    worlds: list[World] = []

    async def main(loop: SimLoop) -> None:
        world = World(loop, drawn)
        worlds.append(world)
        if watch is not None:
            watch(world)
        await world.live()

    conditions = Conditions(cancel_rate=drawn.cancel_rate, shuffle=drawn.shuffle)
    if drawn.hangs:
        conditions = replace(
            conditions, slow_seconds=_HANG_SECONDS, slow_rate=0.3, max_idle_seconds=1000.0
        )
    if drawn.steady:
        conditions = replace(conditions, order="fifo", stall_rate=0.0)
    try:
        return simulate(main, seed, conditions)
    finally:
        for world in worlds:
            world.cache._arena.close()
