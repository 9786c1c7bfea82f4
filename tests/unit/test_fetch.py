"""Fetching from slower tiers: which reads there are, where they go, and what a failure costs."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.catalog import fetch
from kvtier.catalog.catalog import Catalog, Shelf
from kvtier.catalog.fetch import Fetcher
from kvtier.catalog.strays import Strays
from kvtier.deadline import Deadline
from kvtier.memory.arena import Arena
from kvtier.metrics import Metrics
from kvtier.policies.lru import Lru
from kvtier.testing.hands import Hands
from kvtier.testing.small_catalog import PART_BYTES, SHAPE, SUM, chain, names
from kvtier.tiers.store import Capabilities, Status
from kvtier.tiers.tier import Fetched

SLOTS = 8
FAST, SLOW = 1, 2


class Disk:
    """A tier that answers as told: what it has not is absent."""

    capabilities = Capabilities()
    readable = True
    THREADS = 1

    def __init__(self, name: str) -> None:
        self.name, self.store = name, self
        self.fate: dict[bytes, Status] = {}
        self.calls: list[list[int]] = []
        self.deadlines: list[Deadline] = []
        self.late = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    def footprint(self, nbytes):
        return nbytes

    async def read(self, wanted, deadline):
        if not wanted:
            return []
        self.deadlines.append(deadline)
        self.calls.append([int.from_bytes(one.id[16:32], "big") for one in wanted])
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return [
            Fetched(self.fate.get(one.id, Status.ABSENT), SUM, late=self.late) for one in wanted
        ]


class Prompt:
    """A prompt of one-part chunks."""

    shape, owner = SHAPE, 0

    def __init__(self, parts) -> None:
        self.names = names(parts)


class Bench:
    """A catalog over two slower tiers, and what fetches from them."""

    def __init__(self) -> None:
        self.arena = Arena(SLOTS * PART_BYTES, [PART_BYTES])
        shelves = [Shelf(name, Lru.together(), None) for name in ("dram", "fast", "slow")]
        self.catalog = Catalog(self.arena, shelves, Hands(), Metrics())
        self.tiers = {FAST: Disk("fast"), SLOW: Disk("slow")}
        self.strays = {number: Strays(tier) for number, tier in self.tiers.items()}
        backwards = dict(reversed(self.tiers.items()))
        self.fetcher = Fetcher(self.catalog, self.arena, backwards, self.strays, Hands())

    def keep(self, parts, *tiers) -> None:
        """Let tiers have parts."""
        for tier in tiers:
            for part in parts:
                self.catalog.stored(part, tier, PART_BYTES)
                self.tiers[tier].fate[part.name] = Status.OK

    async def fetch(self, parts, within: float = 1.0):
        tokens = len(parts) * SHAPE.chunk_tokens
        return await self.fetcher.fetch(Prompt(parts), 0, tokens, within=within, hold=1.0)

    def fetched(self, parts):
        """Fetch, and return the sources of the lease, which is released."""

        async def scene():
            lease = await self.fetch(parts)
            if lease is None:
                return None
            lease.release()
            return lease.sources

        return asyncio.run(scene())

    def tiers_of(self, part) -> list[int]:
        return self.catalog.tiers_of(self.catalog._index.find(part.name))


@pytest.fixture
def bench():
    found = Bench()
    yield found
    assert found.catalog._index.held_rows == 0
    assert not found.fetcher._reading
    found.arena.close()


def test_a_part_comes_from_the_fastest_tier_that_has_it(bench):
    parts = chain(3)
    bench.keep(parts, SLOW)
    bench.keep(parts[:2], FAST)
    assert bench.fetched(parts) == ("fast", "fast", "slow")
    assert bench.tiers[FAST].calls == [[0, 1]]
    assert bench.tiers[SLOW].calls == [[2]]
    assert bench.fetched(parts) == ("dram",) * 3


def test_no_tier_is_asked_for_what_it_has_not(bench):
    parts = chain(2)
    bench.keep(parts, SLOW)
    assert bench.fetched(parts) == ("slow", "slow")
    assert bench.tiers[FAST].calls == []
    assert len(bench.strays[FAST]) == 0


def test_a_read_begins_for_each_group_of_parts_and_none_for_nothing(bench):
    parts = chain(4)
    bench.keep(parts[:2], FAST)
    bench.keep(parts[2:], SLOW)
    begun = []
    for wanted in (parts, parts):  # the second time all are in DRAM
        bench.fetched(wanted)
        begun.append(bench.fetcher._serial)
    assert begun == [2, 2]


def test_what_is_partly_there_says_so(bench):
    parts = chain(3)
    bench.keep(parts, SLOW)
    assert bench.fetched(parts[:1]) == ("slow",)
    assert bench.fetched(parts) == ("dram", "slow", "slow")


def test_small_parts_are_read_together_and_large_ones_alone(bench, monkeypatch):
    parts = chain(5)
    bench.keep(parts, FAST)
    assert bench.fetched(parts[:2]) == ("fast",) * 2
    assert bench.tiers[FAST].calls == [[0, 1]]
    monkeypatch.setattr(fetch, "_CALL_BYTES", 2 * PART_BYTES)
    bench.catalog.clear(0)
    assert bench.fetched(parts) == ("fast",) * 5
    assert bench.tiers[FAST].calls[1:] == [[0, 1], [2, 3], [4]]
    monkeypatch.setattr(fetch, "_CALL_BYTES", 1)
    bench.catalog.clear(0)
    bench.tiers[FAST].calls.clear()
    assert bench.fetched(parts[:2]) == ("fast",) * 2
    assert bench.tiers[FAST].calls == [[0], [1]]


@pytest.mark.parametrize(("threads", "most", "calls"), [(2, 8, 4), (1, 8, 2), (1, 3, 3), (8, 8, 8)])
def test_a_large_fetch_is_two_calls_for_each_thread(bench, monkeypatch, threads, most, calls):
    monkeypatch.setattr(fetch, "_CALL_BYTES", PART_BYTES)
    monkeypatch.setattr(fetch, "_MOST_CALL_BYTES", most * PART_BYTES)
    monkeypatch.setattr(bench.tiers[FAST], "THREADS", threads, raising=False)
    parts = chain(8)
    bench.keep(parts, FAST)
    assert bench.fetched(parts) == ("fast",) * 8
    assert len(bench.tiers[FAST].calls) == calls
    assert [number for call in bench.tiers[FAST].calls for number in call] == list(range(8))


def test_what_leaves_its_tier_before_its_read_begins_is_a_miss(bench, monkeypatch):
    parts = chain(2)
    bench.keep(parts, FAST)
    hold = bench.catalog.hold_for_fetch

    def leaving(*asked, **more):
        chunks, fresh = hold(*asked, **more)
        for row in fresh:
            bench.catalog.lost(row, FAST, "lost")
        return chunks, fresh

    monkeypatch.setattr(bench.catalog, "hold_for_fetch", leaving)
    assert bench.fetched(parts) is None
    assert bench.tiers[FAST].calls == []


def test_what_lies_in_different_tiers_is_read_at_the_same_time(bench):
    parts = chain(4)
    bench.keep(parts[:2], FAST)
    bench.keep(parts[2:], SLOW)

    async def scene():
        for tier in bench.tiers.values():
            tier.gate.clear()
        waiting = asyncio.ensure_future(bench.fetch(parts))
        for _ in range(10):
            await asyncio.sleep(0)
        # What lies in the slow tier only is not in the fast tier's way, nor waits for it.
        assert bench.tiers[FAST].calls == [[0, 1]]
        assert bench.tiers[SLOW].calls == [[2, 3]]
        for tier in bench.tiers.values():
            tier.gate.set()
        (await waiting).release()

    asyncio.run(scene())


def test_of_two_copies_the_other_is_read_when_one_fails(bench):
    parts = chain(1)
    bench.keep(parts, FAST, SLOW)
    bench.tiers[FAST].fate = {}
    assert bench.fetched(parts) == ("slow",)
    assert bench.tiers_of(parts[0]) == [SLOW]
    assert len(bench.strays[FAST]) == 1  # it may be there after all


@pytest.mark.parametrize("readable", [True, False])
def test_a_part_is_lost_when_a_tier_failed_that_worked_before(bench, readable):
    parts = chain(1)
    bench.keep(parts, FAST)
    bench.tiers[FAST].readable = readable
    bench.tiers[FAST].fate = {parts[0].name: Status.FAILED}
    assert bench.fetched(parts) is None
    assert bench.tiers_of(parts[0]) == ([] if readable else [FAST])
    assert len(bench.strays[FAST]) == readable


def test_what_is_absent_is_lost_even_if_the_tier_failed_before(bench):
    parts = chain(1)
    bench.keep(parts, FAST)
    bench.tiers[FAST].readable = False
    bench.tiers[FAST].fate = {}
    assert bench.fetched(parts) is None
    assert bench.tiers_of(parts[0]) == []


def test_a_defect_below_is_a_miss(bench, monkeypatch):
    said = []
    monkeypatch.setattr(fetch._log, "exception", said.append)
    parts = chain(2)
    bench.keep(parts, FAST)
    bench.tiers[FAST].error = RuntimeError("a defect")
    assert bench.fetched(parts) is None
    assert said == ["a read failed; it counts as a miss"]
    assert bench.arena.slots_in_use == 0
    bench.tiers[FAST].error = None  # its traceback holds everything


def test_a_fetch_gives_up_in_time_and_what_it_read_is_there_for_the_next(bench):
    parts = chain(2)
    bench.keep(parts, FAST)

    async def scene():
        bench.tiers[FAST].gate.clear()
        assert await bench.fetch(parts, within=0.001) is None
        again = asyncio.ensure_future(bench.fetch(parts))
        for _ in range(10):
            await asyncio.sleep(0)
        assert bench.tiers[FAST].calls == [[0, 1]]  # both wait for one read
        bench.tiers[FAST].gate.set()
        lease = await again
        assert lease.sources == ("fast", "fast")
        lease.release()
        assert not bench.fetcher._tasks

    asyncio.run(scene())


def test_what_pins_have_no_room_for_is_not_even_read(bench):
    parts = chain(SLOTS // 2 + 1)
    bench.keep(parts, FAST)

    async def scene():
        tokens = len(parts) * SHAPE.chunk_tokens
        return await bench.fetcher.fetch(Prompt(parts), 0, tokens, within=1.0, hold=1.0, pin=1)

    assert asyncio.run(scene()) is None
    assert bench.tiers[FAST].calls == []


def test_what_was_withdrawn_while_it_was_read_leaves_no_stray(bench):
    """Who withdraws it sees to its record."""
    parts = chain(1)
    bench.keep(parts, FAST)
    bench.tiers[FAST].fate = {}

    async def scene():
        bench.tiers[FAST].gate.clear()
        fetching = asyncio.ensure_future(bench.fetch(parts))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bench.tiers[FAST].calls == [[0]]
        bench.catalog.withdraw([parts[0].name], "invalidated")
        bench.tiers[FAST].gate.set()
        assert await fetching is None

    asyncio.run(scene())
    assert len(bench.strays[FAST]) == 0


# ------------------------------------------------------------------------------------- deadlines


def test_a_read_has_the_deadline_of_who_waits_for_it_longest(bench):
    parts = chain(2)
    bench.keep(parts, SLOW)
    slow = bench.tiers[SLOW]
    now = bench.catalog._clock()

    async def scene():
        slow.gate.clear()
        fetches = [asyncio.create_task(bench.fetch(parts, within)) for within in (2.0, 5.0, 3.0)]
        for _ in range(50):
            await asyncio.sleep(0)
        slow.gate.set()
        for lease in await asyncio.gather(*fetches):
            lease.release()

    asyncio.run(scene())
    assert [one.until for one in slow.deadlines] == [now + 5.0]


@pytest.mark.parametrize(("late", "kept"), [(True, [SLOW]), (False, [])])
def test_what_came_too_late_is_not_lost(bench, late, kept):
    parts = chain(1)
    bench.keep(parts, SLOW)
    slow = bench.tiers[SLOW]
    slow.fate[parts[0].name], slow.late = Status.FAILED, late
    assert bench.fetched(parts) is None
    assert bench.tiers_of(parts[0]) == kept
