"""A Tier: a Store with I/O threads, checksums, a circuit breaker and a bound on hung calls.

Whatever the Store does, what comes out is a value: exact bytes, or a status that says why not.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import operator
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, TypeVar

from kvtier.clock import Clock
from kvtier.deadline import NEVER, Deadline, under
from kvtier.events import Reporter, noted
from kvtier.identity.record import CODEC_RAW, Header, RecordId
from kvtier.metrics import Metrics
from kvtier.seams import Flow, IoPool
from kvtier.tiers.ailments import IN_A_ROW, Ailments
from kvtier.tiers.breaker import Breaker
from kvtier.tiers.budget import WriteBudget
from kvtier.tiers.coding import Coding, Written, blamed, is_failed, is_full, send_each
from kvtier.tiers.exact import Fetched, Wanted, guarded, verify
from kvtier.tiers.listing import Listing
from kvtier.tiers.mending import Mending
from kvtier.tiers.pack import longest_order, pair_bytes
from kvtier.tiers.packer import packer_for
from kvtier.tiers.settling import Settling
from kvtier.tiers.store import EncodedStore, Status, Store, Write
from kvtier.tiers.tally import Tally
from kvtier.tiers.unopened import UnopenedStore

__all__ = ["Fetched", "Tier", "Wanted", "Written"]

A = TypeVar("A")
T = TypeVar("T")

HUNG_SECONDS: Final = 30.0
"""A call that runs longer counts as hung."""

_FAIR_SECONDS: Final = 0.1
"""A call that was given less time, and failed as that was over, does not count for the breaker."""

_HANGS: Final = f"every call hangs for more than {HUNG_SECONDS:.0f} s"
_CLOSE_SECONDS: Final = 5.0


class Tier:
    """One tier below DRAM. Its coroutines run on the Flow; none raises for a fault below.

    admission: which parts it takes, see Admission. writes: how much may be sent to the Store.
    coding: what encodes records on their way down, if anything does; any codec is read.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        flow: Flow,
        metrics: Metrics,
        clock: Clock,
        *,
        admission: str = "through",
        writes: WriteBudget | None = None,
    ) -> None:
        self.name = name
        self.admission = admission
        self.writes = writes or WriteBudget(math.inf, clock)
        self._flow = flow
        self._metrics = metrics
        self._clock = clock
        self.coding: Coding | None = None
        self._pool = IoPool(name, store.THREADS)
        self._breaker = Breaker(clock)
        self._report = Reporter(clock)
        self._running: dict[int, float] = {}
        self._tasks: dict[int, asyncio.Task[object]] = {}
        self._calls = 0
        self._ailments = Ailments()
        self.take(store)

    def take(self, store: Store) -> None:
        """Keep records in this Store from now on; the one before was never open. On the Flow."""
        self._mending = Mending(store)
        self._packer = packer_for(store, self._mending, self.coding)
        self._heeds = store.capabilities.deadlines
        self._pool.threads = store.THREADS
        self._tally = Tally(self.name, store, self._metrics)
        self._settling = Settling(self.name, store, self._clock)
        self.store = store  # now that nothing of it can fail any more
        self._breaker.held = isinstance(store, UnopenedStore)
        self._ailments.works("open")
        if isinstance(store, UnopenedStore):
            self.fails_to_open(store.why)

    async def io(self, call: Callable[..., T], *args: object) -> T:
        """Run what is no call of the Store on the tier's pool, whatever the breaker says."""
        return await self._flow.io(self._pool, call, *args)

    def fails_to_open(self, why: str) -> None:
        """Take note that its Store could not be opened."""
        self._metrics.add("tier_errors", tier=self.name)
        self._report.warn(self.name, why)
        self._ailments.fails("open", why)

    def encode_by(self, coding: Coding) -> None:
        """Let records be encoded. To be called before anything else."""
        self.coding = coding
        if self._packer is not None:
            self._packer.coding = coding

    @property
    def available(self) -> bool:
        """Say whether calls pass at the moment."""
        return self._breaker.closed and not self._hung()

    @property
    def readable(self) -> bool:
        """Say whether calls that read pass at the moment."""
        return self._breaker.reads and not self._hung()

    @property
    def silent(self) -> bool:
        """Say whether it would not be read at the moment."""
        return self._breaker.rests or self._hung()

    @property
    def trouble(self) -> str:
        """Return what of it does not work at the moment, and why; nothing while all does."""
        least = IN_A_ROW if self._breaker.closed else 1
        return _HANGS if self._hung() else self._ailments.trouble(least)

    @property
    def ails(self) -> str:
        """Return what of it did not work the last time, and why."""
        return self._ailments.trouble(1)

    def footprint(self, nbytes: int, *, encoded: bool = False, store: Store | None = None) -> int:
        """Return the bytes of the budget that a part takes; its payload if the Store fails.

        Where parts are packed, it is a part's share of the shortest pack, in which it is largest.
        encoded: its payload is what a codec left. store: which is to be taken, and packs nothing.
        """
        at = store or self.store
        of = at.encoded_footprint if encoded and isinstance(at, EncodedStore) else at.footprint
        try:
            found = operator.index(of(nbytes))
            if self.longest_order(nbytes):
                found = max(found, -(-operator.index(of(pair_bytes(nbytes))) // 2))
        except Exception as error:  # noqa: BLE001  (a plug-in may raise anything; P2)
            self._report.warn(self.name, f"footprint: {type(error).__name__}: {error}")
            return nbytes
        if found < 1:  # a record that takes nothing would never make a tier full
            self._report.warn(self.name, f"footprint: {found} bytes for {nbytes}")
            return nbytes
        return found

    def charge(self, header: Header) -> int:
        """Return the same of a record as it was written."""
        return self.footprint(header.stored_bytes, encoded=header.codec != CODEC_RAW)

    async def read(self, wanted: Sequence[Wanted], deadline: Deadline = NEVER) -> list[Fetched]:
        """Fill the buffers with verified bytes. A buffer is the call's until this returns.

        deadline: until when it is waited for; a Store that heeds it fails what is not there then.
        """
        failed = [Fetched(Status.FAILED)] * len(wanted)
        out = await self._call("read", self._read, list(wanted), failed, deadline=deadline)
        if self._late(deadline):
            out = [one._replace(late=one.status is Status.FAILED) for one in out]
        for warning in self._tally.fetched(out, wanted):
            self._report.warn(self.name, warning)
        return out

    async def write(self, records: Sequence[Write]) -> list[Status]:
        """Write records, out of the write budget. Payloads are the call's until this returns."""
        return [one.status for one in await self._write(records)]

    async def _write(self, records: Sequence[Write]) -> list[Written]:
        headers = [record.header for record in records]
        failed = [Written(Status.FAILED, header) for header in headers]
        sent = sum(self.footprint(header.stored_bytes) for header in headers)
        out = await self._call("write", self._send, list(records), failed, sent)
        if self.coding is not None:
            self.writes.spend(sum(self.charge(one.header) for one in out) - sent)
        written = sum(one.header.stored_bytes for one in out if one.status is Status.OK)
        self._metrics.add("spilled_bytes", written, tier=self.name)
        self._settling.note()
        return out

    def _send(self, records: list[Write]) -> list[Written]:
        """Write records, on a thread of the pool, as they are or encoded."""
        if self._packer is not None:
            return self._packer.send(records)
        return self._mending.spare(records, lambda rest: send_each(self.store, rest, self.coding))

    async def delete(self, ids: Sequence[RecordId]) -> list[Status]:
        """Delete records, and with one that lies in a pack all of that pack."""
        verbs = self._packer or self.store
        out = await self._call("delete", verbs.delete_many, list(ids), [Status.FAILED] * len(ids))
        self._settling.note()
        return out

    async def evict(self, ids: Sequence[RecordId]) -> list[Status]:
        """Let records go: they are deleted, a pack when all its records were let go."""
        if self._packer is None:
            return await self.delete(ids)
        return await self._call(
            "delete", self._packer.evict_many, list(ids), [Status.FAILED] * len(ids)
        )

    async def contains(self, ids: Sequence[RecordId], deadline: Deadline = NEVER) -> list[Status]:
        """Say which records are there; a hint, since a shared tier changes by itself."""
        none, look = [Status.FAILED] * len(ids), self.store.contains_many
        out = await self._call("look up", look, list(ids), none, deadline=deadline)
        return self._mending.looked(ids, out)

    # ---- packs

    @property
    def packs(self) -> bool:
        """Say whether small parts lie in packs."""
        return self._packer is not None

    def longest_order(self, nbytes: int) -> int:
        """Return how many parts of so many bytes may lie in one record, as a power of two."""
        return longest_order(nbytes) if self._packer else 0

    def learn(self, members: Sequence[RecordId], nbytes: int) -> bool:
        """Take it that the Store has the pack of such parts; False if it has to go."""
        return self._packer is None or self._packer.learn(members, nbytes)

    async def write_all(self, records: Sequence[Write]) -> list[Written]:
        """Write records, ancestors first, with as many calls in parallel as the Store takes."""
        runs = self._packer.runs(records) if self._packer else [[at] for at in range(len(records))]
        calls = min(self.store.THREADS, len(runs))
        lots = (runs[len(runs) * i // calls : len(runs) * (i + 1) // calls] for i in range(calls))
        portions = [list(itertools.chain.from_iterable(lot)) for lot in lots]
        writing = (self._write([records[at] for at in portion]) for portion in portions)
        outcomes = await asyncio.gather(*writing)
        out: dict[int, Written] = {}
        for portion, outcome in zip(portions, outcomes, strict=True):
            out |= zip(portion, outcome, strict=True)
        return [out[at] for at in range(len(records))]

    def settle(self) -> None:
        """See Settling. To be called again and again, on the Flow."""
        if self.available:
            self._settling.settle(lambda call: self._call("commit", call, [None], [Status.FAILED]))

    async def listed(self, most: int) -> AsyncIterator[list[Header] | None]:
        """Yield the headers of all records, `most` at a time; None last when it failed.

        What comes or goes meanwhile may be among them or not.
        """
        listing, failed = Listing(self.store, most), list[list[Header] | None]([None])

        def take(_: list[None]) -> list[list[Header] | None]:
            return [listing.take()]

        while not listing.ended:
            (lot,) = await self._call("list", take, [None], failed)
            yield lot
            if lot is None:
                return

    def figures(self) -> None:
        """Set the gauges. From any thread."""
        self._tally.requests()
        if self._packer is not None:
            self._metrics.set("pack_residue_parts", self._packer.places.residue, tier=self.name)
        if self.coding is not None:
            self.coding.figures()
        if math.isfinite(self.writes.a_day):
            self._metrics.set("write_budget_bytes", self.writes.left, tier=self.name)

    def close(self) -> None:
        """End the threads and close the Store, both bounded. Blocks."""
        self._pool.close(_CLOSE_SECONDS)
        closer = IoPool(f"{self.name}-close", 1)  # a call that hangs may hold the Store's lock
        try:
            closer.submit(self.store.close).result(_CLOSE_SECONDS)
        except TimeoutError:
            self._report.warn(self.name, "close: it hangs, and is left behind")
        except Exception as error:  # noqa: BLE001  (a plug-in may raise anything; P2)
            self._report.warn(self.name, f"close: {type(error).__name__}: {error}")
        closer.close(1.0)

    async def _call(
        self,
        verb: str,
        call: Callable[[list[A]], list[T]],
        items: list[A],
        failed: list[T],
        sent: int = 0,
        deadline: Deadline = NEVER,
    ) -> list[T]:
        """Run a batch in the pool; answer `failed` when the breaker is open or the call raises.

        verb: what is done, as people are told it. sent: bytes of the write budget that it takes.
        Cancelling this does not stop the call, and it is counted until it ends.
        """
        if not items:
            return []
        if self._hung():
            self._metrics.add("tier_errors", tier=self.name)
            self._report.warn(self.name, _HANGS)
            return failed
        if not self._breaker.allow(verb):
            return failed
        self.writes.spend(sent)
        serial = self._calls = self._calls + 1
        why: list[str] = []

        def begun(items: list[A]) -> list[T]:
            if self._late(deadline):  # it has waited for a thread, and nobody for it
                return failed
            self._running[serial] = self._clock()
            noted()  # of a call before
            with under(deadline):
                out = guarded(call, items)
            why[:] = blamed(out, noted())
            return out

        def fair() -> bool:
            since = self._running.get(serial, math.inf)
            return not self._late(deadline) or deadline.until - since >= _FAIR_SECONDS

        running = self._run(verb, begun, items, failed, why, fair)
        task = asyncio.create_task(running, name=f"{self.name}-{serial}")
        self._tasks[serial] = task

        def ended(_: object) -> None:
            self._running.pop(serial, None)
            del self._tasks[serial]

        task.add_done_callback(ended)
        return await asyncio.shield(task)

    async def _run(
        self,
        verb: str,
        call: Callable[[list[A]], list[T]],
        items: list[A],
        failed: list[T],
        why: Sequence[str],
        fair: Callable[[], bool],
    ) -> list[T]:
        """See ``_call``. fair: whether the call had time enough for its end to mean something."""
        try:
            out = await self._flow.io(self._pool, call, items)
            self._tally.faults()
        except Exception as error:  # noqa: BLE001  (P2)
            self._tally.faults()
            self._metrics.add("tier_errors", tier=self.name)
            self._report.warn(self.name, str(error))
            if fair():
                self._ailments.fails(verb, str(error))
                self._breaker.report(verb, ok=False)
            else:
                self._breaker.pass_over()
            return failed
        bad = sum(is_failed(one) for one in out)
        if bad:
            self._metrics.add("tier_errors", bad, tier=self.name)
        if bad == len(out) and not fair():
            self._breaker.pass_over()
            return out
        if why:
            self._ailments.fails(verb, why[0])
        elif not all(map(is_full, out)):  # that says nothing of the medium
            self._ailments.works(verb)
        self._breaker.report(verb, ok=bad < len(out))
        return out

    def _late(self, deadline: Deadline) -> bool:
        """Say whether the Store has given up, or will."""
        return self._heeds and deadline.left(self._clock()) <= 0

    def _hung(self) -> bool:
        """Say whether every thread sits in a call that does not return."""
        late = self._clock() - HUNG_SECONDS
        return sum(start < late for start in tuple(self._running.values())) >= self.store.THREADS

    def _read(self, wanted: list[Wanted]) -> list[Fetched]:
        """Read and verify, on a thread of the pool."""
        began = self._clock() if self.coding else 0.0
        ids, into = [one.id for one in wanted], [one.into for one in wanted]
        records: Sequence[RecordId | None] = ids
        if self._packer:
            reads, records = self._packer.fetch(ids, into)
        else:
            reads = self.store.read_many(ids, into)
        if self.coding:
            self.coding.received(reads, self._clock() - began)
        out = [verify(read, one) for read, one in zip(reads, wanted, strict=True)]
        self._mending.learn(ids, records, out)
        return out
