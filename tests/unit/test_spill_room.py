"""Spilling to one slower tier: what a fault costs, how room is made, and what is cleared."""

from __future__ import annotations

import asyncio

from kvtier.catalog import spill
from kvtier.catalog.owners import Quota
from kvtier.testing.small_catalog import LMDB, chain
from kvtier.testing.small_spill import FOOTPRINT
from kvtier.tiers.store import Status

# ---------------------------------------------------------------------------------------- faults


def test_what_hangs_under_a_part_that_failed_is_not_kept(new_spill):
    """P6: the tier would have a tail without a head."""
    bench = new_spill()
    parts = chain(3)
    bench.disk.fate = {parts[0].name: [Status.FAILED]}
    bench.spill(parts)
    assert (bench.dropped("failed"), bench.dropped("headless")) == (1, 2)
    assert [bench.catalog.tiers_of(row) for row in bench.small.rows(parts)] == [[], [], []]
    assert bench.disk.deletes == [[part.name for part in parts]]  # what was written after all
    bench.spill(parts)
    assert [bench.catalog.tiers_of(row) for row in bench.small.rows(parts)] == [[LMDB]] * 3
    assert len(bench.strays) == 0


def test_what_hangs_under_a_part_that_failed_before_is_not_written(new_spill):
    bench = new_spill()
    parts = chain(2)
    bench.small.save(parts)
    bench.disk.fate = {parts[0].name: [Status.FAILED]}

    async def scene():
        bench.disk.gate.clear()
        await bench.offer(parts[:1])
        await asyncio.sleep(0)
        await bench.offer(parts)  # the second is queued while the first is being written
        bench.disk.gate.set()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.numbers == [[0]]
    assert (bench.dropped("failed"), bench.dropped("headless")) == (1, 1)
    bench.spill(parts)
    assert [bench.catalog.tiers_of(row) for row in bench.small.rows(parts)] == [[LMDB]] * 2


def test_a_defect_below_costs_the_parts_and_nothing_else(new_spill, monkeypatch):
    said = []
    monkeypatch.setattr(spill._log, "exception", lambda text, name: said.append(text % name))
    bench = new_spill()
    bench.disk.error = RuntimeError("a defect")
    bench.spill(chain(2))
    assert bench.dropped("failed") == 2
    assert said == ["lmdb: parts are not written down"]
    assert bench.catalog._index.held_rows == 0
    bench.disk.error = None
    bench.spill(chain(2))
    assert bench.numbers == [[0, 1], [0, 1]]


def test_a_drain_that_is_cancelled_lets_go_of_everything(new_spill):
    bench = new_spill()
    parts = chain(2)
    bench.small.save(parts)

    async def scene():
        bench.disk.gate.clear()
        await bench.offer(parts)
        await asyncio.sleep(0)
        bench.spiller._task.cancel()
        await bench.spiller.drained()
        assert bench.catalog._index.held_rows == 0
        bench.disk.gate.set()
        await bench.offer(parts)
        await bench.spiller.drained()

    asyncio.run(scene())
    assert len(bench.disk.kept) == 2


# ------------------------------------------------------------------------------------------ room


def test_room_is_made_for_a_batch_from_what_is_old(new_spill):
    bench = new_spill(16, 8 * FOOTPRINT)
    old, young = chain(8), chain(4, seed=1)
    bench.spill(old, young)
    assert len(bench.disk.kept) == 8
    assert all(part.name in bench.disk.kept for part in young)
    assert bench.small.metrics.get("evicted_parts", tier="lmdb") == 4
    assert bench.dropped("full") == 0


def test_for_a_part_its_ancestors_do_not_leave(new_spill):
    bench = new_spill(16, 4 * FOOTPRINT)
    bench.spill(chain(4), chain(5))
    assert list(bench.disk.kept) == [part.name for part in chain(4)]
    assert bench.dropped("full") == 1
    assert len(bench.disk.calls) == 4


def test_strays_take_room_too(new_spill):
    bench = new_spill(16, 4 * FOOTPRINT)
    bench.disk.available = False
    bench.strays.note(b"x" * 40, 2 * FOOTPRINT)

    async def kept(records):
        del records

    bench.strays.delete = kept
    bench.spill(chain(4))
    assert len(bench.disk.kept) == 2
    assert bench.dropped("full") + bench.dropped("headless") == 2


def test_for_a_tier_that_takes_no_delete_nothing_is_evicted(new_spill):
    bench = new_spill(16, 4 * FOOTPRINT)
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
    assert [bench.catalog.tiers_of(row) for row in bench.small.rows(old)] == [[LMDB]] * 4


def test_for_a_tier_that_may_answer_again_room_is_made(new_spill):
    """The write is how it is found to answer: nothing that failed there is in its way."""
    bench = new_spill(16, 4 * FOOTPRINT)
    bench.spill(chain(4))
    bench.disk.available = False
    young = chain(1, seed=1)
    bench.spill(young)
    assert young[0].name in bench.disk.kept


def test_strays_are_deleted_before_room_is_made(new_spill):
    bench = new_spill(16, 4 * FOOTPRINT)
    bench.strays.note(b"x" * 40, 4 * FOOTPRINT)
    bench.spill(chain(1))
    assert bench.disk.deletes == [[b"x" * 40]]
    assert len(bench.disk.kept) == 1


def test_room_is_made_for_strays_that_cannot_be_deleted_too(new_spill):
    bench = new_spill(16, 4 * FOOTPRINT)
    bench.spill(chain(4))
    stray, delete = b"x" * 40, bench.disk.delete

    async def failing(names):
        ends = await delete(names)
        return [
            Status.FAILED if name == stray else end for name, end in zip(names, ends, strict=True)
        ]

    bench.disk.delete = failing
    bench.strays.note(stray, FOOTPRINT)
    young = chain(1, seed=1)
    bench.spill(young)
    assert young[0].name in bench.disk.kept
    assert len(bench.disk.kept) == 3
    assert bench.dropped("full") == 0


def test_strays_that_cannot_be_deleted_are_tried_before_a_batch_and_after_it(new_spill):
    bench = new_spill()
    tried = []

    async def failing(names):
        tried.append(names)
        return [Status.FAILED] * len(names)

    bench.disk.delete = failing
    bench.strays.note(b"x" * 40, FOOTPRINT)
    bench.spill(chain(1))
    assert tried == [[b"x" * 40]] * 2


def test_after_strays_room_is_made_as_ever(new_spill):
    bench = new_spill(16, 4 * FOOTPRINT)
    bench.spill(chain(4))
    bench.strays.note(b"x" * 40, 1)
    young = chain(1, seed=1)
    bench.spill(young)
    assert young[0].name in bench.disk.kept


def test_a_stray_that_is_written_again_is_none(new_spill):
    bench = new_spill()
    (part,) = chain(1)
    bench.strays.note(part.name, FOOTPRINT)

    async def failing(names):
        return [Status.FAILED] * len(names)

    bench.disk.delete = failing
    bench.spill([part])
    assert part.name in bench.disk.kept
    assert len(bench.strays) == 0


def test_room_is_made_in_lots_between_which_others_run(new_spill, monkeypatch):
    monkeypatch.setattr("kvtier.catalog.below.LOT", 2)
    monkeypatch.setattr("kvtier.catalog.spill.LOT", 2)
    bench = new_spill(80, 64 * FOOTPRINT)
    young = [part for seed in range(1, 7) for part in chain(1, seed=seed)]
    bench.spill(chain(64))
    bench.small.save(young)
    turns = []

    async def other():
        while not all(part.name in bench.disk.kept for part in young):
            turns.append(len(bench.catalog._shelves[LMDB].order))
            await asyncio.sleep(0)

    async def scene():
        await bench.offer(young)
        await asyncio.gather(other(), bench.spiller.drained())

    asyncio.run(scene())
    assert {62, 60, 58} <= set(turns)
    assert bench.dropped("full") == 0


def test_a_tier_that_is_full_although_its_budget_is_not_loses_a_lot(new_spill):
    bench = new_spill(80, 64 * FOOTPRINT)
    old, young = chain(64), chain(1, seed=1)
    bench.spill(old)
    bench.disk.fate = {young[0].name: [Status.FULL]}
    bench.disk.deletes.clear()
    bench.spill(young)
    assert young[0].name in bench.disk.kept
    assert [len(names) for names in bench.disk.deletes] == [1, 2]  # a thirty-second of the budget


def test_a_tier_that_stays_full_is_given_up(new_spill):
    bench = new_spill(16, 64 * FOOTPRINT)
    parts = chain(2)
    bench.disk.fate = {part.name: [Status.FULL] * 100 for part in parts}
    bench.spill(parts)
    assert len(bench.disk.calls) == 8
    assert bench.dropped("full") == 2


def test_a_lot_has_a_bound_whatever_the_budget(new_spill, monkeypatch):
    monkeypatch.setattr(spill, "BATCH_BYTES", 4 * FOOTPRINT)
    old, young = chain(8), chain(1, seed=1)
    for bench in (new_spill(), new_spill(16, 1000 * FOOTPRINT)):
        bench.spill(old)
        bench.disk.fate = {young[0].name: [Status.FULL]}
        bench.spill(young)
        assert [len(names) for names in bench.disk.deletes] == [4]


def test_as_many_leave_as_are_tried_again(new_spill):
    bench = new_spill(16, 32 * FOOTPRINT)
    bench.spill(chain(8))
    young = [part for seed in (1, 2, 3) for part in chain(1, seed=seed)]
    bench.disk.fate = {part.name: [Status.FULL] for part in young}
    bench.spill(young)
    assert [len(names) for names in bench.disk.deletes] == [3]


def test_what_hangs_under_a_part_that_found_no_room_is_written_again_with_it(new_spill):
    """In the meantime the tier has a tail without a head, which nobody may forget."""
    bench = new_spill()
    parts = chain(2)
    bench.disk.fate = {parts[0].name: [Status.FULL]}
    bench.spill(parts)
    assert bench.numbers == [[0, 1], [0, 1]]
    assert bench.disk.deletes == [[parts[1].name]]
    assert [bench.catalog.tiers_of(row) for row in bench.small.rows(parts)] == [[LMDB]] * 2
    assert len(bench.strays) == 0


def test_for_a_batch_that_is_too_late_by_then_nothing_leaves(new_spill):
    bench = new_spill(16, 32 * FOOTPRINT)
    bench.spill(chain(8))
    young, write = chain(1, seed=1), bench.disk.write
    bench.disk.fate = {young[0].name: [Status.FULL]}

    async def slow(writes):
        bench.small.clock.now += spill.LATE_SECONDS + 1
        return await write(writes)

    bench.disk.write = slow
    bench.spill(young)
    assert bench.dropped("deadline") == 1
    assert bench.disk.deletes == []
    assert len(bench.disk.kept) == 8


def test_nothing_is_counted_where_nothing_was_dropped(new_spill):
    bench = new_spill()
    bench.spill(chain(2))
    assert not [name for name in bench.small.metrics.snapshot() if "dropped_spills" in name]


# ---------------------------------------------------------------------------------------- quotas


def test_what_no_room_can_be_made_for_within_a_ceiling_is_dropped_and_others_are_not(new_spill):
    bench = new_spill(64, 32 * FOOTPRINT, {"one": Quota(ceiling=1 / 16)})
    mine = bench.catalog.owner(b"one", "one")
    parts = [part._replace(owner=mine) for part in chain(3)]
    others = chain(2, seed=1)
    bench.small.save(parts)
    bench.spill([*parts, *others])
    assert bench.dropped("quota") == 1
    assert bench.numbers == [[0, 1, 0], [1]]
    assert list(bench.disk.kept) == [part.name for part in (*parts[:2], *others)]


def test_a_batch_within_its_ceilings_is_looked_at_before_room_is_made_and_after(
    new_spill, monkeypatch
):
    bench = new_spill(16, 64 * FOOTPRINT)
    looks, unfit = [], bench.catalog.unfit

    def counted(rows, tier):
        looks.append(len(rows))
        return unfit(rows, tier)

    monkeypatch.setattr(bench.catalog, "unfit", counted)
    bench.spill(chain(3))
    assert looks == [3, 3]


# ----------------------------------------------------------------------------------------- clear


def test_a_tier_is_cleared_in_lots_between_which_others_run(new_spill, monkeypatch):
    monkeypatch.setattr("kvtier.catalog.below.LOT", 2)
    bench = new_spill()
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


def test_a_clear_waits_for_a_batch_to_be_written(new_spill):
    bench = new_spill()
    parts = chain(2)
    bench.small.save(parts)

    async def scene():
        bench.disk.gate.clear()
        await bench.offer(parts)
        await asyncio.sleep(0)
        clear = asyncio.ensure_future(bench.spiller.clear())
        for _ in range(10):
            await asyncio.sleep(0)
        bench.disk.gate.set()
        await clear
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.disk.kept == {}


def test_a_tier_that_does_not_answer_is_not_asked_to_delete_what_failed(new_spill):
    bench = new_spill()
    (part,) = chain(1)
    bench.disk.fate = {part.name: [Status.FAILED]}
    bench.disk.available = False
    bench.spill([part])
    assert bench.disk.deletes == []
    assert part.name in bench.strays
