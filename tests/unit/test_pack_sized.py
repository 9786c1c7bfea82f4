"""Packs whose parts a codec made smaller: written, found and read by hosts with and without it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import pytest
from msgspec import structs

from kvtier.codecs.known import LOSSLESS
from kvtier.identity.record import CODEC_LOSSLESS, CODEC_RAW, HEADER_BYTES, record_id
from kvtier.metrics import Metrics
from kvtier.testing.records import NAMESPACE, make_record
from kvtier.testing.span_memory import SpanMemory
from kvtier.tiers import packer as module
from kvtier.tiers import places
from kvtier.tiers.coding import Coding
from kvtier.tiers.exact import Wanted, verify
from kvtier.tiers.pack import (
    CODEC_PACK,
    CODEC_SIZED_PACK,
    head_bytes,
    lengths_in,
    pack_id,
    pack_sized,
    repack,
    sized_at,
)
from kvtier.tiers.packer import Packer
from kvtier.tiers.store import Span, Status, Write

SIZE = 20_000
TABLE = HEADER_BYTES + head_bytes(3)  # what is read of a pack of eight to know where its parts lie
OK, ABSENT, CORRUPT, FAILED = Status.OK, Status.ABSENT, Status.CORRUPT, Status.FAILED


def chain(stop: int, noise: Sequence[int] = ()) -> list[Write]:
    """Return records of consecutive chunks of one prompt; of noise those of some depths."""
    records = []
    for depth in range(stop):
        header, data = make_record(depth, SIZE, like_kv=depth not in noise)
        above = record_id(make_record(depth - 1, 0).header.key, header.part) if depth else None
        records.append(Write(structs.replace(header, parent=above), data))
    return records


def packer_on(store: SpanMemory, *, encodes: bool) -> Packer:
    packer = Packer(store)
    if encodes:
        packer.coding = Coding("mem", LOSSLESS, lambda: 0.0, Metrics(), always=True)
        packer.coding.admit(NAMESPACE)
    return packer


def finds(packer: Packer, records: Sequence[Write]) -> Packer:
    """Let a host learn that there is the pack of records, as of a look-up."""
    packer.learn([record.header.id for record in records], SIZE)
    return packer


def read(packer: Packer, records: Sequence[Write], room: int = SIZE) -> list[Status]:
    """Read and verify records; each that is OK is exact."""
    names = [record.header.id for record in records]
    buffers = [memoryview(bytearray(room + 24)) for _ in records]
    reads = packer.read_many(names, [buffer[:room] for buffer in buffers])
    out = []
    for one, name, buffer, (header, data) in zip(reads, names, buffers, records, strict=True):
        found = verify(one, Wanted(name, header.namespace, SIZE, buffer[:room]))
        assert found.status is not OK or buffer[:SIZE] == data
        assert bytes(buffer[room:]) == bytes(24), "written past its end"
        out.append(found.status)
    return out


@pytest.fixture
def store():
    return SpanMemory()


@pytest.mark.parametrize("noise", [(), (0,), (3, 4, 7)])
def test_a_pack_has_a_length_for_each_part_and_is_read_back(store, noise):
    records = chain(8, noise)
    packer = packer_on(store, encodes=True)
    written = packer.send(records)
    assert [one.status for one in written] == [OK] * 8
    codecs = [CODEC_RAW if at in noise else CODEC_LOSSLESS for at in range(8)]
    assert [one.header.codec for one in written] == codecs
    (header,) = store.scan()
    assert header.codec == CODEC_SIZED_PACK
    assert header.id == pack_id(records[-1].header.id, 3)
    assert header.stored_bytes < SIZE * (8 * 0.75 + len(noise) * 0.25) + 8 * 300
    assert read(packer, records) == [OK] * 8
    assert len(store.spans) == 1, "where it lies was known"
    assert read(packer, records[2:5]) == [OK] * 3


@pytest.mark.parametrize("encodes", [False, True])
@pytest.mark.parametrize(
    ("wrote_encoded", "asked"), [(False, ["parts"]), (True, ["in vain", "table", "parts"])]
)
def test_a_host_reads_what_another_wrote_whether_either_encodes(
    store, monkeypatch, encodes, wrote_encoded, asked
):
    """Who knows nothing takes a pack for a raw one: most are, and these cost no request more."""
    records = chain(8)
    packer_on(store, encodes=wrote_encoded).write_many(records)
    other = finds(packer_on(store, encodes=encodes), records)
    sizes = handed_out(store, monkeypatch)
    assert read(other, records) == [OK] * 8
    assert [{0: "in vain", TABLE: "table"}.get(size, "parts") for size in sizes] == asked
    sizes.clear()
    assert read(other, records) == [OK] * 8
    assert len(sizes) == 1, "where the parts are is known"


@pytest.mark.parametrize("wrote", [False, True], ids=["met", "wrote"])
def test_who_met_or_wrote_an_encoded_pack_asks_in_vain_no_more(store, monkeypatch, wrote):
    """What assuming raw packs costs is a request for each pack that is read until then."""
    before, records = chain(8), chain(24)[8:]
    here = packer_on(store, encodes=wrote)
    packer_on(store, encodes=True).write_many(records)
    if wrote:
        here.write_many(before)
    else:
        packer_on(store, encodes=True).write_many(before)
        assert read(finds(here, before), before) == [OK] * 8
    finds(here, records[:8])
    finds(here, records[8:])
    sizes = handed_out(store, monkeypatch)
    assert read(here, records) == [OK] * 16
    assert len(sizes) == 4, "where the parts are, and the parts, of two packs"
    assert 0 not in sizes


def test_twin_who_looked_at_none_would_ask_in_vain_for_each(store, monkeypatch):
    monkeypatch.setattr(places.Places, "unseen", lambda self, packs: [])
    before, records = chain(8), chain(16)[8:]
    for some in (before, records):
        packer_on(store, encodes=True).write_many(some)
    here = finds(packer_on(store, encodes=False), before)
    assert read(here, before) == [OK] * 8
    sizes = handed_out(store, monkeypatch)
    assert read(finds(here, records), records) == [OK] * 8
    assert 0 in sizes


def used_to_raw(store: SpanMemory) -> Packer:
    """Return a host that has met packs of version 1 alone."""
    packer = packer_on(store, encodes=False)
    before = chain(4)
    packer_on(store, encodes=False).write_many(before)
    assert read(finds(packer, before), before) == [OK] * 4
    store.spans.clear()
    return packer


def test_who_met_no_other_takes_a_pack_for_one_without_a_codec(store):
    here, records = used_to_raw(store), chain(16)[8:]
    packer_on(store, encodes=False).write_many(records)
    assert read(finds(here, records), records) == [OK] * 8
    assert len(store.spans) == 1


def handed_out(store: SpanMemory, monkeypatch) -> list[int]:
    """Return the bytes of each span that the store will have filled."""
    sizes: list[int] = []
    span_of = store._span

    def counted(span):
        status = span_of(span)
        sizes.append(sum(map(len, span.into)) if status is OK else 0)
        return status

    monkeypatch.setattr(store, "_span", counted)
    return sizes


def test_who_meets_another_form_reads_nothing_in_vain_and_then_looks_first(store, monkeypatch):
    here, records = used_to_raw(store), chain(24)[8:]
    packer_on(store, encodes=True).write_many(records)
    assert {one.codec for one in store.scan()} == {CODEC_PACK, CODEC_SIZED_PACK}
    finds(here, records[:8])
    finds(here, records[8:])
    sizes = handed_out(store, monkeypatch)
    assert read(here, records[:4]) == [OK] * 4
    in_vain, head, parts = sizes
    assert (in_vain, head) == (0, TABLE)
    assert parts < 4 * (SIZE + HEADER_BYTES)
    sizes.clear()
    assert read(here, records[8:]) == [OK] * 8
    assert len(sizes) == 2, "where the parts are, and the parts"
    assert 0 not in sizes


def test_twin_without_the_length_that_is_meant_all_would_be_read_in_vain(store, monkeypatch):
    monkeypatch.setattr(module, "Span", lambda *span: Span(*span[:3]))
    here, records = used_to_raw(store), chain(16)[8:]
    packer_on(store, encodes=True).write_many(records)
    sizes = handed_out(store, monkeypatch)
    read(finds(here, records), records[:4])
    assert sizes[0] == 4 * (SIZE + HEADER_BYTES)


def test_without_a_look_what_another_encoded_would_be_a_miss(store, monkeypatch):
    """The twin."""
    monkeypatch.setattr(Packer, "_look", lambda self, packs: {})
    records = chain(8)
    packer_on(store, encodes=True).write_many(records)
    assert OK not in read(finds(packer_on(store, encodes=False), records), records)


def test_who_sees_that_another_thread_looked_meanwhile_looks_there_too(store, monkeypatch):
    here, records = used_to_raw(store), chain(16)[8:]
    packer_on(store, encodes=True).write_many(records)
    finds(here, records)
    looked = Packer._look

    def twice(self, packs):
        looked(self, packs)  # the other's
        return looked(self, packs)

    monkeypatch.setattr(Packer, "_look", twice)
    assert read(here, records) == [OK] * 8


@pytest.mark.parametrize("encodes", [False, True])
def test_a_pack_that_another_host_writes_in_the_other_form_is_found_again(store, encodes):
    records = chain(8)
    here = packer_on(store, encodes=encodes)
    here.write_many(records)
    store.delete_many([pack_id(records[-1].header.id, 3)])
    packer_on(store, encodes=not encodes).write_many(records)
    assert read(here, records[1:4]) == [OK] * 3


def test_a_pack_of_which_nothing_became_smaller_is_of_version_one(store):
    records = chain(4, range(4))
    assert packer_on(store, encodes=True).write_many(records) == [OK] * 4
    (header,) = store.scan()
    assert header.codec == CODEC_PACK
    other = SpanMemory()
    packer_on(other, encodes=False).write_many(records)
    assert list(other.scan()) == [header]


def spoil(store: SpanMemory, place: slice, data: bytes) -> None:
    (name,) = store._records
    header, old = store._records[name]
    new = bytearray(old)
    new[place] = data
    store._records[name] = header, memoryview(new)


@pytest.mark.parametrize(
    "lengths",
    [b"\0" * 4, b"\xff" * 4, b"\0\0\x7f\0", (SIZE + 1).to_bytes(4, "little")],
    ids=["none", "too long for a pack", "longer than a part", "longer than the buffer"],
)
def test_lengths_that_somebody_made_up_are_misses(store, lengths):
    records = chain(8)
    packer_on(store, encodes=True).write_many(records)
    spoil(store, slice(256, 260), lengths)
    reader = finds(packer_on(store, encodes=True), records)
    assert OK not in read(reader, records)
    assert OK not in read(reader, records)


def test_a_spoilt_part_costs_no_other(store):
    records = chain(8)
    packer = packer_on(store, encodes=True)
    headers = [one.header for one in packer.send(records)]
    at = sized_at(5, 3, [header.stored_bytes for header in headers])
    spoil(store, slice(at + HEADER_BYTES + 9, at + HEADER_BYTES + 10), b"\xee")
    assert read(packer, records) == [OK] * 5 + [CORRUPT] + [OK] * 2
    spoil(store, slice(at, at + 8), b"\0" * 8)
    assert read(packer, records) == [OK] * 5 + [CORRUPT] + [OK] * 2


def test_a_pack_that_is_gone_is_asked_for_once(store):
    records = chain(8)
    packer = packer_on(store, encodes=True)
    packer.write_many(records)
    store.delete_many([pack_id(records[-1].header.id, 3)])
    assert read(packer, records) == [ABSENT] * 8
    assert len(store.spans) == 1
    assert read(packer, records) == [ABSENT] * 8
    assert len(store.spans) == 1, "it was forgotten"


def test_a_store_that_fails_is_not_asked_where_things_are(store, monkeypatch):
    records = chain(8)
    packer = packer_on(store, encodes=True)
    packer.write_many(records)
    asked = []
    monkeypatch.setattr(store, "read_spans", lambda spans: asked.append(1) or [FAILED] * len(spans))
    assert read(packer, records) == [FAILED] * 8
    assert len(asked) == 1


def test_a_buffer_that_is_too_short_is_not_filled(store):
    records = chain(4)
    packer = packer_on(store, encodes=True)
    packer.write_many(records)
    assert read(packer, records, 100) == [FAILED] * 4
    assert not store.spans


def test_spans_of_parts_of_many_lengths_are_of_some_mib(store, monkeypatch):
    records = chain(16, range(8))
    packer = packer_on(store, encodes=True)
    packer.write_many(records)
    monkeypatch.setattr(places, "_SPAN_BYTES", 4 * SIZE)
    assert read(packer, records) == [OK] * 16
    sizes = [sum(map(len, span.into)) for span in store.spans]
    assert [size <= 4 * (SIZE + HEADER_BYTES) for size in sizes] == [True] * len(sizes)
    assert 4 <= len(sizes) <= 5


def test_the_format_is_version_two():
    """Who changes it counts its number up, and keeps reading this one."""
    records = chain(4)

    def encode(record: Write, into: memoryview):
        half = record.header.depth * 10 + 5
        into[:half] = record.data[:half]
        return structs.replace(record.header, stored_bytes=half, codec=CODEC_LOSSLESS)

    (header, data), headers = pack_sized(records, 2, encode)
    lengths = (5, 15, 25, 35)
    assert lengths_in(bytes(data[: head_bytes(2)]), 2) == lengths
    assert bytes(data[:128]) == b"".join(record.header.key for record in records)
    for index, each in enumerate(headers):
        at = sized_at(index, 2, lengths)
        assert bytes(data[at : at + HEADER_BYTES]) == each.pack()
        body = data[at + HEADER_BYTES : at + HEADER_BYTES + lengths[index]]
        assert body == records[index].data[: lengths[index]]
    found = hashlib.sha256(header.pack() + data).hexdigest()
    assert found == "85f1073c7e3095621aeca1501a43a0b4f5b73bc42eaf0abbe5027d8831695b76"


# ------------------------------------------------------------------------------------------ anew


@pytest.mark.parametrize("encodes", [False, True])
@pytest.mark.parametrize("places", [(0,), (3,), (1, 2, 7), range(8)])
def test_parts_are_put_anew_into_a_pack_and_the_others_stay(store, encodes, places):
    records = chain(8)
    packer_on(store, encodes=encodes).write_many(records)
    (whole,) = store._records.values()
    before = bytes(whole[1])
    names = [record.header.id for record in records]
    found = repack(Write(*whole), {names[at]: records[at] for at in places})
    assert found is not None
    record, headers = found
    assert [header.id for header in headers] == names
    assert record.header.id == whole[0].id
    if not encodes:
        assert record.header == whole[0]
        assert bytes(record.data) == before
    store._records[record.header.id] = record.header, record.data
    assert read(finds(packer_on(store, encodes=True), records), records) == [OK] * 8


@pytest.mark.parametrize(
    ("encodes", "at"),
    [
        *itertools.product([False, True], ["its table", "the header of another part", "its end"]),
        (True, "its lengths"),
    ],
)
def test_what_is_no_whole_pack_of_these_parts_is_not_made_anew(store, encodes, at):
    records = chain(8)
    headers = [one.header for one in packer_on(store, encodes=encodes).send(records)]
    (header, data), size = next(iter(store._records.values())), SIZE + HEADER_BYTES
    body = bytearray(data)
    second = sized_at(1, 3, [one.stored_bytes for one in headers]) if encodes else 256 + size
    if at == "its end":
        del body[-5:]
    else:
        body[
            {"its table": 40, "its lengths": 258, "the header of another part": second + 60}[at]
        ] ^= 9
    again = {records[0].header.id: records[0]}
    assert repack(Write(header, memoryview(body)), again) is None
