"""Packs: small parts as one record, found by name alone, read by ranges, never rewritten."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Sequence

import pytest
from msgspec import structs

from kvtier.identity.record import HEADER_BYTES, PartName, checksum, record_id
from kvtier.testing.records import make_record
from kvtier.testing.span_memory import SpanMemory
from kvtier.tiers import places
from kvtier.tiers.pack import (
    CODEC_PACK,
    LONGEST,
    Run,
    cut,
    longest_order,
    member_at,
    order_of,
    pack,
    pack_id,
    runs_over,
    unpacked_id,
)
from kvtier.tiers.packer import Packer
from kvtier.tiers.places import Places
from kvtier.tiers.store import Status, Write

SIZE = 1000
OK, ABSENT, CORRUPT, FAILED = Status.OK, Status.ABSENT, Status.CORRUPT, Status.FAILED


def chain(first: int, stop: int, size: int = SIZE, part: PartName | None = None) -> list[Write]:
    """Return records of consecutive chunks of one prompt."""
    part = part or PartName()
    records: list[Write] = []
    for depth in range(first, stop):
        each = make_record(depth, size, part=part)
        above = record_id(make_record(depth - 1, 0).header.key, part) if depth else None
        records.append(Write(structs.replace(each.header, parent=above), each.data))
    return records


def names(records: Sequence[Write]) -> list[bytes]:
    return [record.header.id for record in records]


def read(packer: Packer, records: Sequence[Write]) -> list[Status]:
    """Read records; each that is OK is exact."""
    buffers = [memoryview(bytearray(len(record.data) + 24)) for record in records]
    out = packer.read_many(names(records), buffers)
    for one, buffer, (header, data) in zip(out, buffers, records, strict=True):
        if one.status is OK:
            assert one.header == header
            assert buffer[: len(data)] == data
            assert bytes(buffer[len(data) :]) == bytes(24), "written past its end"
    return [one.status for one in out]


@pytest.fixture
def store():
    return SpanMemory()


@pytest.fixture
def packer(store):
    return Packer(store)


# ------------------------------------------------------------------------------------ arithmetic


def test_runs_begin_at_a_multiple_of_their_length_and_cover_all():
    rng = random.Random(1)
    for _ in range(500):
        start, most = rng.randrange(300), rng.randrange(LONGEST + 1)
        stop = start + rng.randrange(300)
        runs = list(cut(start, stop, most))
        assert [at for run in runs for at in range(run.start, run.stop)] == [*range(start, stop)]
        assert all(run.start % (1 << run.order) == 0 and run.order <= most for run in runs)


def test_the_runs_over_a_chunk_are_all_in_which_it_may_lie():
    assert runs_over(5, 8, 3) == [Run(0, 3), Run(4, 2), Run(4, 1), Run(5, 0)]
    assert runs_over(5, 7, 3) == [Run(4, 1), Run(5, 0)]


def test_a_cell_is_sixteen_mib_and_large_parts_lie_alone():
    mib = 1 << 20
    sizes = {0: 0, 8 * mib: 0, 8 * mib - 1: 1, 4 * mib: 2, mib: 4, mib // 8: 7, 100: 7}
    assert {size: longest_order(size) for size in sizes} == sizes


def test_a_name_says_its_part_and_its_run():
    name = record_id(bytes(range(32)), PartName(4095, 3, 8, 1, 2))
    found = {pack_id(name, order) for order in range(LONGEST + 1)}
    assert len(found) == LONGEST + 1
    assert pack_id(name, 0) == name
    for order in range(LONGEST + 1):
        assert (order_of(pack_id(name, order)), unpacked_id(pack_id(name, order))) == (order, name)


def test_a_pack_says_what_it_is_and_has_its_parts_keys_first():
    records = chain(8, 12)
    header, data = pack(records, 2)
    assert header.id == pack_id(records[-1].header.id, 2)
    assert (header.codec, header.depth) == (CODEC_PACK, 8)
    assert header.parent == records[0].header.parent
    assert checksum(data) == header.stored_sum == header.raw_sum
    assert bytes(data[:128]) == b"".join(record.header.key for record in records)
    for index, record in enumerate(records):
        at = member_at(index, 2, SIZE)
        assert bytes(data[at : at + HEADER_BYTES]) == record.header.pack()
        assert data[at + HEADER_BYTES : at + HEADER_BYTES + SIZE] == record.data


def test_the_format_is_version_one():
    """Who changes it has to give packs other names: hosts of both versions share buckets."""
    header, data = pack(chain(4, 8, 40), 2)
    found = hashlib.sha256(header.pack() + data).hexdigest()
    assert found == "287629eaf3cff5f34469392eee567117fc8f1c525a2b14f54428c3b8c806d5c8"


# ----------------------------------------------------------------------------------- write, read


def test_a_chain_is_written_as_the_fewest_runs_and_read_back(packer, store):
    records = chain(3, 17)
    assert packer.write_many(records) == [OK] * 14
    assert [order_of(header.id) for header in store.scan()] == [0, 2, 3, 0]
    assert read(packer, records) == [OK] * 14


def test_neighbours_in_a_pack_are_read_by_one_span(packer, store):
    records = chain(0, 16)
    packer.write_many(records)
    assert read(packer, records[3:9]) == [OK] * 6
    (span,) = store.spans
    assert span.start == member_at(3, 4, SIZE)
    read(packer, [records[2], records[4], records[5]])
    assert len(store.spans) == 3


def test_a_long_span_is_read_in_several(packer, store, monkeypatch):
    monkeypatch.setattr(places, "_SPAN_BYTES", 4 * SIZE)
    records = chain(0, 16)
    packer.write_many(records)
    assert read(packer, records) == [OK] * 16
    assert len(store.spans) == 4


def test_parts_of_ranks_are_packed_apart_and_keep_their_places(packer, store):
    ranks = [chain(0, 8, part=PartName(0, shard, 2)) for shard in range(2)]
    mixed = [record for both in zip(*ranks, strict=True) for record in both]
    assert packer.write_many(mixed) == [OK] * 16
    assert len(list(store.scan())) == 2
    assert read(packer, mixed) == [OK] * 16


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"parent": None}, id="no child of the one before"),
        pytest.param({"namespace": bytes(32)}, id="another namespace"),
        pytest.param({"stored_bytes": SIZE - 1}, id="another length"),
        pytest.param({"depth": 9}, id="another depth"),
    ],
)
def test_what_is_no_chain_is_not_packed(packer, store, other):
    one, two = chain(0, 2)
    packer.write_many([one, Write(structs.replace(two.header, **other), two.data)])
    assert [order_of(header.id) for header in store.scan()] == [0, 0]


def test_another_host_learns_of_a_pack_and_reads_it(packer, store):
    records = chain(0, 8)
    packer.write_many(records)
    other = Packer(store)
    assert read(other, records) == [ABSENT] * 8, "it does not know where they lie"
    other.learn(names(records), SIZE)
    assert read(other, records) == [OK] * 8


def test_a_pack_that_is_gone_or_too_short_is_asked_for_once(packer, store):
    records = chain(0, 4)
    packer.write_many(records)
    (header,) = store.scan()
    data = store._records[header.id][1]
    store._records[header.id] = header, data[:-1]
    assert read(packer, records) == [CORRUPT] * 4
    spans = len(store.spans)
    assert read(packer, records) == [ABSENT] * 4
    assert len(store.spans) == spans


@pytest.fixture
def twice(packer, store):
    """Return records of which the first two lie in two packs."""
    records = chain(0, 4)
    packer.write_many(records[:2])
    packer.write_many(records)
    assert [order_of(header.id) for header in store.scan()] == [1, 2]
    return records


def test_what_lies_in_two_packs_is_deleted_from_both(packer, store, twice):
    packer.delete_many(names(twice[:1]))
    assert list(store.scan()) == []


def test_twin_known_in_one_alone_it_would_stay_in_the_other(packer, store, twice, monkeypatch):
    where = Places._holding
    monkeypatch.setattr(Places, "_holding", lambda self, member: where(self, member)[:1])
    packer.delete_many(names(twice[:1]))
    assert [order_of(header.id) for header in store.scan()] == [1]


def test_what_lies_in_two_packs_is_let_go_from_both(packer, store, twice):
    packer.evict_many(names(twice[:3]))
    assert [order_of(header.id) for header in store.scan()] == [2]
    assert packer.places.residue == 3
    packer.evict_many(names(twice[3:]))
    assert list(store.scan()) == []
    assert (packer.places.residue, packer.places._places, packer.places._others) == (0, {}, {})


def test_what_lies_in_two_packs_is_found_in_the_other_when_one_is_gone(packer, store, twice):
    store.delete_many([pack_id(twice[3].header.id, 2)])
    assert read(packer, twice) == [ABSENT] * 4
    assert read(packer, twice) == [OK] * 2 + [ABSENT] * 2


def test_a_flipped_header_spoils_one_part(packer, store):
    records = chain(0, 4)
    packer.write_many(records)
    (header,) = store.scan()
    rotten = bytearray(store._records[header.id][1])
    rotten[member_at(1, 2, SIZE) + 60] ^= 1
    store._records[header.id] = header, memoryview(rotten)
    assert read(packer, records) == [OK, CORRUPT, OK, OK]


def test_what_is_no_pack_of_these_parts_is_not_taken_for_a_spoilt_one(packer, store):
    """It may be of a version that nobody here knows, and stays."""
    records = chain(0, 4)
    packer.write_many(records)
    (header,) = store.scan()
    store._records[header.id] = header, store._records[header.id][1][::-1]
    assert read(packer, records) == [CORRUPT] * 4
    packer.write_many(records[1:2])
    assert not store.deleted
    assert read(packer, records) == [ABSENT, OK, ABSENT, ABSENT]


def test_a_pack_that_is_not_written_fails_each_of_its_parts(packer, store):
    store.write_many = lambda writes: [Status.FULL] * len(writes)
    assert packer.write_many(chain(0, 4)) == [Status.FULL] * 4
    assert read(packer, chain(0, 4)) == [ABSENT] * 4


def test_a_buffer_that_is_too_short_fails(packer):
    records = chain(0, 2)
    packer.write_many(records)
    buffers = [memoryview(bytearray(SIZE - 1)), memoryview(bytearray(SIZE))]
    reads = packer.read_many(names(records), buffers)
    assert [one.status for one in reads] == [FAILED, OK]


# ---------------------------------------------------------------------------------------- delete


def test_a_deleted_part_takes_its_pack_along(packer, store):
    records = chain(0, 5)
    packer.write_many(records)
    assert packer.delete_many(names(records[1:2])) == [OK]
    assert [header.id for header in store.scan()] == names(records[4:])
    assert packer.delete_many(names(records)) == [ABSENT] * 4 + [OK]


def test_a_deleted_part_takes_a_pack_along_that_another_host_wrote(packer, store):
    records = chain(0, 4)
    Packer(store).write_many(records)
    assert packer.delete_many(names(records[3:])) == [OK]
    assert list(store.scan()) == []


def test_what_was_deleted_is_not_taken_from_a_pack_with_another_tail(packer, store):
    records = chain(0, 4)
    Packer(store).write_many(records)
    assert packer.delete_many(names(records[:2])) == [ABSENT, ABSENT]
    assert not packer.learn(names(records), SIZE)
    assert read(packer, records) == [ABSENT] * 4
    packer.write_many(records[:2])
    assert packer.learn(names(records), SIZE)
    assert read(packer, records) == [OK] * 4


def test_what_was_deleted_is_remembered_within_a_bound(packer, store, monkeypatch):
    """Without the bound a long life would remember all that was ever deleted."""
    records = chain(0, 4)
    Packer(store).write_many(records)
    monkeypatch.setattr(places, "_DELETED", 2)
    packer.delete_many(names(records[:3]))
    assert not packer.learn(names(records[2:]), SIZE)
    assert packer.learn(names(records[:1]), SIZE)


def test_a_pack_stays_until_nobody_here_needs_any_part_of_it(packer, store):
    records = chain(0, 4)
    packer.write_many(records)
    assert packer.evict_many(names(records[1:])) == [OK] * 3
    assert (store.deleted, packer.places.residue) == ([], 3)
    assert read(packer, records[:1]) == [OK]
    assert packer.evict_many(names(records[:1])) == [OK]
    assert list(store.scan()) == []
    assert packer.places.residue == 0


@pytest.fixture
def stuck(packer, store):
    """Return a packer that let a pack go which was not deleted, and parts of two other packs."""
    for records in (chain(0, 4), chain(4, 8), chain(8, 12)):
        packer.write_many(records)
    deleting, store.delete_many = store.delete_many, lambda ids: [FAILED] * len(ids)
    assert packer.evict_many(names(chain(0, 4))) == [FAILED] * 4
    store.delete_many = deleting
    assert packer.places.residue == 4
    return chain(4, 8), chain(8, 12)


def test_a_pack_that_was_not_deleted_is_tried_again_with_the_next_eviction(packer, store, stuck):
    one, other = stuck
    assert packer.evict_many(names(one)) == [OK] * 4, "what became of the other pack is no part's"
    assert [header.id for header in store.scan()] == [pack_id(other[-1].header.id, 2)]
    assert packer.places.residue == 0
    store.deleted.clear()
    packer.evict_many(names(other[:1]))
    assert store.deleted == [], "it is not tried for ever"


def test_a_pack_that_was_not_deleted_and_is_written_again_stays(packer, store, stuck):
    packer.write_many(chain(0, 4))
    packer.evict_many(names(stuck[0]))
    assert read(packer, chain(0, 4)) == [OK] * 4


def test_twin_untried_it_would_stay(packer, store, stuck, monkeypatch):
    monkeypatch.setattr(places.Places, "overdue", lambda self: [])
    packer.evict_many(names(stuck[0]))
    assert len(list(store.scan())) == 2


def test_where_parts_lie_is_remembered_within_a_bound(packer, monkeypatch):
    monkeypatch.setattr(places, "_REMEMBERED", 8)
    old, used = chain(0, 4), chain(4, 8)
    packer.write_many(used)
    packer.write_many(old)
    read(packer, used)
    packer.write_many(chain(8, 12))
    assert read(packer, old) == [ABSENT] * 4
    assert read(packer, used) == [OK] * 4
    assert len(packer.places._places) == 8


def test_packs_of_one_run_are_the_same_bytes(packer, store):
    records = chain(0, 8)
    packer.write_many(records)
    (header,) = store.scan()
    before = bytes(store._records[header.id][1])
    Packer(store).write_many(records)
    assert [bytes(data) for _, data in store._records.values()] == [before]


def test_many_threads_write_and_read_one_chain(packer):
    records = chain(0, 64, 100)
    wrong: list[object] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(30):
            start = rng.randrange(64)
            some = records[start : start + rng.randrange(1, 64 - start + 1)]
            packer.write_many(some)
            wrong.extend(status for status in read(packer, some) if status is not OK)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
