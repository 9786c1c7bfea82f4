"""How often the races of interest were reached in one simulated run, and when.

A guard that no schedule ever leans on is not tested by a thousand clean ones. The counters sit
around the core's own calls, look, and change nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from kvtier.cache import Cache, Match
from kvtier.catalog.catalog import Part
from kvtier.catalog.index import DRAM, NO_ROW
from kvtier.catalog.lease import Lease, LeaseState
from kvtier.catalog.strays import Strays
from kvtier.identity.record import RecordId
from kvtier.testing.inside import inside
from kvtier.tiers.store import Status
from kvtier.tiers.tier import Fetched, Tier, Wanted

EVENTS: Final = {
    "fetch_joined": "a fetch waits for a read that another fetch began",
    "waiter_timed_out": "a fetch ended while its read went on",
    "fetch_abandoned": "nobody wanted a fetch any more",
    "request_cancelled": "a request was cancelled at one of its awaits",
    "lease_refused": "a matched chunk was no longer in DRAM",
    "lease_expired": "a lease ended by its deadline",
    "lease_expired_with_plan_out": "its slots stay until the copy has settled",
    "plan_refused": "a plan was asked for after the lease's deadline",
    "eviction_refused_for_hold": "a part stayed because something held it",
    "eviction_refused_for_child": "a part stayed because it has children there",
    "last_copy_evicted": "nothing else could leave, so children below lost their parent",
    "save_refused_for_room": "no slot was free for a chunk",
    "save_copy_failed": "a reserved slot was not filled",
    "commit_refused": "the parent was gone when the bytes were whole",
    "orphan_made": "a part's parent left its last tier",
    "orphan_revived": "the parent of a part came back",
    "spill_dropped_evicted": "a part left DRAM before its turn to be written",
    "spill_dropped_full": "a tier had no room for a part",
    "spill_dropped_failed": "a tier failed to write a part",
    "spill_dropped_headless": "a part was not written since its parent was not",
    "spill_dropped_budget": "a tier's write budget was spent",
    "spill_dropped_deadline": "a part waited for too long to be written",
    "clear_while_held": "a tier was cleared while parts were held",
    "probe_answered": "a shared tier had chunks that the index did not know",
    "probe_late": "a shared tier answered after the fetch had ended",
    "stray_noted": "a record may be in a Store though the index does not say so",
    "stray_deleted": "such a record was found and deleted",
    "read_corrupt": "bytes from below were not those that were written",
    "read_absent": "a tier had lost a part",
    "other_copy_served": "one tier failed to return a part, the next returned it",
    "breaker_opened": "a tier failed so often that it is left alone",
    "breaker_refused": "a call was not made because the breaker is open",
    "breaker_tried": "one call tried a tier that had been left alone",
    "calls_hung": "every thread of a tier sat in a call that did not return",
    "withdrawn_while_held": "a part was withdrawn while a lease, a plan or a write held its slot",
    "withdrawn_while_saved": "a part was withdrawn before its bytes were whole",
    "withdrawn_while_read": "a part was withdrawn while it was read from below",
    "withdrawn_while_written": "a part was written to a tier after it was withdrawn",
    "withdrawn_while_asked": "a shared tier was asked for a part before it was withdrawn",
    "saved_anew_while_held": "a part was saved again while its withdrawn slot was still held",
    "deleted_too_late": "a part was saved again before a store had deleted it",
    "part_expired": "a part was kept for its time, and left all tiers",
    "crashed": "the process ended between two steps, and a cache was opened on what was left",
    "crash_met_call": "a call of a store was under way then; it took effect or did not",
    "crash_lost_record": "what a store had not synced was gone",
    "crash_tore_record": "a record was there in part",
    "crash_left_orphan": "a part was there, and its parent in no tier",
}
"""Every event, and what it says."""


class Events:
    """Counts the events of one Cache. tell: called with each name as it happens."""

    def __init__(self, cache: Cache, tell: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))
        self._cache = cache
        self._tell = tell
        self._index = inside(cache).catalog._index
        self._failed: dict[RecordId, None] = {}
        self._watch_catalog()
        self._watch_index()
        self._watch_moves()
        self._watch_removal()
        for tier in inside(cache).depot.tiers.values():
            self._watch_tier(tier)

    def count(self, name: str) -> None:
        """Count one event."""
        self.counts[name] += 1
        self._tell(name)

    def finish(self, *, cancelled: int, abandoned: int) -> None:
        """Add what the cache itself has counted. cancelled: requests; abandoned: fetches."""
        get = self._cache.metrics.get
        for why in ("evicted", "full", "failed", "headless", "budget", "deadline"):
            self.counts[f"spill_dropped_{why}"] = int(get("dropped_spills", reason=why))
        self.counts["save_refused_for_room"] = int(get("dropped_saves", reason="busy"))
        self.counts["save_copy_failed"] = int(get("dropped_saves", reason="copy"))
        self.counts["request_cancelled"] = cancelled
        self.counts["fetch_abandoned"] = abandoned

    def _after(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        """Have ``look(result, *args)`` called after each call of an object's method."""
        inner = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            look(result, *args)
            return result

        setattr(owner, name, watched)

    def _after_await(self, owner: Any, name: str, look: Callable[..., None]) -> None:
        inner = getattr(owner, name)

        async def watched(*args: Any, **kwargs: Any) -> Any:
            result = await inner(*args, **kwargs)
            look(result, *args)
            return result

        setattr(owner, name, watched)

    # ---- the Catalog

    def _watch_catalog(self) -> None:
        catalog = inside(self._cache).catalog
        self._after(catalog, "issue", self._if_not("plan_refused"))
        self._after(catalog, "commit", self._if_not("commit_refused"))
        self._after(catalog, "hold_for_fetch", self._held_for_fetch)
        self._after(catalog, "release_rows", self._waited)
        self._after(catalog._room, "last_copy", self._evicted_last_copy)
        clear, end, lease = catalog.clear, catalog._leases.end, self._cache.lease

        def watched_lease(match: Match, *, deadline: float, first: int = 0) -> Lease | None:
            leased = lease(match, deadline=deadline, first=first)
            if leased is None and match.chunks > first:
                self.count("lease_refused")
            return leased

        def watched_clear(tier: int, keep: int = 0) -> Any:
            if self._index.held_rows and not keep:
                self.count("clear_while_held")
            return clear(tier, keep)

        def watched_end(lease: Lease, state: LeaseState) -> None:
            if state is LeaseState.EXPIRED:
                self.count("lease_expired")
                if lease.plans:
                    self.count("lease_expired_with_plan_out")
            end(lease, state)

        self._cache.lease = watched_lease  # type: ignore[method-assign]
        catalog.clear = watched_clear  # type: ignore[method-assign]
        catalog._leases.end = watched_end  # type: ignore[method-assign]

    def _if_not(self, name: str) -> Callable[..., None]:
        return lambda result, *_: None if result else self.count(name)

    def _held_for_fetch(self, held: Any, *_: object) -> None:
        chunks, fresh = held
        reading = inside(self._cache).moves._fetcher._reading
        if any(row in reading and row not in fresh for rows in chunks for row in rows):
            self.count("fetch_joined")

    def _waited(self, _: Any, rows: Any) -> None:
        reading = inside(self._cache).moves._fetcher._reading
        if any(row in reading for row in rows):
            self.count("waiter_timed_out")

    def _evicted_last_copy(self, row: int, *_: object) -> None:
        if row != NO_ROW:
            self.count("last_copy_evicted")

    # ---- the index

    def _watch_index(self) -> None:
        index = self._index
        add, discard = index.add, index.discard

        def watched_leaf(may: bool, row: int, tier: int) -> None:  # noqa: FBT001  (a result)
            if may or tier != DRAM:
                return
            held = index.holds[row] > 0
            self.count("eviction_refused_for_hold" if held else "eviction_refused_for_child")

        def watched_add(row: int, tier: int, charged: int = 0) -> None:
            before = index.orphans
            add(row, tier, charged)
            self._compare(before)

        def watched_discard(row: int, tier: int) -> int:
            before = index.orphans
            charged = discard(row, tier)
            self._compare(before)
            return charged

        self._after(index, "leaf", watched_leaf)
        index.add = watched_add  # type: ignore[method-assign]
        index.discard = watched_discard  # type: ignore[method-assign]

    def _compare(self, before: int) -> None:
        if self._index.orphans > before:
            self.count("orphan_made")
        elif self._index.orphans < before:
            self.count("orphan_revived")

    # ---- what moves

    def _watch_moves(self) -> None:
        moves = inside(self._cache).moves
        asking = moves.asking
        ask, within = asking._ask, asking.within
        asked: dict[Any, list[bool]] = {}  # by the task that asks

        async def noted(answered: list[bool], *args: Any) -> bool:
            found = await ask(*args)
            answered.append(True)
            if found:
                self.count("probe_answered")
            return found

        def watched_ask(*args: Any) -> Coroutine[Any, Any, bool]:
            answered = asked[asyncio.current_task()] = []
            return noted(answered, *args)

        async def watched_within(*args: Any) -> bool:
            found = await within(*args)
            if not asked.pop(asyncio.current_task(), [True]):
                self.count("probe_late")
            return found

        asking._ask = watched_ask  # type: ignore[assignment, method-assign]
        asking.within = watched_within  # type: ignore[assignment, method-assign]
        self._after(moves._fetcher, "_end", lambda _, row, *__: self._ended(row))
        for spiller in moves._spillers.values():
            self._watch_strays(spiller._strays)

    def _ended(self, row: int) -> None:
        self._failed.pop(self._index.names[row], None)

    def _watch_strays(self, strays: Strays) -> None:
        """Count strays; a delete notes each of its records until it is confirmed, which is none."""
        note, delete = strays.note, strays.delete
        deleting: list[bool] = []

        def watched_note(name: RecordId, charged: int) -> None:
            note(name, charged)
            if not deleting and name in strays._charged:
                self.count("stray_noted")

        async def watched_delete(records: Mapping[RecordId, int]) -> None:
            before = [name for name in strays._charged if name not in records]
            deleting.append(True)
            try:
                await delete(records)
            finally:
                deleting.pop()
            if any(name in strays._charged for name in records):
                self.count("stray_noted")
            if any(name not in strays._charged for name in before):
                self.count("stray_deleted")

        strays.note = watched_note  # type: ignore[method-assign]
        strays.delete = watched_delete  # type: ignore[method-assign]

    # ---- removal

    def _watch_removal(self) -> None:
        catalog, index = inside(self._cache).catalog, self._index
        room, moves = catalog._room, inside(self._cache).moves
        withdraw, begin, stored = room.withdraw, catalog._begin, catalog.stored

        def watched_withdraw(row: int, why: str) -> None:
            if row in moves._fetcher._reading:
                self.count("withdrawn_while_read")
            elif index.serial[row] and not index.present[row] & 1 << DRAM:
                self.count("withdrawn_while_saved")
            elif index.serial[row] and index.holds[row]:
                self.count("withdrawn_while_held")
            withdraw(row, why)

        def watched_begin(row: int, part: Part) -> None:
            if part.name in {index.names[one] for one in room.withdrawn.values()}:
                self.count("saved_anew_while_held")
            left = [*catalog._records, *(strays._charged for strays in moves.strays.values())]
            if any(part.name in records for records in left):  # the Catalog's lock is held
                self.count("deleted_too_late")
            begin(row, part)

        def watched_stored(part: Part, *args: Any) -> None:
            if args[2:] and part.name in args[2]:
                self.count("withdrawn_while_asked")
            stored(part, *args)

        room.withdraw = watched_withdraw  # type: ignore[assignment, method-assign]
        catalog._begin = watched_begin  # type: ignore[method-assign]
        catalog.stored = watched_stored  # type: ignore[assignment, method-assign]
        self._after(catalog, "written", self._written)
        self._after(catalog, "withdraw_due", self._expired)

    def _written(self, why: str, *_: object) -> None:
        if why == "withdrawn":
            self.count("withdrawn_while_written")

    def _expired(self, due: tuple[int, bool]) -> None:
        for _ in range(due[0]):
            self.count("part_expired")

    # ---- a Tier

    def _watch_tier(self, tier: Tier) -> None:
        breaker = tier._breaker
        allow, report = breaker.allow, breaker.report

        def watched_allow(verb: str = "") -> bool:
            closed, passes = breaker.closed, allow(verb)
            if not closed:
                self.count("breaker_tried" if passes else "breaker_refused")
            return passes

        def watched_report(verb: str = "", *, ok: bool) -> None:
            closed = breaker.closed
            report(verb, ok=ok)
            if closed and not breaker.closed:
                self.count("breaker_opened")

        breaker.allow = watched_allow  # type: ignore[method-assign]
        breaker.report = watched_report  # type: ignore[method-assign]
        self._after(tier, "_hung", lambda hung: self.count("calls_hung") if hung else None)
        self._after_await(tier, "read", self._was_read)

    def _was_read(self, outcomes: list[Fetched], wanted: Sequence[Wanted], *_: object) -> None:
        for outcome, one in zip(outcomes, wanted, strict=True):
            if outcome.status is Status.OK:
                if one.id in self._failed:
                    self.count("other_copy_served")
                continue
            self._failed[one.id] = None
            if outcome.status is Status.CORRUPT:
                self.count("read_corrupt")
            elif outcome.status is Status.ABSENT:
                self.count("read_absent")
