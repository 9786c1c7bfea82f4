"""The engines of a simulated world: clients whose requests match, load and save.

They call the Cache as an engine's threads do, with an await between every two calls, so that
everything else may happen there.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.cache import Match
from kvtier.catalog.lease import Lease, LeaseState
from kvtier.prefix import Prefix
from kvtier.testing.inside import inside
from kvtier.testing.simdevice import pause
from kvtier.testing.simmodel import BLOCK, CHUNK
from kvtier.testing.simremoval import Removals
from kvtier.testing.simtask import SimError

if TYPE_CHECKING:
    from kvtier.testing.simworld import Engine, World

FOREVER: Final = 10_000.0
_STALE_SECONDS: Final = 0.1
_LATE_SECONDS: Final = 0.02  # beyond what a stall explains


class Clients:
    """All clients of one world. Each sends one request after the other."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._loop = world.loop
        self._cache = world.cache
        self._oracle = world.oracle
        self._scenario = world.scenario
        self._turn = 0
        self._removals = Removals(world)

    async def serve(self) -> None:
        """Return when every client has had its requests answered, or cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in self._scenario.kept_clients:
                group.create_task(self._client(number), name=f"client-{number}")

    async def _client(self, number: int) -> None:
        rng = self._loop.rng(f"client-{number}")
        rounds, most, turn = rng.randint(2, 4), self._world.most_calls, 0
        while turn < rounds if most is None else self._world.calls < most:
            tokens = await self._next_prompt(rng)
            if self._scenario.hangs and rng.random() < 0.9:  # or nobody asks the tier
                self._cache.clear("dram", timeout=FOREVER)
            name = f"request-{number}.{turn}"
            request = self._world.start_request(self._request(self._loop.rng(name), tokens), name)
            await asyncio.wait((request,))
            if not request.cancelled():
                request.result()
            turn += 1

    async def _request(self, rng: random.Random, tokens: NDArray[np.int32]) -> None:
        engine = rng.choice(self._world.engines)
        prefix = engine.cache.prefix(tokens[: rng.randint(len(tokens) // 2, len(tokens))])
        await pause(rng)
        match = engine.cache.match(prefix)
        if self._world.atomic:
            self._oracle.expect_match(match)
        self._world.after(f"match {match.chunks} of {len(prefix.names)} chunks")
        await (pause(rng) if rng.random() < 0.7 else asyncio.sleep(rng.uniform(0, _STALE_SECONDS)))
        first = rng.randrange(match.chunks + 1) if rng.random() < 0.3 else 0
        lease = await self._acquire(rng, engine, match, first)
        if lease is not None:
            await self._load(rng, engine, match, lease)
        elif engine.cache is self._cache:
            await self._removals.while_asked(prefix)
        await self._save(rng, engine, prefix)
        if engine.cache is self._cache:
            self._removals.maybe(prefix)
        if self._scenario.clears and rng.random() < 0.3:
            tier = rng.choice(("dram", *inside(self._cache).depot.numbers))
            self._cache.clear(tier, timeout=FOREVER)
            self._world.after("clear")

    async def _next_prompt(self, rng: random.Random) -> NDArray[np.int32]:
        """Wait for the next round and return its prompt: a herd has both in common."""
        wait, prompts = self._scenario.round_seconds, self._world.prompts
        if not self._scenario.herd:
            await asyncio.sleep(rng.uniform(0, wait))
            return rng.choice(prompts)
        turn = int(self._loop.time() / wait) + 1
        await asyncio.sleep(turn * wait - self._loop.time())
        if self._turn != turn:
            self._turn = turn
            self._cache.clear("dram", timeout=FOREVER)
        return prompts[turn % len(prompts)]

    async def _acquire(
        self, rng: random.Random, engine: Engine, match: Match, first: int
    ) -> Lease | None:
        hold = rng.choice((0.001, 0.02, 5.0))
        if rng.random() < 0.5 and not any(match.where[first:]):
            lease = engine.cache.lease(match, deadline=hold, first=first)
            self._world.after(f"lease {'refused' if lease is None else lease.serial}")
            return lease
        within = rng.choice((0.0, 0.002, 0.05, 2.0))
        transfer = engine.cache.fetch(match, timeout=within, deadline=hold, first=first)
        self._world.after("fetch")
        if rng.random() < 0.1:
            self._world.abandoned += 1
            transfer.abandon()
            return None
        asked, stalled = self._loop.time(), self._loop.stalled
        try:
            lease = await transfer
        except asyncio.CancelledError:
            transfer.abandon()
            raise
        self._expect_in_time(asked + within, stalled)
        if self._world.atomic and lease is not None and lease.tokens >= match.tokens:
            self._expect_no_longer(lease, asked, stalled)
        if self._world.atomic and lease is not None and self._in_force(lease):
            self._oracle.expect_leased(lease)
        return lease

    def _in_force(self, lease: Lease) -> bool:
        return lease.state is LeaseState.HELD and lease.deadline > self._loop.time()

    def _expect_in_time(self, deadline: float, stalled: float) -> None:
        """Check that a fetch ended by its deadline, but for the time the thread was held up."""
        late = self._loop.time() - deadline
        if late > self._loop.stalled - stalled + _LATE_SECONDS:
            raise SimError(f"a fetch ended {late:.3f} s after its timeout")

    def _expect_no_longer(self, lease: Lease, asked: float, stalled: float) -> None:
        """Check that a fetch did not wait on when all that it wanted had come."""
        if any(shape.shared for shape in self._scenario.tiers):  # they are asked for more
            return
        if self._removals._rate:  # what is saved anew may come before the read of what it was
            return
        came = (self._oracle.came.get(row, asked) for row in lease.rows)
        late = self._loop.time() - max(asked, *came)
        if late > self._loop.stalled - stalled + _LATE_SECONDS:
            raise SimError(f"a fetch ended {late:.3f} s late: all of it had come")

    async def _load(self, rng: random.Random, engine: Engine, match: Match, lease: Lease) -> None:
        with lease:
            await pause(rng)
            if rng.random() < 0.2:
                return
            skip = rng.randrange((lease.tokens - lease.first * CHUNK) // BLOCK)
            start = lease.first * CHUNK + skip * BLOCK
            tables = self._world.tables.into(rng, start, lease.tokens)
            plan = engine.cache.plan_load(lease, tables, start=start)
            self._world.after(f"plan load {'refused' if plan is None else plan.id}")
            if plan is None:
                if self._loop.time() < lease.deadline:
                    raise SimError("a plan was refused before the lease's deadline")
                return
            if self._world.atomic and self._loop.time() >= lease.deadline:
                raise SimError("a plan was issued after its lease's deadline")
            engine.device.expect_all(plan, match.prefix, start, lease.tokens)
            copy = engine.device.load(rng, plan, match.prefix)
            await pause(rng)
            await pause(rng)
        await asyncio.shield(copy)
        tiers = dict.fromkeys(lease.sources, CHUNK)
        engine.cache.loaded(match, tiers, lease.first)
        self._world.after("loaded")

    async def _save(self, rng: random.Random, engine: Engine, prefix: Prefix) -> None:
        chunks = len(prefix.names)
        saved = 0
        for upto in sorted({rng.randint(0, chunks), chunks}):
            await pause(rng)
            computed = prefix.head(prefix.tokens, upto)
            known = self._oracle.known(computed)
            tables, retention = self._world.tables.of(rng, upto), self._removals.retention(computed)
            plan = engine.cache.plan_save(computed, tables, first=saved, retention=retention)
            if known >= saved and self._world.atomic:  # otherwise the chain was broken before
                self._oracle.expect_known(computed, known)
            saved = upto
            self._world.after(f"plan save {'of nothing' if plan is None else plan.id}")
            if plan is None:
                continue
            self._world.saved_chunks += engine.device.chunks(plan)
            good = rng.random() > 0.1
            copy = engine.device.save(rng, plan, prefix, good=good)
            if rng.random() < 0.5:
                await asyncio.shield(copy)
