"""Places: what is known of packs takes bounded memory, and is forgotten in no time."""

from __future__ import annotations

import pytest

from kvtier.identity.record import RecordId
from kvtier.testing.records import make_record
from kvtier.tiers import places
from kvtier.tiers.pack import pack_id
from kvtier.tiers.places import Places

SIZE = 1000
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
    known.deleted(packs[0][:1])
    assert Compared.count <= 4 * 8 * 200
    assert (known._places, known._others) == ({}, {})


def test_where_a_part_lies_in_another_pack_is_known_when_the_last_is_forgotten(known):
    four, two = SHARED[:4], SHARED[2:4]
    for members, order in ((four, 2), (two, 1)):
        known.learned(pack_id(members[-1], order), members, SIZE)
    known.forget(pack_id(two[-1], 1))
    assert [known._places[name].before for name in four] == [0, 1, 2, 3]
