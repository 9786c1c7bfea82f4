"""Places: what is known of packs takes bounded memory, and is forgotten in no time."""

from __future__ import annotations

import itertools

import pytest
from msgspec import structs

from kvtier.identity.record import RecordId
from kvtier.testing.records import make_record
from kvtier.testing.span_memory import SpanMemory
from kvtier.tiers import places
from kvtier.tiers.pack import pack_id
from kvtier.tiers.packer import Packer
from kvtier.tiers.places import Places
from kvtier.tiers.store import Status, Write

SIZE = 1000
OK, FAILED = Status.OK, Status.FAILED
SHARED = [make_record(depth, 0).header.id for depth in range(7)]


@pytest.fixture
def known():
    return Places()


def with_tails(count: int) -> list[list[RecordId]]:
    """Return the parts of packs that have all but their last in common."""
    return [[*SHARED, make_record(tail, 0).header.id] for tail in range(100, 100 + count)]


def test_packs_that_share_their_parts_are_remembered_within_the_same_bound(known, monkeypatch):
    monkeypatch.setattr(places, "_REMEMBERED", 64)
    for members in with_tails(20):
        known.learned(pack_id(members[-1], 3), members, SIZE)
    assert len(known._packs) == 64 // 8
    assert sum(map(len, known._others.values())) == 7 * (64 // 8 - 1)
    for members in with_tails(20):
        known.forget(pack_id(members[-1], 3))
    assert (known._places, known._others, known._remembered) == ({}, {}, 0)


class Compared(bytes):
    """A name that counts how often it is compared."""

    count = 0
    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return bytes.__eq__(self, other)


def test_a_pack_is_forgotten_without_a_look_at_all_that_share_its_parts(known):
    packs = with_tails(200)
    ids = [Compared(pack_id(members[-1], 3)) for members in packs]
    for name, members in zip(ids, packs, strict=True):
        known.learned(name, members, SIZE)
    Compared.count = 0
    known.forget(ids[100])
    assert Compared.count <= 4 * 8
    for name in ids:
        known.forget(name)
    assert Compared.count <= 4 * 8 * 200
    assert (known._places, known._others) == ({}, {})


def test_where_a_part_lies_in_another_pack_is_known_when_the_last_is_forgotten(known):
    four, two = SHARED[:4], SHARED[2:4]
    for members, order in ((four, 2), (two, 1)):
        known.learned(pack_id(members[-1], order), members, SIZE)
    known.forget(pack_id(two[-1], 1))
    assert [known._places[name].before for name in four] == [0, 1, 2, 3]


# -------------------------------------------------------------------------- what is not deleted


@pytest.fixture
def failing(monkeypatch):
    """Return a store whose first delete fails, and a packer that wrote a pack of four there."""
    store = SpanMemory()
    packer = Packer(store)
    records: list[Write] = []
    for header, data in (make_record(depth, 100) for depth in range(4)):
        above = records[-1].header.id if records else None
        records.append(Write(structs.replace(header, parent=above), data))
    packer.write_many(records)
    delete, fails = store.delete_many, [True]
    monkeypatch.setattr(
        store,
        "delete_many",
        lambda ids: [FAILED] * len(ids) if fails and fails.pop() else delete(ids),
    )
    return store, packer


def test_a_pack_that_is_not_deleted_is_the_fate_of_the_parts_let_go_with_it(failing):
    store, packer = failing
    assert packer.evict_many(SHARED[:2]) == [OK, OK]
    assert packer.evict_many(SHARED[2:4]) == [FAILED, FAILED]
    assert packer.places.residue == 4, "it is there, and counted"
    assert packer.evict_many(SHARED[3:4]) == [OK]
    assert (packer.places.residue, list(store.scan())) == (0, [])


def test_twin_forgotten_before_it_is_deleted_a_pack_would_stay_uncounted(failing, monkeypatch):
    let_go = Places.let_go

    def at_once(self, ids):
        doomed = let_go(self, ids)
        self.ended(itertools.chain.from_iterable(doomed))
        return doomed

    monkeypatch.setattr(Places, "let_go", at_once)
    store, packer = failing
    packer.evict_many(SHARED[:4])
    packer.evict_many(SHARED[:4])
    assert (packer.places.residue, len(list(store.scan()))) == (0, 1)


def test_a_pack_that_is_written_again_while_it_is_deleted_stays_known(known):
    name = pack_id(SHARED[3], 2)
    known.learned(name, SHARED[:4], SIZE)
    assert known.let_go(SHARED[:4]) == [[name]] * 4
    known.learned(name, SHARED[:4], SIZE)
    known.ended([name])
    assert known.packs(SHARED[:1]) == {0: name}


def test_a_removed_part_is_removed_from_a_known_pack_when_that_is_tried_again(failing):
    store, packer = failing
    assert packer.delete_many(SHARED[:1]) == [FAILED]
    assert packer.delete_many(SHARED[:1]) == [OK]
    assert list(store.scan()) == []


def test_twin_forgotten_before_it_is_deleted_a_pack_would_keep_it(failing, monkeypatch):
    deleted = Places.deleted

    def at_once(self, ids):
        packs = deleted(self, ids)
        for pack in itertools.chain.from_iterable(packs):
            self.forget(pack)
        return packs

    monkeypatch.setattr(Places, "deleted", at_once)
    store, packer = failing
    packer.delete_many(SHARED[:1])
    assert packer.delete_many(SHARED[:1]) == [Status.ABSENT]
    assert len(list(store.scan())) == 1
