"""What a Store may have that the index does not say: counted, deleted later, never forgotten."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.catalog.strays import Strays
from kvtier.tiers.store import Capabilities, Status


class StubTier:
    """A tier whose deletes end as told."""

    packs = False

    def __init__(self, *, shared: bool = False) -> None:
        self.store = self
        self.capabilities = Capabilities(shared=shared)
        self.fate: dict[bytes, Status] = {}
        self.deleted: list[list[bytes]] = []

    async def delete(self, names):
        self.deleted.append(names)
        return [self.fate.get(name, Status.OK) for name in names]


@pytest.fixture
def tier():
    return StubTier()


@pytest.fixture
def strays(tier):
    return Strays(tier)


def test_what_is_noted_counts_until_its_deletion_is_confirmed(strays, tier):
    strays.note(b"a", 10)
    strays.note(b"b", 5)
    strays.note(b"a", 10)
    assert (len(strays), strays.nbytes) == (2, 15)
    tier.fate = {b"a": Status.FAILED, b"b": Status.ABSENT}
    asyncio.run(strays.delete({}))
    assert (len(strays), strays.nbytes) == (1, 10)
    tier.fate = {}
    asyncio.run(strays.delete({}))
    assert (len(strays), strays.nbytes) == (0, 0)


def test_a_delete_that_fails_leaves_a_stray(strays, tier):
    tier.fate = {b"b": Status.FAILED}
    asyncio.run(strays.delete({b"a": 1, b"b": 2}))
    assert (len(strays), strays.nbytes) == (1, 2)


def test_strays_go_with_the_next_delete(strays, tier):
    strays.note(b"a", 1)
    asyncio.run(strays.delete({b"b": 2}))
    assert tier.deleted == [[b"a", b"b"]]
    assert len(strays) == 0


def test_what_was_written_again_is_no_stray(strays, tier):
    strays.note(b"a", 1)
    strays.forget(b"a")
    strays.forget(b"never noted")
    asyncio.run(strays.delete({}))
    assert tier.deleted == []
    assert strays.nbytes == 0


def test_a_shared_tier_has_none_and_its_victims_are_deleted_all_the_same():
    tier = StubTier(shared=True)
    strays = Strays(tier)
    strays.note(b"a", 1)
    tier.fate = {b"b": Status.FAILED}
    asyncio.run(strays.delete({b"b": 2}))
    assert tier.deleted == [[b"b"]]
    assert len(strays) == 0


def test_the_memory_that_they_take_is_bounded(strays, monkeypatch):
    monkeypatch.setattr("kvtier.catalog.strays._MOST", 3)
    for number in range(10):
        strays.note(bytes([number]), 1)
    assert (len(strays), strays.nbytes) == (3, 3)


# -------------------------------------------------------------------------------- what is withdrawn


def test_what_is_withdrawn_is_taken_over_and_deleted(tier):
    waiting = [{b"a": 4}, {b"b": 5}]
    strays = Strays(tier, lambda: waiting.pop(0) if waiting else {})
    assert (b"a" in strays, strays.nbytes) == (True, 9)
    asyncio.run(strays.delete({}))
    assert tier.deleted == [[b"a", b"b"]]
    assert len(strays) == 0


def test_a_shared_tier_has_those_that_were_withdrawn_until_it_confirms():
    tier = StubTier(shared=True)
    waiting = [{b"a": 0}]
    strays = Strays(tier, lambda: waiting.pop() if waiting else {})
    tier.fate = {b"a": Status.FAILED}
    asyncio.run(strays.delete({}))
    strays.note(b"a", 5)  # a write of it has failed, too
    assert (b"a" in strays, strays.nbytes) == (True, 0)
    tier.fate = {}
    asyncio.run(strays.delete({}))
    assert b"a" not in strays


def test_none_that_was_withdrawn_is_given_up_for_others(tier, monkeypatch):
    monkeypatch.setattr("kvtier.catalog.strays._MOST", 2)
    waiting = [{b"a": 1, b"b": 1, b"c": 1}]
    strays = Strays(tier, lambda: waiting.pop() if waiting else {})
    assert len(strays) == 3
    for name in (b"x", b"y", b"z"):
        strays.note(name, 1)
    assert [name in strays for name in (b"a", b"b", b"c", b"x", b"y", b"z")] == [
        *[True] * 3,
        *(False, True, True),
    ]


def test_of_those_that_only_the_store_may_know_the_oldest_are_given_up(tier, monkeypatch):
    monkeypatch.setattr("kvtier.catalog.strays._MOST_UNKNOWN", 2)
    lot, given_up = {}, []
    strays = Strays(tier, lambda: lot, given_up.append)

    def left(**withdrawn):
        nonlocal lot
        lot = {name.encode(): charged for name, charged in withdrawn.items()}
        strays.collect()
        lot = {}
        return b"".join(strays._charged).decode()

    assert left(a=0, b=0) == "ab"
    assert given_up == []
    assert left(x=1, a=0) == "bxa"
    assert given_up == []
    assert left(c=0, d=0) == "xcd"
    assert given_up == [2]
    strays.charge(b"c", 5)
    assert left(e=0) == "xcde"
    strays.forget(b"d")
    assert left(f=0) == "xcef"
    assert strays.nbytes == 6
    assert given_up == [2]


def test_many_are_deleted_in_batches_and_no_more_is_tried_after_one_that_failed(tier, monkeypatch):
    monkeypatch.setattr("kvtier.catalog.strays._BATCH", 2)
    waiting = [dict.fromkeys((b"a", b"b", b"c", b"d", b"e"), 1)]
    strays = Strays(tier, lambda: waiting.pop() if waiting else {})
    tier.fate = {b"c": Status.FAILED, b"d": Status.FAILED}
    asyncio.run(strays.delete({}))
    assert tier.deleted == [[b"a", b"b"], [b"c", b"d"]]
    assert strays.nbytes == 3


def test_a_stray_that_is_withdrawn_then_counts_once(tier):
    waiting = [{}, {b"a": 20}]
    strays = Strays(tier, lambda: waiting.pop(0) if waiting else {})
    strays.note(b"a", 10)
    assert strays.nbytes == 10
    assert strays.nbytes == 20
    asyncio.run(strays.delete({b"a": 20, b"b": 1}))
    assert tier.deleted == [[b"a", b"b"]]
    assert strays.nbytes == 0


@pytest.mark.parametrize(("records", "turns"), [(3, 1), (7, 3)])
def test_many_are_noted_in_slices_between_which_others_run(strays, monkeypatch, records, turns):
    monkeypatch.setattr("kvtier.catalog.strays._SLICE", 2)

    async def scene():
        work = asyncio.ensure_future(strays.delete({bytes([n]): 1 for n in range(records)}))
        turn = -1  # its first
        while not work.done():
            await asyncio.sleep(0)
            turn += 1
        return turn

    assert asyncio.run(scene()) == turns
