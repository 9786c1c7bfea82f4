"""Spilling in time: what waits for too long is dropped, and no callback of the loop is long."""

from __future__ import annotations

import asyncio
import math

import pytest

from kvtier.catalog import spill
from kvtier.catalog.spill import LATE_SECONDS, Spiller
from kvtier.testing.small_catalog import chain
from kvtier.tiers.budget import WriteBudget
from kvtier.tiers.store import Status


def hang(bench, parts, seconds):
    """Let the first part's write hang for so long, while the others are queued or wait."""

    async def scene():
        bench.disk.gate.clear()
        await bench.offer(parts[:1])
        await bench.until(lambda: bool(bench.disk.calls))
        await bench.offer(parts[1:])
        bench.small.clock.now += seconds
        await bench.spiller.expire()
        held = bench.catalog._index.held_rows
        bench.disk.gate.set()
        await bench.spiller.drained()
        return held

    bench.small.save(parts)
    return asyncio.run(scene())


def test_what_waits_for_too_long_is_dropped_and_counted(new_spill):
    """Three are queued and four wait by name, behind one whose call hangs."""
    bench = new_spill(8)
    assert hang(bench, chain(8), LATE_SECONDS + 1) == 1, "only the call keeps its slot"
    assert bench.numbers == [[0]]
    assert bench.dropped("deadline") == 7


def test_nothing_is_dropped_before_its_time(new_spill):
    bench = new_spill(8)
    assert hang(bench, chain(8), LATE_SECONDS) == 4
    assert bench.dropped("deadline") == 0
    assert len(bench.disk.kept) == 8


def test_without_a_deadline_a_hung_call_keeps_the_slots_of_others(new_spill, monkeypatch):
    """The twin."""

    async def never(self):
        del self

    monkeypatch.setattr(Spiller, "expire", never)
    assert hang(new_spill(8), chain(8), 1e6) == 4


def test_many_are_dropped_in_slices_between_which_others_run(new_spill, monkeypatch):
    monkeypatch.setattr(spill, "_SLICE", 2)
    bench = new_spill(8)
    parts = chain(8)
    bench.small.save(parts)
    turns = []

    async def other():
        while bench.spiller._queue or bench.spiller._waiting:
            turns.append(len(bench.spiller._queue) + len(bench.spiller._waiting))
            await asyncio.sleep(0)

    async def scene():
        async with bench.strays.changing:
            await bench.offer(parts)
            bench.small.clock.now += LATE_SECONDS + 1
            await asyncio.gather(bench.spiller.expire(), other())
        await bench.spiller.drained()

    asyncio.run(scene())
    assert turns == [6, 4, 2]
    assert bench.disk.calls == []
    assert bench.dropped("deadline") == 8


def test_what_waits_for_the_tier_to_be_changed_expires_too(new_spill):
    """A delete hangs: the parts behind it keep their slots until their deadline, and no longer."""
    bench = new_spill()
    parts = chain(2)
    bench.small.save(parts)

    async def scene():
        async with bench.strays.changing:
            await bench.offer(parts)
            for _ in range(5):
                await asyncio.sleep(0)
            bench.small.clock.now += LATE_SECONDS + 1
            await bench.spiller.expire()
            assert bench.catalog._index.held_rows == 0
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.disk.calls == []


def test_a_batch_for_which_room_was_made_too_slowly_is_not_written(new_spill):
    bench = new_spill()
    parts = chain(2)

    async def slow(jobs, extra):
        del jobs, extra
        bench.small.clock.now += LATE_SECONDS + 1

    bench.spiller._make_room = slow
    bench.spill(parts)
    assert bench.disk.calls == []
    assert bench.dropped("deadline") == 2


def test_what_was_dropped_may_be_offered_again(new_spill):
    bench = new_spill(8)
    parts = chain(8)
    hang(bench, parts, LATE_SECONDS + 1)
    bench.spill(parts)
    assert len(bench.disk.kept) == 8


def test_time_counts_from_when_a_part_was_offered_first(new_spill):
    bench = new_spill(4)
    parts = chain(4)
    bench.small.save(parts)

    async def scene():
        async with bench.strays.changing:
            await bench.offer(parts)  # two are queued, two wait
            bench.small.clock.now += LATE_SECONDS
            await bench.offer(parts)
            bench.small.clock.now += 1
            await bench.spiller.expire()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.dropped("deadline") == 4


# ---------------------------------------------------------------------------------------- slices


def steps_of(bench, parts):
    """Return how many parts were queued in each callback of the loop."""
    bench.small.save(parts)
    counts = []
    enqueue = bench.spiller._enqueue

    def counted(*args):
        counts[-1] += 1
        return enqueue(*args)

    bench.spiller._enqueue = counted

    async def ticks(offer):
        while not offer.done():
            counts.append(0)
            await asyncio.sleep(0)

    async def scene():
        async with bench.strays.changing:
            counts.append(0)
            await ticks(asyncio.ensure_future(bench.offer(parts)))
        await bench.spiller.drained()

    asyncio.run(scene())
    return [count for count in counts if count]


def test_a_long_prompt_is_queued_in_slices_and_in_order(new_spill, monkeypatch):
    monkeypatch.setattr(spill, "_SLICE", 8)
    bench = new_spill(80)
    parts = chain(40)
    assert max(steps_of(bench, parts)) == 5  # each a look at what it lacks, and a write
    assert [depth for call in bench.numbers for depth in call] == list(range(40))


def test_a_long_chain_of_ancestors_is_queued_in_slices_too(new_spill, monkeypatch):
    monkeypatch.setattr(spill, "_SLICE", 8)
    bench = new_spill(80)
    parts = chain(40)
    bench.small.save(parts)
    assert max(steps_of(bench, parts[39:])) <= 8
    assert [depth for call in bench.numbers for depth in call] == list(range(40))


def test_in_one_piece_it_would_be_one_callback(new_spill, monkeypatch):
    """The twin."""
    monkeypatch.setattr(spill, "_SLICE", 1 << 20)
    assert steps_of(new_spill(80), chain(40)) == [40]


def test_a_batch_has_a_bound_in_parts(new_spill, monkeypatch):
    monkeypatch.setattr(spill, "_BATCH_PARTS", 3)
    bench = new_spill()
    bench.spill(chain(7))
    assert bench.numbers == [[0, 1, 2], [3, 4, 5], [6]]


# ------------------------------------------------------------------------ longer than the queue


@pytest.mark.parametrize("why", ["failed", "budget", "deadline"])
def test_a_prompt_longer_than_the_queue_is_given_up_with_its_head(new_spill, why):
    """The heads that are queued first are dropped: they would be again and again, without end."""
    bench = new_spill(8)
    parts = chain(8)
    bench.small.save(parts)
    if why == "failed":
        bench.disk.fate = {part.name: [Status.FAILED] * 100 for part in parts}
    if why == "budget":
        bench.disk.writes = WriteBudget(100, bench.small.clock)

    async def scene():
        async with bench.strays.changing:
            await bench.offer(parts[7:])
            bench.small.clock.now += (LATE_SECONDS + 1) * (why == "deadline")
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.dropped(why) >= 1
    assert bench.dropped("headless") >= 1
    assert len(bench.disk.calls) <= 1
    bench.disk.fate = {}
    bench.disk.writes = WriteBudget(math.inf, bench.small.clock)
    bench.spill(parts)
    assert len(bench.disk.kept) == 8, "offered again, it is written"


def test_without_end_it_would_be(new_spill, monkeypatch):
    """The twin: nothing is remembered of what was queued."""

    bench = new_spill(8)
    nothing = property(lambda self: {}, lambda self, value: None)
    monkeypatch.setattr(Spiller, "_begun", nothing, raising=False)
    parts = chain(8)
    bench.small.save(parts)
    bench.disk.writes = WriteBudget(100, bench.small.clock)

    async def scene():
        await bench.offer(parts[7:])
        with pytest.raises(AssertionError, match="it never came to pass"):
            await bench.until(lambda: bench.spiller._task is None)
        bench.spiller._waiting.clear()
        await bench.spiller.drained()

    asyncio.run(scene())


# ------------------------------------------------------------------------------ while it goes on


def test_what_is_late_is_told_from_what_is_not(new_spill):
    bench = new_spill(8)
    parts = chain(8)
    bench.small.save(parts)

    async def scene():
        async with bench.strays.changing:
            await bench.offer(parts[:2])
            bench.small.clock.now += 1
            await bench.offer(parts[2:])  # two are queued behind them, four wait
            bench.small.clock.now += LATE_SECONDS
            await bench.spiller.expire()
            assert len(bench.spiller._queue) == 2
            assert bench.dropped("deadline") == 2
            bench.small.clock.now += LATE_SECONDS
            await bench.spiller.expire()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.dropped("deadline") == 8


def test_names_that_are_late_are_told_from_those_that_are_not(new_spill):
    bench = new_spill(8)
    parts = chain(8)
    bench.small.save(parts)

    async def scene():
        async with bench.strays.changing:
            await bench.offer(parts[:6])  # four are queued, two wait
            bench.small.clock.now += 1
            await bench.offer(parts[6:])
            bench.small.clock.now += LATE_SECONDS
            await bench.spiller.expire()
            assert list(bench.spiller._waiting) == [part.name for part in parts[6:]]
            bench.small.clock.now += LATE_SECONDS
            await bench.spiller.expire()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.dropped("deadline") == 8


def test_an_offer_lets_others_run_between_its_lots(new_spill, monkeypatch):
    monkeypatch.setattr(spill, "LOT", 2)
    bench = new_spill()
    bench.disk.admission = "second-touch"
    parts = chain(6)
    bench.small.save(parts)
    seen = []

    async def other(offer):
        while not offer.done():
            seen.append(len(bench.spiller.admission._seen))
            await asyncio.sleep(0)

    async def scene():
        await other(asyncio.ensure_future(bench.offer(parts)))
        await bench.offer(parts[:1])  # one lot is taken at once
        await bench.spiller.drained()

    asyncio.run(scene())
    assert seen == [0, 2, 4]
    assert bench.numbers == [[0]]


def test_one_lot_is_taken_without_a_turn_for_others(new_spill):
    bench = new_spill()
    parts = chain(2)
    bench.small.save(parts)

    async def scene():
        offer = bench.offer(parts)
        with pytest.raises(StopIteration):
            offer.send(None)
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.numbers == [[0, 1]]


def test_who_waits_for_the_end_waits_for_offers_under_way(new_spill, monkeypatch):
    monkeypatch.setattr(spill, "LOT", 2)
    bench = new_spill()
    parts = chain(6)
    bench.small.save(parts)

    async def scene():
        offers = [asyncio.ensure_future(bench.offer(parts)) for _ in range(2)]
        await asyncio.sleep(0)
        await bench.spiller.drained()
        assert len(bench.disk.kept) == 6
        await asyncio.gather(*offers)

    asyncio.run(scene())


def test_offers_are_taken_one_after_the_other(new_spill, monkeypatch):
    monkeypatch.setattr(spill, "LOT", 1)
    bench = new_spill()
    one, two = chain(2), chain(2, seed=1)
    bench.small.save([*one, *two])

    async def scene():
        async with bench.strays.changing:
            await asyncio.gather(bench.offer(one), bench.offer(two))
            assert list(bench.spiller._queued) == bench.small.rows([*one, *two])
        await bench.spiller.drained()

    asyncio.run(scene())


def test_one_task_writes_and_none_where_nothing_is_to_be_written(new_spill):
    bench = new_spill()
    parts = chain(2)
    bench.small.save(parts)

    async def scene():
        await bench.offer([])
        assert bench.spiller._task is None
        async with bench.strays.changing:
            await bench.offer(parts[:1])
            task = bench.spiller._task
            await bench.offer(parts[1:])
            assert bench.spiller._task is task
        await bench.spiller.drained()

    asyncio.run(scene())
