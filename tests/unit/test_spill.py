"""Spilling to one slower tier: what is written, in which order, what is dropped, what waits."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.catalog import spill
from kvtier.catalog.spill import Spiller
from kvtier.catalog.strays import Strays
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SmallCatalog, chain
from kvtier.tiers.store import Capabilities, Status

FOOTPRINT = PART_BYTES + 100


class Disk:
    """A tier that does what it is told. fate: how the write of a record ends, in turn."""

    name = "lmdb"
    admission = "through"
    capabilities = Capabilities()
    available = True
    THREADS = 1

    def __init__(self) -> None:
        self.store = self
        self.fate: dict[bytes, list[Status]] = {}
        self.kept: dict[bytes, None] = {}
        self.calls: list[list[bytes]] = []
        self.deletes: list[list[bytes]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    def footprint(self, nbytes):
        return nbytes + 100

    async def write(self, writes):
        names = [write.header.id for write in writes]
        self.calls.append(names)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        ends = [self.fate[name].pop(0) if self.fate.get(name) else Status.OK for name in names]
        self.kept |= {name: None for name, end in zip(names, ends, strict=True) if end is Status.OK}
        return ends

    async def delete(self, names):
        self.deletes.append(names)
        await asyncio.sleep(0)
        return [Status.ABSENT if self.kept.pop(name, 0) == 0 else Status.OK for name in names]


class Bench:
    """A catalog with room for `slots` parts, and the queue of a tier below it."""

    def __init__(self, slots: int = 16, capacity: int | None = None) -> None:
        self.small = SmallCatalog(slots, capacity)
        self.catalog, self.disk = self.small.catalog, Disk()
        self.strays = Strays(self.disk)
        self.spiller = Spiller(
            self.catalog, self.small.arena, LMDB, self.disk, self.small.metrics, self.strays
        )

    def offer(self, parts):
        self.spiller.offer([part.name for part in parts])

    def spill(self, *lots) -> None:
        """Save and offer parts, and return when nothing waits; a lot after the other."""

        async def scene():
            for parts in lots:
                self.small.save(parts)
                self.offer(parts)
                await self.spiller.drained()

        asyncio.run(scene())

    def dropped(self, reason: str) -> float:
        return self.small.metrics.get("dropped_spills", tier="lmdb", reason=reason)

    @property
    def held(self) -> int:
        return self.catalog._index.held_rows

    @property
    def numbers(self):
        """The calls, each as the numbers that its records have in their chain."""
        return [[int.from_bytes(name[16:32], "big") for name in call] for call in self.disk.calls]


@pytest.fixture
def new():
    """Return a function that makes benches."""
    benches: list[Bench] = []

    def make(*args) -> Bench:
        benches.append(Bench(*args))
        return benches[-1]

    yield make
    for bench in benches:
        assert bench.held == 0
        assert bench.spiller._queued_bytes == 0
        bench.small.close()


# ------------------------------------------------------------------------------------- the order


def test_what_is_offered_is_written_ancestors_first(new):
    bench = new()
    parts = chain(4)
    bench.small.save(parts)

    async def scene():
        bench.offer(parts[3:])
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.numbers == [[0, 1, 2, 3]]
    assert list(bench.disk.kept) == [part.name for part in parts]
    assert bench.catalog.tiers_of(bench.small.rows(parts)[3]) == [LMDB]


def test_what_the_tier_has_is_not_written_again(new):
    bench = new()
    parts = chain(4)
    bench.spill(parts[:2], parts, parts)
    assert bench.numbers == [[0, 1], [2, 3]]
    assert [bench.dropped(why) for why in ("evicted", "failed", "full", "queue")] == [0] * 4


def test_a_tier_is_written_to_with_as_many_calls_as_it_takes(new):
    bench = new()
    bench.disk.THREADS = 3
    bench.spill(chain(5))
    assert bench.numbers == [[0], [1, 2], [3, 4]]
    bench.disk.calls.clear()
    bench.spill(chain(2, seed=1))
    assert bench.numbers == [[0], [1]]


def test_a_batch_is_a_fraction_of_the_budget(new):
    bench = new(16, 24 * PART_BYTES)
    bench.spill(chain(7))
    assert bench.numbers == [[0, 1], [2, 3], [4, 5], [6]]


def test_a_batch_without_a_budget_has_a_bound_too(new, monkeypatch):
    monkeypatch.setattr(spill, "_BATCH_BYTES", 3 * PART_BYTES)
    bench = new()
    bench.spill(chain(5))
    assert bench.numbers == [[0, 1], [2, 3], [4]]
    large = new(16, 1000 * FOOTPRINT)
    large.spill(chain(5))
    assert large.numbers == [[0, 1], [2, 3], [4]]


# ----------------------------------------------------------------------------------- second touch


def test_with_second_touch_only_what_is_used_again_is_written(new):
    bench = new()
    bench.disk.admission = "second-touch"
    parts = chain(4)
    bench.spill(parts[:2])
    assert bench.disk.calls == []
    bench.spill(parts)
    assert bench.numbers == [[0, 1]]


def test_the_memory_of_what_was_used_is_bounded(new, monkeypatch):
    monkeypatch.setattr(spill, "_SEEN_NAMES", 2)
    bench = new()
    bench.disk.admission = "second-touch"
    one, two, three = (chain(1, seed=seed) for seed in (1, 2, 3))
    bench.spill(one, two, three, two, three)
    assert list(bench.disk.kept) == [two[0].name, three[0].name]
    bench.spill(one)
    assert len(bench.spiller._seen) == 2
    assert one[0].name not in bench.disk.kept


# ------------------------------------------------------------------------------------- the queue


def test_the_queue_holds_half_of_dram_and_the_rest_waits_by_name(new):
    bench = new(8)
    parts = chain(8)
    bench.small.save(parts)

    async def scene():
        bench.disk.gate.clear()
        bench.offer(parts)
        await asyncio.sleep(0)
        assert bench.held == 4
        assert bench.spiller._queued_bytes == 4 * PART_BYTES
        bench.disk.gate.set()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.numbers == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_part_larger_than_half_of_dram_is_queued_alone(new):
    bench = new(1)
    bench.spill(chain(1))
    assert bench.numbers == [[0]]


def test_how_many_names_wait_is_bounded_and_those_beyond_are_counted(new, monkeypatch):
    monkeypatch.setattr(spill, "_WAITING_NAMES", 3)
    bench = new()
    parts = chain(5)
    bench.spill(parts)
    assert bench.numbers == [[0, 1, 2]]
    assert bench.dropped("queue") == 2


def test_what_dram_evicts_before_its_turn_is_counted(new):
    bench = new(4)
    parts = chain(4)
    bench.small.save(parts)

    async def scene():
        bench.disk.gate.clear()
        bench.offer(parts)  # two are in the queue, two wait
        await asyncio.sleep(0)
        assert bench.small.save(chain(2, seed=1)) == 2
        bench.disk.gate.set()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.numbers == [[0, 1]]
    assert bench.dropped("evicted") == 2
    assert not bench.spiller._waiting


def test_while_a_batch_is_written_more_can_be_offered(new):
    bench = new()
    parts = chain(4)
    bench.small.save(parts)

    async def scene():
        bench.disk.gate.clear()
        bench.offer(parts[:1])
        await asyncio.sleep(0)
        bench.offer(parts[1:])
        await asyncio.sleep(0)
        assert len(bench.disk.calls) == 1  # one batch at a time
        bench.disk.gate.set()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.numbers == [[0], [1, 2, 3]]


def test_what_dram_evicts_at_its_turn_is_passed_over(new, monkeypatch):
    bench = new(4)
    parts = chain(2)
    missing_chain = bench.catalog.missing_chain

    def evicting(*args):
        found = missing_chain(*args)
        bench.catalog.clear(0)  # an engine's thread comes in between
        return found

    monkeypatch.setattr(bench.catalog, "missing_chain", evicting)
    bench.spill(parts)
    assert bench.disk.calls == []


@pytest.mark.parametrize("when", ["queued", "written"])
def test_what_is_withdrawn_is_not_kept_below(new, when):
    bench = new()
    parts = chain(2)
    bench.small.save(parts)

    def withdraw():
        with bench.catalog._lock:
            bench.catalog._room.withdraw(bench.small.rows(parts)[1])

    async def scene():
        async with bench.strays.changing:
            bench.disk.gate.clear()
            bench.offer(parts)
            await asyncio.sleep(0)
            if when == "queued":
                withdraw()
        await asyncio.sleep(0)
        while not bench.disk.calls:
            await asyncio.sleep(0)
        if when == "written":
            withdraw()
        bench.disk.gate.set()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.numbers == ([[0]] if when == "queued" else [[0, 1]])
    assert bench.small.found(parts) == [0]
    assert bench.dropped("withdrawn" if when == "queued" else "failed") == 1
    assert len(bench.strays) == (when == "written")  # it is deleted later


def test_nothing_is_written_while_the_tier_is_changed(new):
    bench = new()
    parts = chain(1)
    bench.small.save(parts)

    async def scene():
        async with bench.strays.changing:
            bench.offer(parts)
            for _ in range(10):
                await asyncio.sleep(0)
            assert bench.disk.calls == []
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.numbers == [[0]]


# ---------------------------------------------------------------------------------------- faults


def test_what_hangs_under_a_part_that_failed_is_not_kept(new):
    """P6: the tier would have a tail without a head."""
    bench = new()
    parts = chain(3)
    bench.disk.fate = {parts[0].name: [Status.FAILED]}
    bench.spill(parts)
    assert bench.dropped("failed") == 3
    assert [bench.catalog.tiers_of(row) for row in bench.small.rows(parts)] == [[], [], []]
    assert len(bench.strays) == 3  # what was written after all is paid for
    assert not bench.spiller._dropped
    bench.spill(parts)
    assert [bench.catalog.tiers_of(row) for row in bench.small.rows(parts)] == [[LMDB]] * 3
    assert len(bench.strays) == 0


def test_what_failed_is_forgotten_when_it_is_queued_again(new):
    bench = new()
    parts = chain(2)
    bench.small.save(parts)
    bench.disk.fate = {parts[0].name: [Status.FAILED]}

    async def scene():
        bench.disk.gate.clear()
        bench.offer(parts[:1])
        await asyncio.sleep(0)
        other = chain(1, seed=1)
        bench.small.save(other)
        bench.offer(other)  # so that the queue does not become empty
        bench.disk.gate.set()
        while len(bench.disk.calls) < 2:
            await asyncio.sleep(0)
        assert list(bench.spiller._dropped) == [parts[0].name]
        bench.offer(parts)
        await bench.spiller.drained()

    asyncio.run(scene())
    assert [bench.catalog.tiers_of(row) for row in bench.small.rows(parts)] == [[LMDB]] * 2
    assert not bench.spiller._dropped


def test_the_memory_of_what_failed_is_bounded(new, monkeypatch):
    monkeypatch.setattr(spill, "_DROPPED_NAMES", 3)
    bench = new()
    drop, most = bench.spiller._drop, []

    def counted(jobs, reason):
        drop(jobs, reason)
        most.append(len(bench.spiller._dropped))

    monkeypatch.setattr(bench.spiller, "_drop", counted)
    parts = [part for seed in range(5) for part in chain(1, seed=seed)]
    bench.disk.fate = {part.name: [Status.FAILED] for part in parts}
    bench.spill(parts)
    assert max(most) == 3


def test_a_defect_below_costs_the_parts_and_nothing_else(new, monkeypatch):
    said = []
    monkeypatch.setattr(spill._log, "exception", lambda text, name: said.append(text % name))
    bench = new()
    bench.disk.error = RuntimeError("a defect")
    bench.spill(chain(2))
    assert bench.dropped("failed") == 2
    assert said == ["lmdb: parts are not written down"]
    assert bench.held == 0
    bench.disk.error = None
    bench.spill(chain(2))
    assert bench.numbers == [[0, 1], [0, 1]]


def test_a_drain_that_is_cancelled_lets_go_of_everything(new):
    bench = new()
    parts = chain(2)
    bench.small.save(parts)

    async def scene():
        bench.disk.gate.clear()
        bench.offer(parts)
        await asyncio.sleep(0)
        bench.spiller._task.cancel()
        await bench.spiller.drained()
        assert bench.held == 0
        bench.disk.gate.set()
        bench.offer(parts)
        await bench.spiller.drained()

    asyncio.run(scene())
    assert len(bench.disk.kept) == 2


# ------------------------------------------------------------------------------------------ room


def test_room_is_made_for_a_batch_from_what_is_old(new):
    bench = new(16, 8 * FOOTPRINT)
    old, young = chain(8), chain(4, seed=1)
    bench.spill(old, young)
    assert len(bench.disk.kept) == 8
    assert all(part.name in bench.disk.kept for part in young)
    assert bench.small.metrics.get("evicted_parts", tier="lmdb") == 4
    assert bench.dropped("full") == 0


def test_for_a_part_its_ancestors_do_not_leave(new):
    bench = new(16, 4 * FOOTPRINT)
    bench.spill(chain(4), chain(5))
    assert list(bench.disk.kept) == [part.name for part in chain(4)]
    assert bench.dropped("full") == 1
    assert len(bench.disk.calls) == 4


def test_strays_take_room_too(new):
    bench = new(16, 4 * FOOTPRINT)
    bench.disk.available = False
    bench.strays.note(b"x" * 40, 2 * FOOTPRINT)

    async def kept(records):
        del records

    bench.strays.delete = kept
    bench.spill(chain(4))
    assert len(bench.disk.kept) == 2
    assert bench.dropped("full") + bench.dropped("failed") == 2


def test_for_a_tier_that_takes_no_delete_nothing_is_evicted(new):
    bench = new(16, 4 * FOOTPRINT)
    old = chain(4)
    bench.spill(old)

    async def failing(names):
        return [Status.FAILED] * len(names)

    bench.disk.delete = failing
    bench.disk.available = False
    bench.strays.note(b"x" * 40, 1)
    bench.spill(chain(1, seed=1))
    assert len(bench.disk.kept) == 4
    assert bench.dropped("full") == 1


def test_strays_are_deleted_before_room_is_made(new):
    bench = new(16, 4 * FOOTPRINT)
    bench.strays.note(b"x" * 40, 4 * FOOTPRINT)
    bench.spill(chain(1))
    assert bench.disk.deletes == [[b"x" * 40]]
    assert len(bench.disk.kept) == 1


def test_after_strays_room_is_made_as_ever(new):
    bench = new(16, 4 * FOOTPRINT)
    bench.spill(chain(4))
    bench.strays.note(b"x" * 40, 1)
    young = chain(1, seed=1)
    bench.spill(young)
    assert young[0].name in bench.disk.kept


def test_a_stray_that_is_written_again_is_none(new):
    bench = new()
    (part,) = chain(1)
    bench.strays.note(part.name, FOOTPRINT)

    async def failing(names):
        return [Status.FAILED] * len(names)

    bench.disk.delete = failing
    bench.spill([part])
    assert part.name in bench.disk.kept
    assert len(bench.strays) == 0


def test_room_is_made_in_lots_between_which_others_run(new, monkeypatch):
    monkeypatch.setattr("kvtier.catalog.below.LOT", 2)
    monkeypatch.setattr("kvtier.catalog.spill.LOT", 2)
    bench = new(80, 64 * FOOTPRINT)
    young = [part for seed in range(1, 7) for part in chain(1, seed=seed)]
    bench.spill(chain(64))
    bench.small.save(young)
    turns = []

    async def other():
        while not all(part.name in bench.disk.kept for part in young):
            turns.append(len(bench.catalog._shelves[LMDB].order))
            await asyncio.sleep(0)

    async def scene():
        bench.offer(young)
        await asyncio.gather(other(), bench.spiller.drained())

    asyncio.run(scene())
    assert {62, 60, 58} <= set(turns)
    assert bench.dropped("full") == 0


def test_a_tier_that_is_full_although_its_budget_is_not_loses_a_lot(new):
    bench = new(80, 64 * FOOTPRINT)
    old, young = chain(64), chain(1, seed=1)
    bench.spill(old)
    bench.disk.fate = {young[0].name: [Status.FULL]}
    bench.disk.deletes.clear()
    bench.spill(young)
    assert young[0].name in bench.disk.kept
    assert [len(names) for names in bench.disk.deletes] == [1, 2]  # a thirty-second of the budget


def test_a_tier_that_stays_full_is_given_up(new):
    bench = new(16, 64 * FOOTPRINT)
    parts = chain(2)
    bench.disk.fate = {part.name: [Status.FULL] * 100 for part in parts}
    bench.spill(parts)
    assert len(bench.disk.calls) == 8
    assert bench.dropped("full") == 2


def test_a_lot_has_a_bound_whatever_the_budget(new, monkeypatch):
    monkeypatch.setattr(spill, "_BATCH_BYTES", 4 * FOOTPRINT)
    old, young = chain(8), chain(1, seed=1)
    for bench in (new(), new(16, 1000 * FOOTPRINT)):
        bench.spill(old)
        bench.disk.fate = {young[0].name: [Status.FULL]}
        bench.spill(young)
        assert [len(names) for names in bench.disk.deletes] == [4]


def test_as_many_leave_as_are_tried_again(new):
    bench = new(16, 32 * FOOTPRINT)
    bench.spill(chain(8))
    young = [part for seed in (1, 2, 3) for part in chain(1, seed=seed)]
    bench.disk.fate = {part.name: [Status.FULL] for part in young}
    bench.spill(young)
    assert [len(names) for names in bench.disk.deletes] == [3]


# ----------------------------------------------------------------------------------------- clear


def test_a_tier_is_cleared_in_lots_between_which_others_run(new, monkeypatch):
    monkeypatch.setattr("kvtier.catalog.below.LOT", 2)
    bench = new()
    bench.spill(chain(6))
    turns = []

    async def other():
        while len(bench.disk.kept):
            turns.append(len(bench.small.catalog._shelves[LMDB].order))
            await asyncio.sleep(0)

    async def scene():
        await asyncio.gather(other(), bench.spiller.clear())

    asyncio.run(scene())
    assert bench.disk.kept == {}
    assert {4, 2} <= set(turns)


def test_a_clear_waits_for_a_batch_to_be_written(new):
    bench = new()
    parts = chain(2)
    bench.small.save(parts)

    async def scene():
        bench.disk.gate.clear()
        bench.offer(parts)
        await asyncio.sleep(0)
        clear = asyncio.ensure_future(bench.spiller.clear())
        for _ in range(10):
            await asyncio.sleep(0)
        bench.disk.gate.set()
        await clear
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.disk.kept == {}
