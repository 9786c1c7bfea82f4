"""A crash at any step: what was durable is there afterwards, and nothing else is served."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvtier import opening
from kvtier.errors import MisuseError
from kvtier.testing.mutations import removed
from kvtier.testing.records import make_record
from kvtier.testing.simdisk import SimDisk
from kvtier.testing.simscenario import Scenario, TierShape
from kvtier.testing.simtask import SimError
from kvtier.testing.simworld import run_world
from kvtier.tiers import exact
from kvtier.tiers.store import Status

CALM = Scenario(
    dram_slots=5,
    tiers=(TierShape(None, durable=True, sync_every=4),),
    model="plain",
    clients=6,
    crashes=(300,),
    in_write=True,
)


def lives(seed: int, scenario: Scenario = CALM) -> list[dict[str, int]]:
    """Live through a world that crashes; return the events of each crash."""
    worlds = []
    run_world(seed, scenario, watch=worlds.append)
    return [dict(world.left.counts) for world in worlds if world.left is not None]


def failures(scenario: Scenario = CALM, seeds: int = 25) -> set[str]:
    """Return what goes wrong under any of some seeds."""
    found = set()
    for seed in range(seeds):
        try:
            run_world(seed, scenario)
        except SimError as error:
            found.add(str(error))
    return found


# ------------------------------------------------------------------------------------ the worlds


@pytest.mark.parametrize("step", [1, 60, 200, 400, 700])
def test_work_goes_on_wherever_the_process_ends(step):
    for seed in range(6):
        crashed = lives(seed, replace(CALM, crashes=(step, step // 2), in_write=bool(seed % 2)))
        assert [one["crashed"] for one in crashed] == [1, 1]


def test_a_process_that_has_come_to_rest_loses_nothing_that_was_synced():
    scenario = replace(CALM, tiers=(TierShape(None, durable=True),), crashes=(10**6,))
    for seed in range(5):
        (crashed,) = lives(seed, scenario)
        assert not crashed["crash_lost_record"] + crashed["crash_left_orphan"]


def test_crashes_meet_calls_tear_records_and_leave_orphans():
    totals = dict.fromkeys(("crash_met_call", "crash_tore_record", "crash_left_orphan"), 0)
    for seed in range(10):
        for name in totals:
            totals[name] += sum(one.get(name, 0) for one in lives(seed))
    assert all(totals.values()), totals


def test_a_crash_is_part_of_the_seed():
    early, late = (replace(CALM, crashes=(step,), in_write=False) for step in (100, 200))
    first, again = (run_world(3, early) for _ in range(2))
    assert first.digest == again.digest
    assert first.digest != run_world(3, late).digest


# -------------------------------------------------------------------------- what would be noticed


def test_a_cache_that_does_not_look_at_what_is_there_is_found(monkeypatch):
    monkeypatch.setattr("kvtier.depot.index_tiers", lambda *_: None)
    assert any("not all of it is in the index" in one for one in failures(seeds=5))


def test_a_store_that_loses_what_it_acknowledged_is_found(monkeypatch):
    monkeypatch.setattr(SimDisk, "_sync", lambda self: self._journal.clear())
    assert any("that it acknowledged" in one for one in failures(seeds=10))


def test_a_torn_record_that_is_served_is_found(monkeypatch):
    monkeypatch.setattr(exact, "is_exact", lambda _header, _wanted: True)
    assert any("bytes of" in one for one in failures())


def test_a_headless_tail_that_is_served_is_found():
    with removed("serve-an-orphan"):
        assert any("after a crash that left" in one for one in failures())


def test_a_budget_that_begins_at_zero_is_found(monkeypatch):
    index_tiers = opening.index_tiers

    def free(catalog, tiers, sizes):
        index_tiers(catalog, tiers, sizes)
        for number in tiers:
            catalog._shelves[number].used = 0

    monkeypatch.setattr("kvtier.depot.index_tiers", free)
    assert any("not those that are counted" in one for one in failures(seeds=5))


# ------------------------------------------------------------------------------------ the medium


def test_what_is_synced_survives_and_of_the_rest_a_beginning():
    records = [make_record(number, 32) for number in range(5)]
    lengths, torn = set(), 0
    for seed in range(100):
        disk = SimDisk("disk", None, sync_every=2)
        disk.write_many(records[:2])
        disk.write_many(records[2:3])
        disk.lose_power()
        disk.write_many(records[3:])
        left = disk.left(random.Random(seed))
        names = [header.id for header in left.scan()]
        assert names == [record.header.id for record in records[: len(names)]]
        assert set(left.torn) <= {record.header.id for record in records[3:]}
        lengths.add(len(names))
        torn += len(left.torn)
    assert lengths == {2, 3, 4, 5}
    assert 0 < torn < 100


def test_a_delete_that_is_not_synced_may_not_have_been():
    record = make_record(1, 32)
    found = set()
    for seed in range(20):
        disk = SimDisk("disk", 10_000, sync_every=1)
        assert disk.write_many([record]) == [Status.OK]
        disk.lose_power()
        assert disk.delete_many([record.header.id]) == [Status.OK]
        left = disk.left(random.Random(seed))
        found.add(len(list(left.scan())))
        assert left.write_many([record]) == [Status.OK]
        assert left._used == left.footprint(32)
    assert found == {0, 1}


def torn_disk(record) -> SimDisk:
    """Return a medium on which a crash has left one record in part, and that syncs seldom."""
    for seed in range(100):
        disk = SimDisk("disk", None, sync_every=12)
        disk.lose_power()
        disk.write_many([record])
        left = disk.left(random.Random(seed))
        if left.torn:
            return left
    raise AssertionError("no crash tore the record")


def changed(disk: SimDisk, record, what: str) -> None:
    disk.delete_many([record.header.id])
    if what == "written anew":
        disk.write_many([record])
    assert not disk.torn


@pytest.mark.parametrize("what", ["deleted", "written anew"])
def test_a_torn_record_is_there_again_when_a_crash_takes_back_what_changed_it(what):
    record = make_record(1, 32)
    found = set()
    for seed in range(40):
        disk = torn_disk(record)
        changed(disk, record, what)
        disk.lose_power()
        left = disk.left(random.Random(seed))
        into = bytearray(32)
        (read,) = left.read_many([record.header.id], [memoryview(into)])
        whole = read.status is Status.OK and into == bytes(record.data)
        assert bool(left.torn) == (read.status is Status.OK and not whole)
        found.add("torn" if left.torn else "whole" if whole else "absent")
    assert found == {"torn", "absent", "whole"} - ({"whole"} if what == "deleted" else set())


@pytest.mark.parametrize("what", ["deleted", "written anew"])
def test_a_torn_record_is_gone_for_good_once_what_changed_it_is_synced(what):
    record = make_record(1, 32)
    for seed in range(40):
        disk = torn_disk(record)
        changed(disk, record, what)
        disk.close()
        disk.lose_power()
        assert not disk.left(random.Random(seed)).torn


def test_a_process_that_is_gone_changes_nothing():
    disk = SimDisk("disk", None, sync_every=1)
    disk.lose_power()
    disk.left(random.Random(0))
    with pytest.raises(MisuseError):
        disk.write_many([make_record(1, 32)])
    with pytest.raises(MisuseError):
        disk.delete_many([make_record(1, 32).header.id])
