"""Mending: spoilt records of a shared store are deleted before they are written anew."""

from __future__ import annotations

import pytest

from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.records import make_record
from kvtier.testing.span_memory import SpanMemory
from kvtier.tiers import mending as module
from kvtier.tiers.mending import Mending
from kvtier.tiers.packer import Packer
from kvtier.tiers.store import Status

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
