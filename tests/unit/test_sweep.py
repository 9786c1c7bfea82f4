"""What is withdrawn is deleted from the Stores: when, in which lots, and what is said of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from kvtier.catalog.catalog import LOT, Part
from kvtier.catalog.strays import Strays
from kvtier.catalog.sweep import Removed, Sweeper
from kvtier.identity.record import Header, PartName, RecordId
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SmallCatalog, chain
from kvtier.tiers.store import Capabilities, Status
from kvtier.tiers.unopened import UnopenedStore

DIGEST, OTHER = b"its digest".ljust(32), b"another".ljust(32)
COUNTED = 4096  # names whose deletions are counted at a time
RETRY_SECONDS = 5.0


class Disk:
    """A Tier and its Store in one. deletes: names, by call; fate: how each ends; gate: see below.

    lots: what it lists, None where it fails. While the gate is clear, deletions wait.
    """

    name = "disk"
    packs = False

    def __init__(self, *, shared: bool) -> None:
        self.store = self
        self.capabilities = Capabilities(shared=shared)
        self.deletes: list[list[RecordId]] = []
        self.fate = Status.OK
        self.gate = asyncio.Event()
        self.gate.set()
        self.lots: list[list[Header] | None] = []

    async def delete(self, names: Sequence[RecordId]) -> list[Status]:
        self.deletes.append(list(names))
        await self.gate.wait()
        return [self.fate] * len(names)

    async def listed(self, most: int):
        assert most == LOT
        for lot in self.lots:
            yield lot


class Bench:
    """A catalog with a tier below it, of which it sweeps what was withdrawn."""

    def __init__(self, *, shared: bool = False) -> None:
        self.small = SmallCatalog(4)
        self.catalog, self.clock = self.small.catalog, self.small.clock
        self.catalog._shelves[LMDB].shared = shared
        self.owner = self.catalog.owner(DIGEST)
        self.disk: Any = Disk(shared=shared)
        self.strays = Strays(self.disk, lambda: self.catalog.take_withdrawn(LMDB))
        self.sweeper = Sweeper(self.catalog, {LMDB: self.disk}, {LMDB: self.strays}, self.clock)
        self.told: list[int] = []

    def store(self, parts: Sequence[Part]) -> list[RecordId]:
        """Put parts of the namespace into the tier; return their names."""
        for part in parts:
            self.catalog.stored(part._replace(owner=self.owner), LMDB, PART_BYTES)
        return [part.name for part in parts]

    def save(self, parts: Sequence[Part], seconds: float) -> None:
        """Save parts for a time, and put them into the tier alone."""
        for part in parts:
            mine = part._replace(owner=self.owner, seconds=seconds, parent=None, depth=0)
            assert self.small.save([mine]) == 1
            self.catalog.stored(mine, LMDB, PART_BYTES)
            self.catalog._room.leave(self.small.rows([part])[0], 0)

    def withdraw(self, names: Sequence[RecordId]) -> None:
        """Withdraw parts."""
        for start in range(0, len(names), LOT):
            self.catalog.withdraw(names[start : start + LOT], "invalidated")

    def present(self, parts: Sequence[Part]) -> int:
        """Return how many of some parts are in the tier."""
        return sum(
            row >= 0 and bool(self.catalog._index.present[row]) for row in self.small.rows(parts)
        )

    def expire(self) -> bool:
        """Expire once, and let the deletions end that this begins; say whether it began any."""

        async def scene() -> bool:
            before = self.sweeper._task
            await self.sweeper.expire()
            if self.sweeper._task is before:
                return False
            await self.sweeper._task
            return True

        return asyncio.run(scene())

    def purge(self) -> Removed:
        """Purge the namespace."""
        return asyncio.run(self.sweeper.purge(DIGEST, self.told.append))


@pytest.fixture
def bench():
    one = Bench()
    yield one
    one.small.close()


@pytest.fixture
def shared():
    one = Bench(shared=True)
    yield one
    one.small.close()


def pauses(coroutine: Coroutine[Any, Any, Any]) -> tuple[int, Any]:
    """Run a coroutine that waits for nothing; return how often others have their turn meanwhile."""
    count = 0
    while True:
        try:
            coroutine.send(None)
        except StopIteration as end:
            return count, end.value
        count += 1


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# ---- once


def test_a_sweep_deletes_what_was_withdrawn_and_says_what_is_not_confirmed(bench):
    names = bench.store(chain(3))
    bench.withdraw(names[1:])
    bench.disk.fate = Status.FAILED
    assert asyncio.run(bench.sweeper.sweep_for(names)) == 2
    assert sorted(bench.disk.deletes[0]) == names[1:]
    bench.disk.fate = Status.OK
    assert asyncio.run(bench.sweeper.sweep_for(names)) == 0
    assert len(bench.disk.deletes) == 2


def test_nothing_is_deleted_while_the_tier_is_written_to(bench):
    bench.withdraw(bench.store(chain(1)))

    async def scene() -> None:
        async with bench.strays.changing:
            sweep = asyncio.create_task(bench.sweeper.sweep())
            await turns()
            assert bench.disk.deletes == []
        await sweep
        assert len(bench.disk.deletes) == 1

    asyncio.run(scene())


def test_a_sweep_of_nothing_waits_for_no_write(bench):
    async def scene() -> None:
        async with bench.strays.changing:
            sweep = asyncio.create_task(bench.sweeper.sweep())
            await turns()
            assert sweep.done()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("names", "expected"), [(1, 0), (COUNTED, 0), (COUNTED + 1, 1), (3 * COUNTED, 2)]
)
def test_many_names_are_counted_in_slices_between_which_others_run(bench, names, expected):
    withdrawn = bench.store(chain(2))
    bench.withdraw(withdrawn)
    asked = withdrawn[:1] * names
    assert pauses(bench.sweeper._unconfirmed(asked)) == (expected, names)


# ---- what is due


def test_what_is_due_is_withdrawn_and_deleted(bench):
    short, long = chain(2, 1), chain(2, 2)
    bench.save(short, 5.0)
    bench.save(long, 50.0)
    assert not bench.expire()
    bench.clock.now += 6.0
    assert bench.expire()
    assert (bench.present(short), bench.present(long)) == (0, 2)
    assert [sorted(names) for names in bench.disk.deletes] == [[part.name for part in short]]


def test_what_is_due_is_withdrawn_in_lots_between_which_others_run(bench):
    parts = chain(2 * LOT + 1)
    bench.save(parts, 5.0)
    bench.clock.now += 6.0

    async def scene() -> None:
        seen: list[int] = []

        async def watch() -> None:
            while bench.sweeper._task is None:
                seen.append(bench.present(parts))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await bench.sweeper.expire()
        await watching
        await bench.sweeper._task
        assert seen == [2 * LOT + 1, LOT + 1, 1]

    asyncio.run(scene())
    assert len(bench.strays) == bench.present(parts) == 0


def test_one_sweep_is_under_way_at_a_time_and_the_next_follows_it(bench):
    one, other = chain(1, 1), chain(1, 2)
    bench.save(one, 5.0)
    bench.save(other, 7.0)

    async def scene() -> None:
        bench.disk.gate.clear()
        bench.clock.now += 6.0
        await bench.sweeper.expire()
        begun = bench.sweeper._task
        await turns()
        bench.clock.now += 100.0
        await bench.sweeper.expire()
        assert bench.present(other) == 0
        assert bench.sweeper._task is begun
        bench.disk.gate.set()
        await begun
        await bench.sweeper.expire()
        assert bench.sweeper._task is not begun
        await bench.sweeper._task

    asyncio.run(scene())
    assert bench.disk.deletes == [[part.name] for part in (*one, *other)]


def test_what_a_store_did_not_delete_is_tried_again_now_and_then(bench):
    names = bench.store(chain(1))
    bench.withdraw(names)
    bench.disk.fate = Status.FAILED
    assert bench.expire()
    bench.clock.now += RETRY_SECONDS - 0.5
    assert not bench.expire()
    bench.clock.now += 0.5
    assert bench.expire()
    bench.disk.fate = Status.OK
    assert not bench.expire()
    bench.clock.now += RETRY_SECONDS
    assert bench.expire()
    bench.clock.now += RETRY_SECONDS
    assert not bench.expire()  # there is nothing left
    assert bench.disk.deletes == [names] * 3


def test_what_is_due_waits_for_no_retry(bench):
    bench.save(chain(1, 1), 5.0)
    bench.save(chain(1, 2), 7.0)
    bench.clock.now += 6.0
    assert bench.expire()
    bench.clock.now += 2.0
    assert bench.expire()
    assert len(bench.disk.deletes) == 2


def test_nor_does_it_behind_a_lot_that_is_kept_longer_now(bench):
    kept, one, due = chain(LOT, 1), chain(1, 2), chain(1, 3)
    bench.save(one, 9.0)
    bench.save(kept, 10.0)
    bench.save(due, 11.0)
    bench.small.reserve([part._replace(parent=None, depth=0, seconds=90.0) for part in kept])
    bench.clock.now += 9.5
    assert bench.expire()
    bench.clock.now += 2.5
    assert bench.expire()
    assert (bench.present(kept), bench.present(due)) == (LOT, 0)
    assert bench.disk.deletes == [[one[0].name], [due[0].name]]


# ---- a namespace


def test_a_purge_tells_how_far_it_is_and_lets_others_run(bench):
    parts, others = chain(LOT + 1, 1), chain(20 * LOT, 2)
    bench.store(parts)
    for part in others:
        bench.catalog.stored(part, LMDB, PART_BYTES)
    seen = [len(parts)]

    async def watch() -> None:
        while seen[-1]:
            seen.append(bench.present(parts))
            await asyncio.sleep(0)

    async def scene() -> Removed:
        watching = asyncio.create_task(watch())
        removed = await bench.sweeper.purge(DIGEST, bench.told.append)
        await watching
        return removed

    assert asyncio.run(scene()) == Removed(LOT + 1, 0)
    assert bench.told == [LOT, LOT + 1]
    assert list(dict.fromkeys(seen)) == [LOT + 1, 1, 0]


def header(part: Part, namespace: bytes = DIGEST) -> Header:
    return Header(namespace, part.name[:32], None, 0, PartName(), 1, 1, bytes(16), bytes(16))


def test_a_shared_tier_is_purged_of_what_it_lists_of_the_namespace(shared):
    mine, others = chain(3, 1), chain(2, 2)
    shared.store(mine[:1])
    shared.disk.lots = [
        [header(mine[1]), header(others[0], OTHER)],
        [header(others[1], OTHER)],
        [header(mine[2])],
    ]
    names = [part.name for part in mine]
    assert header(mine[0]).id == names[0]
    assert shared.purge() == Removed(3, 0)
    assert shared.told == [1, 2, 3]
    assert shared.disk.deletes == [[name] for name in names]


def test_what_a_shared_tier_lists_is_matched_no_more(shared):
    (part,) = chain(1, 1)
    shared.disk.lots = [[header(part)]]
    listed = shared.disk.listed

    async def meanwhile(most: int):
        async for lot in listed(most):
            shared.store([part])  # another cache's, asked for and found just now
            yield lot

    shared.disk.listed = meanwhile
    assert shared.purge() == Removed(1, 0)
    assert shared.present([part]) == 0


def test_a_shared_tier_that_cannot_be_listed_to_its_end_is_named(shared):
    mine = chain(2, 1)
    shared.disk.lots = [[header(mine[0])], None, [header(mine[1])]]
    assert shared.purge() == Removed(1, 0, ("disk",))
    assert shared.disk.deletes == [[mine[0].name]]
    shared.disk.lots = [[header(mine[1])]]
    assert shared.purge() == Removed(1, 0)


def test_a_tier_of_its_own_is_not_listed(bench):
    bench.store(chain(1))
    bench.disk.lots = [None]
    assert bench.purge() == Removed(1, 0)


def test_a_tier_that_could_not_be_opened_is_named_and_not_listed(bench):
    bench.disk.store = UnopenedStore(LmdbSlabStore, list, "no such device")
    assert bench.purge() == Removed(0, 0, ("disk",))
