"""Admission: which parts a tier takes, and when; ancestors first, whatever the mode."""

from __future__ import annotations

import asyncio

import pytest

import kvtier
from kvtier.catalog.admission import Admission
from kvtier.catalog.catalog import Catalog
from kvtier.testing.small_catalog import LMDB, PART_BYTES, SmallCatalog, chain
from kvtier.testing.small_spill import FOOTPRINT
from kvtier.testing.toy import CHUNK, NAMESPACE, Toy, dram, prompt
from kvtier.tiers.budget import WriteBudget


def written(bench):
    return [depth for call in bench.numbers for depth in call]


# ------------------------------------------------------------------------------------------- auto


def test_auto_takes_all_until_the_budget_is_short_and_then_what_is_used_again(new_spill):
    bench = new_spill()
    bench.disk.admission = "auto"
    bench.disk.writes = WriteBudget(8 * FOOTPRINT, bench.small.clock)
    first, second = chain(5), chain(2, seed=1)
    assert not bench.spiller.admission.counts_uses
    bench.spill(first)
    assert written(bench) == [0, 1, 2, 3, 4]
    assert bench.spiller.admission.counts_uses
    bench.spill(second)
    assert written(bench) == [0, 1, 2, 3, 4], "it was not used yet"
    bench.spill(second[1:])
    assert written(bench) == [0, 1, 2, 3, 4, 0, 1], "its head comes along"
    bench.small.clock.now += 86_400
    bench.spill(chain(1, seed=2))
    assert written(bench)[7:] == [0]


def test_auto_without_a_look_at_the_budget_spends_it_on_what_is_never_used(new_spill, monkeypatch):
    """The twin."""
    monkeypatch.setattr(WriteBudget, "short", False)
    bench = new_spill()
    bench.disk.admission = "auto"
    bench.disk.writes = WriteBudget(8 * FOOTPRINT, bench.small.clock)
    bench.spill(chain(5), chain(3, seed=1))
    assert bench.disk.writes.left < FOOTPRINT


def test_what_was_offered_while_there_was_plenty_counts_as_seen(new_spill):
    bench = new_spill(4)
    bench.disk.admission = "auto"
    bench.disk.writes = WriteBudget(8 * FOOTPRINT, bench.small.clock)
    (part,) = chain(1)
    bench.spill([part])
    bench.catalog.lost(bench.small.rows([part])[0], LMDB)
    bench.disk.writes.spend(6 * FOOTPRINT)
    bench.spill([part])
    assert written(bench) == [0, 0]


@pytest.mark.parametrize(
    ("mode", "counts"), [("through", False), ("on-evict", False), ("second-touch", True)]
)
def test_uses_are_offered_only_where_they_matter(new_spill, mode, counts):
    bench = new_spill()
    bench.disk.admission = mode
    assert bench.spiller.admission.counts_uses is counts
    bench.disk.writes = WriteBudget(FOOTPRINT, bench.small.clock)
    bench.disk.writes.spend(FOOTPRINT)
    assert bench.spiller.admission.counts_uses is counts, "however short the budget is"


def test_on_a_real_disk_what_is_used_is_written_once_the_budget_is_short(tmp_path):
    store = parse_footprint(tmp_path)
    url = f"lmdb:{tmp_path}/kv?capacity=64MiB&write_budget={8 * store}B"
    toy = Toy(kvtier.open(dram(16), url, namespace=NAMESPACE))
    toy.save("a", prompt(5 * CHUNK))
    later = prompt(2 * CHUNK + 1, 1)
    toy.save("b", later[:-1])
    parts = 'kvtier_tier_parts{tier="lmdb"}'
    assert toy.cache.figures()[parts] == 5
    assert toy.load("c", later)[2]
    assert toy.cache.flush(timeout=20)
    assert toy.cache.figures()[parts] == 7
    assert toy.cache.figures()['kvtier_write_budget_bytes{tier="lmdb"}'] < 2 * store
    toy.close()


def parse_footprint(folder) -> int:
    """Return what a chunk of the toy takes on such a disk."""
    with kvtier.open(dram(4), f"lmdb:{folder}/probe?capacity=64MiB", namespace=NAMESPACE) as cache:
        return cache._desk.depot.tiers[1].footprint(cache.shape.nbytes[0])


# --------------------------------------------------------------------------------------- on-evict


def test_on_evict_nothing_is_written_before_dram_is_nearly_full(new_spill):
    bench = new_spill(16)
    bench.disk.admission = "on-evict"
    parts = chain(14)
    bench.spill(parts, parts, parts)
    assert bench.disk.calls == []


def test_on_evict_what_would_leave_next_is_written_behind_its_ancestors(new_spill):
    bench = new_spill(16)
    bench.disk.admission = "on-evict"
    old, young = chain(3), chain(13, seed=1)
    bench.spill(old)
    bench.spill(young)
    assert written(bench) == [0, 1, 2], "two slots are above the mark: the tail, and what it needs"
    bench.small.save(chain(2, seed=2))
    assert bench.small.found(old) == [0, LMDB, LMDB]


def test_without_looking_ahead_what_dram_gives_up_is_lost(new_spill, monkeypatch):
    """The twin."""
    monkeypatch.setattr(Catalog, "leaving", lambda self, tier, nbytes: [])
    bench = new_spill(16)
    bench.disk.admission = "on-evict"
    old = chain(3)
    bench.spill(old)
    bench.spill(chain(13, seed=1))
    bench.small.save(chain(2, seed=2))
    assert bench.small.found(old) == [0]


def test_on_evict_what_left_before_its_turn_is_counted_and_never_waited_for(new_spill):
    bench = new_spill(16)
    bench.disk.admission = "on-evict"
    bench.small.save(chain(10, seed=1))
    young = chain(6, seed=2)
    bench.small.save(young)

    async def scene():
        bench.disk.gate.clear()
        bench.spiller._queued_bytes = 8 * PART_BYTES  # the queue is full of what is older
        await bench.offer([])
        bench.spiller._queued_bytes = 0
        assert len(bench.spiller._waiting) == 2
        assert bench.small.save(chain(16, seed=3)) == 16, "nothing is held for it"
        bench.disk.gate.set()
        await bench.offer([])
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.dropped("evicted") == 2


def test_what_nothing_can_use_is_not_written_when_it_leaves(new_spill):
    bench = new_spill(4)
    bench.disk.admission = "on-evict"
    (old,), (young,) = chain(1), chain(1, seed=1)
    bench.small.save([old, young, *chain(2, seed=2)])
    bench.catalog.outgrown([old.name])
    bench.spill([])
    assert list(bench.disk.kept) == [young.name]


# -------------------------------------------------------------------------------------- the peek


def full(slots: int) -> SmallCatalog:
    small = SmallCatalog(slots)
    for seed in range(slots):
        assert small.save(chain(1, seed=seed)) == 1
    return small


def test_what_leaves_next_is_told_in_order_and_nothing_changes():
    small = full(4)
    before = list(small.catalog._shelves[0].order)
    names = [chain(1, seed=seed)[0].name for seed in range(4)]
    assert small.catalog.leaving(LMDB, 0) == []
    assert small.catalog.leaving(LMDB, 1) == names[:1]
    assert small.catalog.leaving(LMDB, 2 * PART_BYTES + 1) == names[:3]
    assert list(small.catalog._shelves[0].order) == before
    small.catalog.stored(chain(1, seed=0)[0], LMDB, FOOTPRINT)
    lease = small.lease(chain(1, seed=1), 1.0)
    assert small.catalog.leaving(LMDB, 3 * PART_BYTES) == names[2:3], "its own room, not more"
    lease.release()
    small.close()


def test_what_hangs_under_a_part_leaves_before_it():
    small = SmallCatalog(6)
    parts, branch = chain(3), chain(1, seed=1)[0]
    branch = branch._replace(parent=parts[0].name, depth=1)
    small.save([*parts, branch, *chain(2, seed=2)])
    leaving = small.catalog.leaving(LMDB, 4 * PART_BYTES)
    assert leaving == [part.name for part in (parts[2], parts[1], branch, parts[0])]
    assert small.save(chain(4, seed=3)) == 4
    assert small.found([*parts]) == []
    assert small.found(chain(2, seed=2)) == [0, 0], "it told the truth"
    small.close()


def test_the_peek_is_bounded(monkeypatch):
    monkeypatch.setattr("kvtier.catalog.below._PEEK_PARTS", 3)
    small = full(8)
    assert len(small.catalog.leaving(LMDB, 8 * PART_BYTES)) == 3
    small.close()


# -------------------------------------------------------------------------------- no headless tail


def test_a_part_whose_head_is_nowhere_near_is_not_written(new_spill):
    """Its parent is in another tier only: after a restart it would be a tail without a head."""
    bench = new_spill()
    parts = chain(3)
    bench.small.save(parts)
    row = bench.small.rows(parts)[0]
    with bench.catalog._lock:
        bench.catalog._room.enter(row, LMDB, FOOTPRINT)
        bench.catalog._room.leave(row, 0)
        bench.catalog._room.index.present[row] = 1 << 2  # a third tier has it
    assert bench.catalog.missing_chain(parts[2].name, LMDB, ()) == []
    with bench.catalog._lock:
        bench.catalog._room.index.present[row] = 1 << LMDB
    assert len(bench.catalog.missing_chain(parts[2].name, LMDB, ())) == 2


def test_a_child_is_not_indexed_where_its_parent_was_lost_meanwhile(new_spill):
    bench = new_spill()
    parts = chain(2)
    bench.spill(parts[:1])
    bench.small.save(parts)

    async def scene():
        bench.disk.gate.clear()
        await bench.offer(parts)
        await bench.until(lambda: len(bench.disk.calls) == 2)
        bench.catalog.lost(bench.small.rows(parts)[0], LMDB)  # a fetch found it spoilt
        bench.disk.gate.set()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.catalog.tiers_of(bench.small.rows(parts)[1]) == []
    assert bench.dropped("headless") == 1
    assert parts[1].name in bench.disk.deletes[-1]


def test_what_a_probe_saw_meanwhile_is_there_once(new_spill):
    bench = new_spill()
    (part,) = chain(1)
    bench.small.save([part])

    async def scene():
        bench.disk.gate.clear()
        await bench.offer([part])
        await bench.until(lambda: bool(bench.disk.calls))
        bench.catalog.stored(part, LMDB, FOOTPRINT)
        bench.disk.gate.set()
        await bench.spiller.drained()

    asyncio.run(scene())
    assert bench.catalog._shelves[LMDB].used == FOOTPRINT


def test_without_the_guard_the_tier_has_a_tail_without_a_head(new_spill, monkeypatch):
    """The twin."""
    monkeypatch.setattr(Catalog, "_unfit", lambda self, row, tier, fit: "")
    test = test_a_child_is_not_indexed_where_its_parent_was_lost_meanwhile
    with pytest.raises(AssertionError, match=r"assert \[1\] == \[\]"):
        test(new_spill)


def test_the_modes_are_those_of_the_configuration(new_spill):
    bench = new_spill()
    taken = {}
    for mode in kvtier.config.ADMISSIONS:
        bench.disk.admission = mode
        admission = Admission(bench.spiller._tier)
        taken[mode] = [admission.admits(name) for name in (b"a", b"a")]
    assert taken == {
        "through": [True, True],
        "second-touch": [False, True],
        "on-evict": [False, False],
        "auto": [True, True],
    }
