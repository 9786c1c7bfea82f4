"""Spilling to one slower tier: what is written and in which order, and what waits."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.catalog import spill
from kvtier.testing.small_catalog import LMDB, PART_BYTES, chain
from kvtier.testing.small_spill import FOOTPRINT

# ------------------------------------------------------------------------------------- the order


def test_what_is_offered_is_written_ancestors_first(new_spill):
    bench = new_spill()
    parts = chain(4)
    bench.small.save(parts)

    async def scene():
        await bench.offer(parts[3:])
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.numbers == [[0, 1, 2, 3]]
    assert list(bench.disk.kept) == [part.name for part in parts]
    assert bench.catalog.tiers_of(bench.small.rows(parts)[3]) == [LMDB]


def test_what_the_tier_has_is_not_written_again(new_spill):
    bench = new_spill()
    parts = chain(4)
    bench.spill(parts[:2], parts, parts)
    assert bench.numbers == [[0, 1], [2, 3]]
    assert [bench.dropped(why) for why in ("evicted", "failed", "full", "queue")] == [0] * 4


def test_a_tier_is_written_to_with_as_many_calls_as_it_takes(new_spill):
    bench = new_spill()
    bench.disk.THREADS = 3
    bench.spill(chain(5))
    assert bench.numbers == [[0], [1, 2], [3, 4]]
    bench.disk.calls.clear()
    bench.spill(chain(2, seed=1))
    assert bench.numbers == [[0], [1]]


def test_a_batch_is_a_fraction_of_the_budget(new_spill):
    bench = new_spill(16, 24 * PART_BYTES)
    bench.spill(chain(7))
    assert bench.numbers == [[0, 1], [2, 3], [4, 5], [6]]


def test_a_batch_without_a_budget_has_a_bound_too(new_spill, monkeypatch):
    monkeypatch.setattr(spill, "BATCH_BYTES", 3 * PART_BYTES)
    bench = new_spill()
    bench.spill(chain(5))
    assert bench.numbers == [[0, 1], [2, 3], [4]]
    large = new_spill(16, 1000 * FOOTPRINT)
    large.spill(chain(5))
    assert large.numbers == [[0, 1], [2, 3], [4]]


# ----------------------------------------------------------------------------------- second touch


def test_with_second_touch_only_what_is_used_again_is_written(new_spill):
    bench = new_spill()
    bench.disk.admission = "second-touch"
    parts = chain(4)
    bench.spill(parts[:2])
    assert bench.disk.calls == []
    bench.spill(parts)
    assert bench.numbers == [[0, 1]]


def test_the_memory_of_what_was_used_is_bounded(new_spill, monkeypatch):
    monkeypatch.setattr("kvtier.catalog.admission._SEEN_NAMES", 2)
    bench = new_spill()
    bench.disk.admission = "second-touch"
    one, two, three = (chain(1, seed=seed) for seed in (1, 2, 3))
    bench.spill(one, two, three, two, three)
    assert list(bench.disk.kept) == [two[0].name, three[0].name]
    bench.spill(one)
    assert len(bench.spiller.admission._seen) == 2
    assert one[0].name not in bench.disk.kept


# ------------------------------------------------------------------------------------- the queue


def test_the_queue_holds_half_of_dram_and_the_rest_waits_by_name(new_spill):
    bench = new_spill(8)
    parts = chain(8)
    bench.small.save(parts)

    async def scene():
        bench.disk.gate.clear()
        await bench.offer(parts)
        await asyncio.sleep(0)
        assert bench.catalog._index.held_rows == 4
        assert bench.spiller._queued_bytes == 4 * PART_BYTES
        bench.disk.gate.set()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.numbers == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_part_larger_than_half_of_dram_is_queued_alone(new_spill):
    bench = new_spill(1)
    bench.spill(chain(1))
    assert bench.numbers == [[0]]


def test_how_many_names_wait_is_bounded_and_those_beyond_are_counted(new_spill, monkeypatch):
    monkeypatch.setattr(spill, "_WAITING_NAMES", 3)
    bench = new_spill()
    parts = chain(5)
    bench.spill(parts)
    assert bench.numbers == [[0, 1, 2]]
    assert bench.dropped("queue") == 2


def test_what_dram_evicts_before_its_turn_is_counted(new_spill):
    bench = new_spill(4)
    parts = chain(4)
    bench.small.save(parts)

    async def scene():
        bench.disk.gate.clear()
        await bench.offer(parts)  # two are in the queue, two wait
        await asyncio.sleep(0)
        assert bench.small.save(chain(2, seed=1)) == 2
        bench.disk.gate.set()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.numbers == [[0, 1]]
    assert bench.dropped("evicted") == 2
    assert not bench.spiller._waiting


def test_while_a_batch_is_written_more_can_be_offered(new_spill):
    bench = new_spill()
    parts = chain(4)
    bench.small.save(parts)

    async def scene():
        bench.disk.gate.clear()
        await bench.offer(parts[:1])
        await asyncio.sleep(0)
        await bench.offer(parts[1:])
        await asyncio.sleep(0)
        assert len(bench.disk.calls) == 1  # one batch at a time
        bench.disk.gate.set()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.numbers == [[0], [1, 2, 3]]


def test_what_dram_evicts_at_its_turn_is_passed_over(new_spill, monkeypatch):
    bench = new_spill(4)
    parts = chain(2)
    missing_chain = bench.catalog.missing_chain

    def evicting(*args):
        found = missing_chain(*args)
        bench.catalog.clear(0)  # an engine's thread comes in between
        return found

    monkeypatch.setattr(bench.catalog, "missing_chain", evicting)
    bench.spill(parts)
    assert bench.disk.calls == []
    assert bench.dropped("evicted") == 2
    assert bench.dropped("withdrawn") == 0
    assert not any(bench.catalog._index.holds)


@pytest.mark.parametrize("when", ["queued", "written"])
def test_what_is_withdrawn_is_not_kept_below(new_spill, when):
    bench = new_spill()
    parts = chain(2)
    bench.small.save(parts)

    def withdraw():
        with bench.catalog._lock:
            bench.catalog._room.withdraw(bench.small.rows(parts)[1])

    async def scene():
        async with bench.strays.changing:
            bench.disk.gate.clear()
            await bench.offer(parts)
            await asyncio.sleep(0)
            if when == "queued":
                withdraw()
        await asyncio.sleep(0)
        await bench.until(lambda: bool(bench.disk.calls))
        if when == "written":
            withdraw()
        bench.disk.gate.set()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.numbers == ([[0]] if when == "queued" else [[0, 1]])
    assert bench.small.found(parts) == [0]
    assert bench.dropped("withdrawn") == 1
    assert bench.disk.deletes == ([[parts[1].name]] if when == "written" else [])
    assert len(bench.strays) == 0


def test_nothing_is_written_while_the_tier_is_changed(new_spill):
    bench = new_spill()
    parts = chain(1)
    bench.small.save(parts)

    async def scene():
        async with bench.strays.changing:
            await bench.offer(parts)
            for _ in range(10):
                await asyncio.sleep(0)
            assert bench.disk.calls == []
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.numbers == [[0]]
