"""What moves between tiers: publish, spill and fetch, on the flow loop.

Each multi-step move is one coroutine that reads from top to bottom.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtier.asking import Asking
from kvtier.catalog.catalog import LOT, Catalog, Found, Part
from kvtier.catalog.fetch import Fetcher
from kvtier.catalog.lease import Lease
from kvtier.catalog.spill import Spiller
from kvtier.catalog.strays import Strays
from kvtier.catalog.sweep import Sweeper
from kvtier.clock import Clock
from kvtier.errors import MisuseError
from kvtier.events import Reporter
from kvtier.identity.record import RecordId, checksum, split_record_id
from kvtier.memory.arena import Arena, Slot
from kvtier.metrics import Metrics
from kvtier.prefix import Prefix
from kvtier.seams import Flow, Future, IoPool
from kvtier.tiers.tier import Tier

_log = logging.getLogger("kvtier")
_HASH_THREADS: Final = 1
_EXPIRE_SECONDS: Final = 0.25
_MOST_KNOWN: Final = 1 << 19  # parts of a shared tier, of some hundred bytes each in the index


@dataclass(frozen=True, slots=True)
class Saved:
    """One reserved part whose copy has ended; `ok` says whether its bytes are whole."""

    part: Part
    slot: Slot
    ok: bool


class Moves:
    """The coroutines of one Depot. All are started through the Flow, and run on its loop."""

    def __init__(
        self,
        catalog: Catalog,
        arena: Arena,
        tiers: Mapping[int, Tier],
        flow: Flow,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._catalog = catalog
        self._arena = arena
        self._flow = flow
        self._metrics = metrics
        strays = {
            number: Strays(
                tier,
                functools.partial(catalog.take_withdrawn, number),
                functools.partial(self._give_up, tier.name),
            )
            for number, tier in tiers.items()
        }
        self.sweeper = Sweeper(catalog, tiers, strays, clock)
        self.strays = strays
        self._tiers = tiers
        self._fetcher = Fetcher(catalog, arena, tiers, strays, clock)
        self._spillers = {
            number: Spiller(catalog, arena, number, tier, metrics, strays[number], clock)
            for number, tier in tiers.items()
        }
        self._shared = {n: t for n, t in tiers.items() if t.store.capabilities.shared}
        self._clock = clock
        self._report = Reporter(clock)
        self.asking = Asking(catalog, self._shared, strays, clock)
        self._hashing = IoPool("hash", _HASH_THREADS)
        self._saved: deque[list[Saved]] = deque()
        self._publishing = asyncio.Lock()

    def _give_up(self, name: str, deletions: int) -> None:
        """Tell that a tier has been away for so long that some deletions are tried no more."""
        self._metrics.add("dropped_deletions", deletions, tier=name)
        self._report.warn(name, "too many deletions wait: the oldest records are left there")

    # ---- save

    def saved(self, saved: list[Saved]) -> None:
        """Take parts whose copies have ended, in order. Never blocks; from any thread.

        Once the flow is closed nothing is published any more: the slots go with the arena.
        """
        self._saved.append(saved)
        self._unless_closed(self._publish())

    async def _publish(self) -> None:
        """Seal and commit parts, then offer them to the slower tiers.

        One task at a time does it, in the order in which they were saved, so that a child never
        comes before its parent.
        """
        async with self._publishing:
            while self._saved:
                parts = self._saved.popleft()
                fates = [await self._commit(one) for one in parts]
                self._count(parts, fates)
                self._catalog.outgrown([one.part.name for one in parts if one.part.outgrown])
                await self._offer(
                    [one.part.name for one, why in zip(parts, fates, strict=True) if not why]
                )

    async def _commit(self, one: Saved) -> str:
        """Commit a part, or take its slot back and say why."""
        name, slot = one.part.name, one.slot
        if not one.ok:
            self._catalog.abort(name, slot)
            return "copy"
        data = self._arena.view(slot.offset, one.part.nbytes)
        try:
            raw_sum = await self._flow.io(self._hashing, checksum, data)
        except Exception as error:  # noqa: BLE001  (no memory, no thread: the slot must come back)
            self._report.warn("save", f"{type(error).__name__}: {error}")
            self._catalog.abort(name, slot, "failed")
            return "failed"
        return "" if self._catalog.commit(name, slot, raw_sum) else "orphan"

    def _count(self, parts: Sequence[Saved], fates: Sequence[str]) -> None:
        """Count chunks, not parts: one is saved when all its parts are."""
        chunks: dict[bytes, str] = {}
        for one, why in zip(parts, fates, strict=True):
            key, _ = split_record_id(one.part.name)
            chunks[key] = chunks.get(key) or why
        for why in chunks.values():
            if why:
                self._metrics.add("dropped_saves", reason=why)
            else:
                self._metrics.add("saved_chunks")

    async def _offer(self, names: Sequence[RecordId]) -> None:
        """Offer parts in DRAM to every slower tier that lacks them."""
        for spiller in self._spillers.values():
            await spiller.offer(names)

    @property
    def counts_uses(self) -> bool:
        """Whether some tier wants to know what is used again. From any thread."""
        return any(spiller.admission.counts_uses for spiller in self._spillers.values())

    def used(self, names: Sequence[RecordId]) -> None:
        """Offer parts that were used, or came back into DRAM.

        Never blocks; from any thread. Once the flow is closed nothing is offered any more.
        """
        self._unless_closed(self._offer(names))

    def _unless_closed(self, work: Coroutine[Any, Any, None]) -> None:
        """Start what nobody waits for; an engine may still report when the cache is closed."""
        with contextlib.suppress(MisuseError):
            self._flow.spawn(work).add_done_callback(_tell)

    async def drained(self) -> None:
        """Return when nothing waits to be published, written down or deleted any more."""
        await self._publish()
        for spiller in self._spillers.values():
            await spiller.drained()
        await self.sweeper.sweep()

    # ---- fetch

    async def fetch(
        self,
        prefix: Prefix,
        first: int,
        found: Found,
        *,
        ask: bool,
        within: float,
        hold: float,
        pin: int = 0,
        ahead: bool = False,
    ) -> Lease | None:
        """Bring chunks of a prompt up into DRAM and lease them.

        first: the first chunk that is wanted; found: what the index knew; ask: the shared tiers
        too, for what follows that. Takes `within` seconds at most, a tier that does not answer
        included. pin, ahead: see ``Fetcher.fetch``.
        """
        began = self._clock()
        if ask and await self.asking.within(prefix, found.chunks, within):
            found = self._catalog.match(prefix.names, prefix.shape, prefix.limit)
        asked = self._clock() - began
        if found.tokens <= first * prefix.shape.chunk_tokens:
            return None
        left = max(within - asked, 0.0)
        lease = await self._fetcher.fetch(
            prefix, first, found.tokens, within=left, hold=hold, pin=pin, ahead=ahead
        )
        if lease is not None:
            lease.asked = asked
            if not ahead:
                self.used([name for chunk in lease.names for name in chunk])
        return lease

    async def prefetch(self, prefix: Prefix, found: Found, *, ask: bool, within: float) -> int:
        """Bring a prompt up into DRAM, as far as `within` seconds suffice, and hold nothing.

        What was not found is not brought up, unless the shared tiers are to be asked.
        Returns the tokens that DRAM has of it then. What prefetches may read at a time is little,
        so it goes on by and by, and ends where nothing comes any more.
        """
        until = self._clock() + within
        most = prefix.limit if ask else found.tokens
        reached = 0
        while True:
            left = max(until - self._clock(), 0.0)
            lease = await self.fetch(
                prefix, 0, found, ask=ask, within=left, hold=_EXPIRE_SECONDS, ahead=True
            )
            tokens = 0
            if lease is not None:
                with lease:
                    tokens = lease.tokens
            found = self._catalog.match(prefix.names, prefix.shape, most)
            if tokens <= reached or tokens >= found.tokens or self._clock() >= until:
                return tokens
            reached, ask = tokens, False

    # ---- clear, expire

    async def clear(self, number: int) -> None:
        """Take everything that nobody holds out of a tier."""
        if number in self._spillers:
            await self._spillers[number].clear()
        else:
            await self._drop(number, keep=0)

    async def _drop(self, number: int, *, keep: int) -> None:
        """Take parts out of a tier's index alone."""
        # Engine threads want the lock between lots, and their saves must not keep it up.
        while len(self._catalog.clear(number, keep)) == LOT:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def reap(self) -> None:
        """End leases, parts and waiting writes at their deadlines, for as long as the loop runs."""
        spills = [spiller.expire for spiller in self._spillers.values()]
        duties = [self._expire, *spills, self.sweeper.expire, self._forget, self._settle]
        while True:
            await asyncio.sleep(_EXPIRE_SECONDS)
            for duty in duties:
                try:
                    await duty()
                except Exception as error:  # noqa: BLE001  (a defect must not end the others)
                    self._report.warn("upkeep", f"{type(error).__name__}: {error}")

    async def _expire(self) -> None:
        """End leases and plans at their deadlines, and what was idle for its tier's ttl."""
        self._catalog.expire()
        self.sweeper.expire_idle()

    async def _forget(self) -> None:
        """Let the index forget of shared tiers what is too much; it is found again by asking."""
        for number in self._shared:
            await self._drop(number, keep=_MOST_KNOWN)

    async def _settle(self) -> None:
        for tier in self._tiers.values():
            tier.settle()

    def close(self) -> None:
        """End the hashing threads. The tiers are closed by their owner."""
        self._hashing.close()


def _tell(done: Future[None]) -> None:
    """Log what nobody waits for: that it fails is a defect."""
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.error("chunks could not be published or offered", exc_info=error)
