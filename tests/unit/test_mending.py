"""Mending: spoilt records of a shared store are deleted before they are written anew."""

from __future__ import annotations

import pytest
from msgspec import structs

from kvtier.identity.record import HEADER_BYTES
from kvtier.metrics import Metrics
from kvtier.seams import ThreadFlow
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.records import make_record
from kvtier.testing.span_memory import SpanMemory
from kvtier.tiers import mending as module
from kvtier.tiers.mending import Mending
from kvtier.tiers.pack import member_at, pack_id
from kvtier.tiers.packer import Packer
from kvtier.tiers.store import Span, Status, Write
from kvtier.tiers.tier import Tier, Wanted

OK, FAILED = Status.OK, Status.FAILED
RECORDS = [make_record(number, 100) for number in range(4)]
NAMES = [record.header.id for record in RECORDS]


@pytest.fixture
def store():
    one = SpanMemory()
    one.write_many(RECORDS)
    return one


def test_what_is_spoilt_is_deleted_once(store):
    mending = Mending(store)
    mending.note(NAMES[0], NAMES[0])
    mending.note(NAMES[1], NAMES[0])
    assert mending.spoilt(NAMES) == {NAMES[0]: NAMES[:2]}
    assert mending.clear(NAMES[2:]) == []
    assert mending.clear(NAMES) == NAMES[:1]
    assert mending.clear(NAMES) == []
    assert store.deleted == NAMES[:1]


def test_as_long_as_it_is_not_deleted_nothing_is_written_in_its_place(store, monkeypatch):
    """A store that has it would keep it, and say that it was written."""
    mending = Mending(store)
    packer = Packer(store, mending)
    mending.note(NAMES[0], NAMES[0])
    with monkeypatch.context() as at_first:
        at_first.setattr(store, "delete_many", lambda ids: [FAILED] * len(ids))
        assert packer.write_many(RECORDS[:1]) == [FAILED]
    assert packer.write_many(RECORDS[:1]) == [OK]
    assert store.deleted == NAMES[:1]


def test_a_tier_of_this_host_alone_has_strays_for_that():
    mending = Mending(MemoryStore())
    mending.note(NAMES[0], NAMES[0])
    assert mending.spoilt(NAMES) == {}


def test_a_bucket_that_is_rotten_all_over_takes_no_memory(store, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 2)
    mending = Mending(store)
    for name in NAMES:
        mending.note(name, name)
    assert list(mending.spoilt(NAMES)) == NAMES[2:]


def test_of_two_proofs_the_newer_counts(store):
    """It is of the record from which the part is read now."""
    mending = Mending(store)
    mending.note(NAMES[0], NAMES[1])
    mending.note(NAMES[0], NAMES[2])
    assert mending.spoilt(NAMES) == {NAMES[2]: NAMES[:1]}


@pytest.fixture
def learns_meanwhile():
    """Return what reads the first part of a spoilt pack, while a sound one of it is learnt."""
    store, flow = SpanMemory(), ThreadFlow()
    tier = Tier("mem", store, flow, Metrics(), lambda: 0.0)
    records: list[Write] = []
    for header, data in (make_record(depth, 100) for depth in range(4)):
        above = records[-1].header.id if records else None
        records.append(Write(structs.replace(header, parent=above), data))
    names = [record.header.id for record in records]
    spoilt, sound = pack_id(names[1], 1), pack_id(names[3], 2)
    writer = Packer(store)
    writer.write_many(records)
    writer.write_many(records[:2])
    body = bytearray(store._records[spoilt][1])
    body[member_at(0, 1, 100) + HEADER_BYTES] ^= 1
    store._records[spoilt] = store._records[spoilt][0], memoryview(body)
    tier.learn(names[:2], 100)
    span = store._span

    def learning(one: Span) -> Status:
        status = span(one)
        if one.start:  # it is of the part, and no look into the pack before
            tier.learn(names, 100)
        return status

    store._span = learning

    def after() -> list[str]:
        """Read it, write it anew, and say which packs were deleted for that."""
        wanted = Wanted(names[0], records[0].header.namespace, 100, memoryview(bytearray(100)))
        (found,) = flow.spawn(tier.read([wanted])).result(30)
        assert found.status is Status.CORRUPT
        assert flow.spawn(tier.write(records[:1])).result(30) == [OK]
        return [["spoilt", "sound"][one == sound] for one in store.deleted]

    yield after
    tier.close()
    flow.close()


def test_a_pack_that_was_learnt_while_another_was_read_is_not_taken_for_the_spoilt_one(
    learns_meanwhile,
):
    assert learns_meanwhile() == ["spoilt"]


def test_twin_if_it_were_asked_after_the_read_where_a_part_lies_the_sound_pack_would_go(
    learns_meanwhile, monkeypatch
):
    fetch = Packer.fetch

    def later(self, ids, into):
        reads, _ = fetch(self, ids, into)
        return reads, [self.places.packs(ids).get(at) for at in range(len(ids))]

    monkeypatch.setattr(Packer, "fetch", later)
    assert learns_meanwhile() == ["sound"]
