"""A crash at any step: what outlives the process, and what a cache opened on that must show."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvtier.cache import Cache
from kvtier.errors import Unavailable
from kvtier.identity.record import Header, RecordId
from kvtier.testing.faults import FaultyStore
from kvtier.testing.simdisk import SimDisk
from kvtier.testing.simtask import SimError
from kvtier.tiers.store import Status, Store, Write

if TYPE_CHECKING:
    from kvtier.testing.simworld import World


class Crash(BaseException):
    """The process is gone. No code of the core's may catch it, as it could not catch a kill."""


@dataclass(frozen=True, slots=True)
class Past:
    """What outlives a crash.

    life: how many lives there were, the one that ended included; calls: on the cache, in them.
    stores: by tier number, the media that are still there. promised: by tier number, the names
    of the records that were acknowledged as durable, and not deleted since. counts: of events.
    """

    life: int
    calls: int
    prompts: Sequence[NDArray[np.int32]]
    stores: dict[int, Store]
    promised: dict[int, frozenset[RecordId]]
    counts: Counter[str]


class Ledger:
    """Notes what one Store has acknowledged, from outside."""

    def __init__(self, store: FaultyStore) -> None:
        self.acknowledged: dict[RecordId, None] = {}
        write, delete = store.write_many, store.delete_many

        def noted_write(records: Sequence[Write]) -> list[Status]:
            statuses = write(records)
            for record, status in zip(records, statuses, strict=False):
                if status is Status.OK:
                    self.acknowledged[record.header.id] = None
            return statuses

        def noted_delete(ids: Sequence[RecordId]) -> list[Status]:
            for name in ids:
                self.acknowledged.pop(name, None)
            return delete(ids)

        store.write_many = noted_write  # type: ignore[method-assign]
        store.delete_many = noted_delete  # type: ignore[method-assign]


def crash(world: World) -> Past:
    """End the process of a world now, and return what is left of it."""
    rng = world.loop.rng("crash")
    disks = {
        number: store.inner
        for number, store in enumerate(world.stores, 1)
        if isinstance(store.inner, SimDisk)
    }
    counts: Counter[str] = Counter(crashed=1)
    for disk in disks.values():
        disk.lose_power()
    unsynced = {number: disk.unsynced() for number, disk in disks.items()}
    for call in world.loop.under_way.values():
        counts["crash_met_call"] += 1
        if rng.random() < 0.7:
            with contextlib.suppress(Unavailable):
                call()
    left: dict[int, Store] = {number: disk.left(rng) for number, disk in disks.items()}
    promised = {
        number: frozenset(
            name
            for name in world.ledgers[number].acknowledged
            if name not in unsynced[number] and name not in disk.unsynced()
        )
        for number, disk in disks.items()
    }
    for number, names in unsynced.items():
        kept = {header.id for header in left[number].scan()}
        counts["crash_lost_record"] += sum(name not in kept for name in names)
    counts["crash_tore_record"] += sum(len(torn_in(store)) for store in left.values())
    for number, store in enumerate(world.stores, 1):
        if store.capabilities.shared:
            left[number] = store.inner
    world.loop.note("crash", repr(sorted(counts.items())))
    return Past(world.life + 1, world.calls, world.prompts, left, promised, counts)


def torn_in(store: Store) -> dict[RecordId, None]:
    """Return the names of the records that a crash has torn there."""
    return store.torn if isinstance(store, SimDisk) else {}


def check_reopened(world: World, past: Past) -> None:
    """Check the first moment after a crash against what lies in the media, counted by hand."""
    found: dict[RecordId, Header] = {}
    for number, store in enumerate(world.stores, 1):
        listed = {} if store.capabilities.shared else {one.id: one for one in store.scan()}
        lacking = past.promised.get(number, frozenset()) - listed.keys()
        if lacking and not world.scenario.rates.lost_write:
            raise SimError(f"store {number} lacks {len(lacking)} records that it acknowledged")
        if sorted(world.oracle.indexed(number)) != sorted(listed):
            raise SimError(f"store {number} was opened, and not all of it is in the index")
        _check_budget(world, number, store)
        found |= listed
    headless = sum(one.parent not in found for one in found.values() if one.parent)
    past.counts["crash_left_orphan"] += headless
    world.oracle.lost += headless  # these orphans are nobody's fault
    world.oracle.check()
    if world.oracle.orphans != headless:
        raise SimError(f"{world.oracle.orphans} orphans, where a crash left {headless}")
    for engine in world.engines:
        for tokens in world.prompts:
            _check_match(world, engine.cache, tokens, found)
    world.after("reopened")


def _check_budget(world: World, number: int, store: FaultyStore) -> None:
    if store.capabilities.shared:
        return
    capacity, kept = world.oracle.capacity(number), store.kept_bytes()
    if capacity is not None and kept > capacity:
        raise SimError(f"store {number} is over its budget after a crash")
    if world.oracle.used(number) != kept:
        raise SimError(f"store {number}: its bytes after a crash are not those that are counted")


def _check_match(
    world: World, cache: Cache, tokens: NDArray[np.int32], found: dict[RecordId, Header]
) -> None:
    """What was kept and can be used is matched, and nothing else."""
    match = cache.match(tokens)
    kept = world.model.usable(match.prefix.names, len(tokens), found.get)
    if match.tokens != kept:
        raise SimError(f"{match.tokens} tokens are matched after a crash that left {kept}")
