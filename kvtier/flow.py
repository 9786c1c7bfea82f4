"""What moves between tiers: publish, spill, probe and fetch, on the flow loop.

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

from kvtier.catalog.catalog import LOT, Catalog, Found, Part
from kvtier.catalog.explain import ago
from kvtier.catalog.fetch import Fetcher
from kvtier.catalog.lease import Lease
from kvtier.catalog.probe import Probe, search
from kvtier.catalog.removal import Withdrawn
from kvtier.catalog.spill import Spiller
from kvtier.catalog.strays import Strays
from kvtier.catalog.sweep import Sweeper
from kvtier.clock import Clock
from kvtier.deadline import Deadline
from kvtier.errors import MisuseError
from kvtier.events import Reporter
from kvtier.identity.record import RecordId, checksum, split_record_id
from kvtier.memory.arena import Arena, Slot
from kvtier.metrics import Metrics
from kvtier.prefix import Prefix
from kvtier.seams import Flow, Future, IoPool
from kvtier.tiers.pack import Run, pack_id
from kvtier.tiers.store import Status
from kvtier.tiers.tier import Tier

__all__ = ["Moves", "Saved"]

_log = logging.getLogger("kvtier")
_HASH_THREADS: Final = 1
_EXPIRE_SECONDS: Final = 0.25
_MOST_KNOWN: Final = 1 << 19  # parts of a shared tier, of some hundred bytes each in the index
_ASK_SECONDS: Final = 1.0  # that a look-up has, though its fetch has less: the next has the answer
_ENDS: Final = 32  # chunks before the end of a prefix, where windows and states are looked for


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
            number: Strays(tier, functools.partial(catalog.take_withdrawn, number))
            for number, tier in tiers.items()
        }
        self.sweeper = Sweeper(catalog, tiers, strays, clock)
        self._strays = strays
        self._tiers = tiers
        self._fetcher = Fetcher(catalog, arena, tiers, strays, clock)
        self._spillers = {
            number: Spiller(catalog, arena, number, tier, metrics, strays[number], clock)
            for number, tier in tiers.items()
        }
        self._shared = {n: t for n, t in tiers.items() if t.store.capabilities.shared}
        self._clock = clock
        self._report = Reporter(clock)
        self._probe = Probe(clock)
        self._searches = 0
        self._asking: set[asyncio.Task[bool]] = set()
        self._hashing = IoPool("hash", _HASH_THREADS)
        self._saved: deque[list[Saved]] = deque()
        self._publishing = asyncio.Lock()

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
        """Return when all that was saved is written down, and deleted what was withdrawn."""
        await self._publish()
        for spiller in self._spillers.values():
            await spiller.drained()
        await self.sweeper.sweep()

    # ---- fetch

    def worth_asking(self, name: RecordId) -> bool:
        """Say whether a shared tier may have a part that the index does not know."""
        return bool(self._shared) and self._probe.due(name)

    def asked(self, name: RecordId) -> str:
        """Tell whether the shared tiers were asked for a part that the index does not know."""
        shared = ", ".join(tier.name for tier in self._shared.values())
        seconds = self._probe.asked(name)
        if not shared:
            return ""
        if seconds is None:
            return f" {shared} was not asked yet; a fetch asks."
        return f" {shared} had it not when asked {ago(seconds)}."

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
        if ask and await self._ask_within(prefix, found.chunks, within):
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

    async def _ask_within(self, prefix: Prefix, known: int, seconds: float) -> bool:
        """Ask the shared tiers for what they have of a prompt beyond the `known` chunks.

        False when they have not answered in time, or have nothing. A late answer is taken all
        the same: the next match knows it.
        """
        deadline = Deadline(self._clock() + max(seconds, _ASK_SECONDS))
        asking = asyncio.create_task(self._ask(prefix, known, deadline), name="ask")
        self._asking.add(asking)  # the loop itself keeps only a weak reference
        asking.add_done_callback(self._asking.discard)
        await asyncio.wait((asking,), timeout=seconds)
        return asking.done() and asking.result()

    async def _ask(self, prefix: Prefix, known: int, deadline: Deadline) -> bool:
        """Index what a shared tier says it has of a prompt; say whether it has anything."""
        shape = prefix.shape
        stop = min(-(-prefix.limit // shape.chunk_tokens), len(prefix.names))
        places = shape.always or tuple(range(len(shape.names)))
        for number, tier in self._shared.items():
            withdrawn = self._catalog.watch()
            try:
                found = self._before_doomed(prefix, known, stop, number)
                orders = [tier.longest_order(shape.nbytes[at]) for at in places]
                for order in dict.fromkeys(orders):  # parts of one grid are looked up together
                    some = [at for at, one in zip(places, orders, strict=True) if one == order]
                    found = await self._search(prefix, known, found, number, some, deadline)
                if found > known:
                    parts = [prefix.part(c, at) for c in range(known, found) for at in places]
                    self._note(parts, number, withdrawn)
                    await self._ask_for_ends(prefix, found, number, withdrawn, deadline)
                    return True
            finally:
                self._catalog.unwatch(withdrawn)
        self._probe.missing(prefix.names[known][0])
        return False

    def _before_doomed(self, prefix: Prefix, known: int, stop: int, number: int) -> int:
        """Return the first chunk, of those asked for, of which a tier has yet to delete a part.

        It may be gone when the answer comes, so it is not asked for.
        """
        strays = self._strays[number]
        if not len(strays):
            return stop
        return next((c for c in range(known, stop) if strays.count(prefix.names[c])), stop)

    async def _search(
        self,
        prefix: Prefix,
        known: int,
        stop: int,
        number: int,
        places: Sequence[int],
        deadline: Deadline,
    ) -> int:
        """Return how far a tier has the parts of one grid, from a known chunk on.

        Of each run one part is asked for, and of the next prompt's another, so that a look-up
        costs the same for many ranks; what the others lack, their reads find out.
        """
        tier, names = self._shared[number], prefix.names
        nbytes = prefix.shape.nbytes[places[0]]
        self._searches += 1
        turn = self._searches

        async def ask(runs: Sequence[Run]) -> list[bool]:
            chosen = [places[(run.start + turn) % len(places)] for run in runs]
            last = [names[run.stop - 1][at] for run, at in zip(runs, chosen, strict=True)]
            packs = [pack_id(name, run.order) for name, run in zip(last, runs, strict=True)]
            return [status is Status.OK for status in await tier.contains(packs, deadline)]

        end, packs = await search(known, stop, tier.longest_order(nbytes), ask)
        for run in packs:
            for at in places:
                tier.learn([names[c][at] for c in range(run.start, run.stop)], nbytes)
        return end

    async def _there(self, number: int, parts: Sequence[Part], deadline: Deadline) -> list[bool]:
        """Say which parts a tier has, without those that are to be deleted there."""
        strays = self._strays[number]
        asked = [part.name for part in parts if part.name not in strays]
        told = await self._shared[number].contains(asked, deadline)
        answers = dict(zip(asked, told, strict=True))
        return [answers.get(part.name) is Status.OK for part in parts]

    async def _ask_for_ends(
        self, prefix: Prefix, stop: int, number: int, withdrawn: Withdrawn, deadline: Deadline
    ) -> None:
        """Index the windows and states that a shared tier has of a prompt's last chunks."""
        shape = prefix.shape
        if shape.plain or not shape.always:
            return
        chunks = range(max(stop - _ENDS, 0), stop)
        rest = [at for at in range(len(shape.names)) if at not in shape.always]
        parts = [prefix.part(chunk, at) for chunk in chunks for at in rest]
        answers = await self._there(number, parts, deadline)
        there = [part for part, answer in zip(parts, answers, strict=True) if answer]
        self._note(there, number, withdrawn)

    def _note(self, parts: Sequence[Part], number: int, withdrawn: Withdrawn) -> None:
        tier = self._shared[number]
        for part in parts:
            self._catalog.stored(part, number, tier.footprint(part.nbytes), withdrawn)

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
        while True:
            await asyncio.sleep(_EXPIRE_SECONDS)
            self._catalog.expire()
            for spiller in self._spillers.values():
                await spiller.expire()
            await self.sweeper.expire()
            for number in self._shared:  # what is forgotten is asked for, and found, again
                await self._drop(number, keep=_MOST_KNOWN)
            self.sweeper.expire_idle()
            for tier in self._tiers.values():
                tier.settle()

    def close(self) -> None:
        """End the hashing threads. The tiers are closed by their owner."""
        self._hashing.close()


def _tell(done: Future[None]) -> None:
    """Log what nobody waits for: that it fails is a defect."""
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.error("chunks could not be published or offered", exc_info=error)
