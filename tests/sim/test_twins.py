"""Each guard of the core, taken away: the simulation must notice within a few seeds."""

from __future__ import annotations

import asyncio
import re

import pytest

from kvtier.catalog.catalog import Catalog
from kvtier.catalog.fetch import Fetcher
from kvtier.catalog.index import DRAM, Index
from kvtier.catalog.lease import Leases
from kvtier.catalog.probe import Probe
from kvtier.catalog.shelf import Room
from kvtier.catalog.spill import Spiller
from kvtier.catalog.strays import Strays
from kvtier.flow import Moves
from kvtier.testing.simworld import run_world
from kvtier.tiers import tier

SEEDS = 60


def publish_before_the_read(monkeypatch):
    read = Fetcher._read

    async def broken(self, rows):
        for row in rows:
            self._catalog._index.add(row, DRAM)
            self._catalog._shelves[DRAM].policy.insert(row)
        await read(self, rows)

    monkeypatch.setattr(Fetcher, "_read", broken)


def evict_what_is_held(monkeypatch):
    def broken(self, row, tier):
        return not self.kids[tier][row] and (
            not self.children[row] or self.present[row] != 1 << tier
        )

    monkeypatch.setattr(Index, "leaf", broken)


def evict_parents_before_children(monkeypatch):
    monkeypatch.setattr(Index, "leaf", lambda self, row, tier: not self.holds[row])


def serve_what_has_not_arrived(monkeypatch):
    monkeypatch.setattr(Catalog, "resident", lambda self, chunks: len(chunks))
    monkeypatch.setattr(Fetcher, "_source", lambda self, rows, reading: "dram")


def commit_a_headless_tail(monkeypatch):
    def broken(self, name, slot, raw_sum):
        with self._lock:
            self._room.publish(self._room.reserved(name, slot), raw_sum)
            return True

    monkeypatch.setattr(Catalog, "commit", broken)


def free_an_aborted_slot_and_keep_it(monkeypatch):
    def broken(self, row):
        self.arena.free(self.index.slot(row))
        self.unhold(self._with_parent(row))

    monkeypatch.setattr(Room, "abort", broken)


def drop_holds_at_the_deadline_of_a_plan(monkeypatch):
    def broken(self, lease):
        if lease.serial in self._all and lease.state.name != "HELD":
            del self._all[lease.serial]
            for rows in lease.rows:
                self._room.unhold(rows)

    monkeypatch.setattr(Leases, "drop", broken)


def never_settle_a_load(monkeypatch):
    monkeypatch.setattr(Catalog, "settle", lambda self, lease: None)


def trust_what_a_store_returns(monkeypatch):
    monkeypatch.setattr(tier, "is_exact", lambda header, wanted: True)


def free_slots_of_reads_that_nobody_waits_for(monkeypatch):
    fetch, end = Fetcher.fetch, Fetcher._end

    async def broken(self, first, names, *, within, hold):
        before = list(self._reading)
        lease = await fetch(self, first, names, within=within, hold=hold)
        for row in [row for row in self._reading if row not in before]:
            self._catalog.fetched(row, None)
            self._reading.pop(row).set_result(-1)
        return lease

    def broken_end(self, row, number, raw_sum):
        if row in self._reading:
            end(self, row, number, raw_sum)

    monkeypatch.setattr(Fetcher, "fetch", broken)
    monkeypatch.setattr(Fetcher, "_end", broken_end)


def forget_the_holds_of_a_fetch(monkeypatch):
    adopt = Catalog.adopt

    def broken(self, first, rows, sources, seconds):
        lease = adopt(self, first, rows, sources, seconds)
        self.release_rows(row for chunk in rows for row in chunk)
        return lease

    monkeypatch.setattr(Catalog, "adopt", broken)


def let_a_reservation_evict_its_ancestors(monkeypatch):
    monkeypatch.setattr(Room, "hold_names", lambda self, names: [])
    monkeypatch.setattr(Room, "_with_parent", lambda self, row: (row,))


def forget_what_a_fetch_held_when_it_ends_empty(monkeypatch):
    release = Catalog.release_rows

    def broken(self, rows):
        release(self, list(rows)[1:])

    monkeypatch.setattr(Catalog, "release_rows", broken)


def write_over_the_budget(monkeypatch):
    async def broken(self, jobs, nbytes, extra):
        await asyncio.sleep(0)

    monkeypatch.setattr(Spiller, "_make_room", broken)
    monkeypatch.setattr(Spiller, "_fitting", lambda self, jobs: jobs)


def forget_what_a_store_may_still_have(monkeypatch):
    monkeypatch.setattr(Strays, "note", lambda self, name, charged: None)


def wait_for_a_shared_tier_for_ever(monkeypatch):
    async def broken(self, parts, seconds):
        return await self._ask(parts)

    monkeypatch.setattr(Moves, "_ask_within", broken)
    monkeypatch.setattr(Probe, "due", lambda self, name: True)


def match_across_a_hole(monkeypatch):
    def broken(self, names):
        with self._lock:
            return [0] * len(names)

    monkeypatch.setattr(Catalog, "match", broken)


# What is taken away, and how it shows.
GUARDS = {
    publish_before_the_read: "published bytes",
    evict_what_is_held: "leased slot",
    evict_parents_before_children: "orphans, and no tier lost anything",
    serve_what_has_not_arrived: "leased bytes",
    commit_a_headless_tail: "orphans, and no tier lost anything",
    free_an_aborted_slot_and_keep_it: "not in use",
    drop_holds_at_the_deadline_of_a_plan: "loaded slot is not in use|holds",
    never_settle_a_load: "a lease is left",
    trust_what_a_store_returns: "bytes of .* are wrong",
    free_slots_of_reads_that_nobody_waits_for: "bytes of .* are wrong|slot",
    forget_the_holds_of_a_fetch: "holds",
    let_a_reservation_evict_its_ancestors: "evicted its own ancestors",
    forget_what_a_fetch_held_when_it_ends_empty: "held for ever",
    write_over_the_budget: "over its budget",
    forget_what_a_store_may_still_have: "nobody knows of|had .* bytes of|after it was cleared",
    wait_for_a_shared_tier_for_ever: "after its timeout",
    match_across_a_hole: "that is nowhere was matched",
}


def first_failure() -> str:
    for seed in range(SEEDS):
        try:
            run_world(seed)
        except Exception as error:  # noqa: BLE001  (how it shows differs with the guard)
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("guard", "shows"), GUARDS.items(), ids=lambda one: getattr(one, "__name__", "")
)
def test_a_missing_guard_is_found(guard, shows, monkeypatch):
    guard(monkeypatch)
    assert re.search(shows, first_failure())
