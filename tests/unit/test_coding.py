"""A Tier with a codec: what it encodes, when that pays, and that bytes stay exact or absent."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from kvtier.codecs.known import LOSSLESS
from kvtier.codecs.lossless import Lossless
from kvtier.identity.record import CODEC_LOSSLESS, CODEC_RAW, Header, PartName, checksum, codec_name
from kvtier.metrics import Metrics
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.records import NAMESPACE, aligned, kv_like, make_record
from kvtier.tiers import exact
from kvtier.tiers.budget import WriteBudget
from kvtier.tiers.coding import WORTH, Coding, send_each
from kvtier.tiers.store import Status, Write
from kvtier.tiers.tier import Fetched

SIZE = 40_000
OK, ABSENT, CORRUPT, FAILED = Status.OK, Status.ABSENT, Status.CORRUPT, Status.FAILED


def coding_of(bench, *, always: bool = True) -> Coding:
    coding = Coding("mem", LOSSLESS, bench.clock, bench.metrics, always=always)
    coding.admit(NAMESPACE)
    return coding


@pytest.fixture
def coded(bench):
    """Return a bench whose tier encodes, with a record to encode."""
    bench.tier.encode_by(coding_of(bench))
    bench.record = make_record(1, SIZE, like_kv=True)
    return bench


def kept(bench) -> Header:
    header, data = bench.store._records[bench.record.header.id]
    assert len(data) == header.stored_bytes
    assert checksum(data) == header.stored_sum
    return header


def counts(bench) -> dict[str, float]:
    names = ("encoded_bytes", "encoded_stored_bytes", "decoded_bytes", "spilled_bytes")
    return {name: bench.metrics.get(name) for name in (*names, "unencoded_bytes")}


# --------------------------------------------------------------------------------- there and back


def test_what_was_encoded_is_read_exactly_and_counted(coded):
    assert coded.do("write") is OK
    header = kept(coded)
    assert header == structs.replace(
        coded.record.header,
        codec=CODEC_LOSSLESS,
        stored_bytes=header.stored_bytes,
        stored_sum=header.stored_sum,
    )
    assert header.stored_bytes < 0.75 * SIZE
    found, buffer = coded.read(SIZE)
    assert found == Fetched(OK, coded.record.header.raw_sum, decoded=True)
    assert buffer == coded.record.data
    assert counts(coded) == {
        "encoded_bytes": SIZE,
        "encoded_stored_bytes": header.stored_bytes,
        "decoded_bytes": SIZE,
        "spilled_bytes": header.stored_bytes,
        "unencoded_bytes": 0,
    }


def test_a_tier_without_a_codec_reads_what_another_encoded(coded):
    coded.do("write")
    coded.tier.coding = None
    found, buffer = coded.read(SIZE)
    assert (found.status, buffer) == (OK, coded.record.data)


def test_a_tier_with_a_codec_reads_what_another_wrote_raw(coded):
    coding, coded.tier.coding = coded.tier.coding, None
    coded.do("write")
    assert kept(coded).codec == CODEC_RAW
    coded.tier.coding = coding
    found, buffer = coded.read(SIZE)
    assert (found, buffer) == (Fetched(OK, coded.record.header.raw_sum), coded.record.data)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        pytest.param(make_record(1, SIZE), "size", id="noise"),
        pytest.param(make_record(1, SIZE - 1, like_kv=True), "size", id="an odd length"),
        pytest.param(make_record(1, 16, like_kv=True), "size", id="a few bytes"),
        pytest.param(
            make_record(1, SIZE, namespace=bytes(32), like_kv=True), "elements", id="other elements"
        ),
    ],
)
def test_what_a_codec_is_not_for_is_written_as_it_is(coded, record, why):
    coded.record = record
    assert coded.do("write") is OK
    assert kept(coded) == record.header
    size = record.header.raw_bytes
    assert coded.metrics.get("unencoded_bytes", tier="mem", reason=why) == size
    assert coded.metrics.get("unencoded_bytes") == size
    found, buffer = coded.read(size, namespace=record.header.namespace)
    assert (found.status, buffer) == (OK, record.data)


def test_what_hardly_becomes_smaller_is_written_as_it_is(bench):
    """One part in sixteen is what decoding has to be worth."""

    class Slight(Lossless):
        saves = 0

        def encode(self, raw, into):
            count = len(raw) - self.saves
            return count if count <= len(into) else 0

    slight = Slight()
    coding = Coding("mem", slight, bench.clock, bench.metrics, always=True)
    coding.admit(NAMESPACE)
    record = make_record(1, SIZE)
    for slight.saves in (SIZE // WORTH - 1, SIZE // WORTH):
        header = coding.encode(record, aligned(SIZE))
        assert (header is None) == (slight.saves < SIZE // WORTH)


# ------------------------------------------------------------------------------- exact or absent


def spoil(bench, at: int) -> None:
    """Change one bit of what the store keeps."""
    header, data = bench.store._records[bench.record.header.id]
    rotten = bytearray(data)
    rotten[at] ^= 1
    bench.store._records[bench.record.header.id] = header, memoryview(rotten)


def swap(bench) -> None:
    """Let the store keep other bytes under that name, with a header that attests to them."""
    other = kv_like(77, SIZE)
    into = bytearray(SIZE)
    data = memoryview(into)[: LOSSLESS.encode(other, memoryview(into))]
    header, _ = bench.store._records[bench.record.header.id]
    header = structs.replace(header, stored_bytes=len(data), stored_sum=checksum(data))
    bench.store._records[header.id] = header, data


@pytest.fixture
def decodes(monkeypatch) -> list[int]:
    """Return a list to which every decoding adds the bytes that it was given."""
    seen: list[int] = []
    decode = Lossless.decode

    def noted(self, stored, into):
        seen.append(len(stored))
        return decode(self, stored, into)

    monkeypatch.setattr(Lossless, "decode", noted)
    return seen


@pytest.mark.parametrize("at", [0, SIZE // 4, -1])
def test_a_flipped_bit_is_corrupt_before_it_is_decoded(coded, decodes, at):
    coded.do("write")
    spoil(coded, at)
    assert coded.read(SIZE)[0] == Fetched(CORRUPT)
    assert decodes == []
    assert coded.count("corrupt_records") == 1


def test_unchecked_a_flipped_bit_would_be_decoded(coded, decodes, monkeypatch):
    """The twin, in which the stored checksum is not looked at."""
    monkeypatch.setattr(
        exact, "sums_to", lambda data, total: len(data) != SIZE or checksum(data) == total
    )
    coded.do("write")
    spoil(coded, 0)
    assert coded.read(SIZE)[0] == Fetched(CORRUPT), "the raw checksum still tells"
    assert len(decodes) == 1


def test_other_bytes_that_are_attested_to_are_corrupt(coded):
    coded.do("write")
    swap(coded)
    assert coded.read(SIZE)[0] == Fetched(CORRUPT)


def test_without_the_raw_checksum_other_bytes_would_get_through(coded, monkeypatch):
    """The twin."""
    monkeypatch.setattr(
        exact, "sums_to", lambda data, total: len(data) == SIZE or checksum(data) == total
    )
    coded.do("write")
    swap(coded)
    found, buffer = coded.read(SIZE)
    assert found.status is OK
    assert buffer == kv_like(77, SIZE) != coded.record.data


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param({"raw_bytes": SIZE - 2}, id="fewer bytes than wanted"),
        pytest.param({"raw_bytes": SIZE << 20}, id="far more bytes than wanted"),
        pytest.param({"stored_bytes": SIZE + 1}, id="more stored than raw"),
        pytest.param({"codec": CODEC_RAW}, id="raw, which it is not"),
        pytest.param({"namespace": bytes(32)}, id="another namespace"),
        pytest.param({"part": PartName(1)}, id="another part"),
    ],
)
def test_a_header_that_lies_is_corrupt_before_anything_is_decoded(coded, decodes, lie):
    coded.do("write")
    coded.store.headers = lambda header: structs.replace(header, **lie)
    assert coded.read(SIZE)[0] == Fetched(CORRUPT)
    assert decodes == []


# ----------------------------------------------------------------------------- codecs of others


@pytest.mark.parametrize("codec", [CODEC_LOSSLESS + 1, 0x0301, 9, 0xFFFF])
def test_a_codec_that_is_not_known_is_a_miss_with_its_cause(coded, codec, decodes, caplog):
    coded.do("write")
    coded.store.headers = lambda header: structs.replace(header, codec=codec)
    assert coded.read(SIZE)[0] == Fetched(CORRUPT, unknown=codec_name(codec))
    assert coded.metrics.get("tier_faults", tier="mem", reason="unknown codec") == 1
    assert coded.count("corrupt_records") == 0
    assert coded.count("tier_errors") == 0
    assert decodes == []
    assert f"the codec {codec_name(codec)}, which is not known here" in caplog.text


def test_guessed_at_it_would_fail_its_whole_batch(coded, monkeypatch):
    """The twin: a record of another codec is taken for one that is known."""
    monkeypatch.setattr(exact, "is_known", lambda header: True)
    coded.do("write")
    coded.store.headers = lambda header: structs.replace(header, codec=0x0301)
    assert coded.read(SIZE)[0] == Fetched(FAILED)
    assert coded.count("tier_errors") == 1


# ------------------------------------------------------------------------------------ what it costs


def test_the_write_budget_pays_for_what_is_stored(coded):
    coded.tier.writes = WriteBudget(10 * SIZE, coded.clock)
    coded.do("write")
    stored = coded.tier.charge(kept(coded))
    assert stored < 0.8 * SIZE
    assert coded.tier.writes.left == 10 * SIZE - stored


def test_what_failed_was_paid_for_as_it_was_sent(coded):
    coded.tier.writes = WriteBudget(10 * SIZE, coded.clock)
    coded.store.answer = lambda out: [FAILED]
    assert coded.do("write") is FAILED
    assert coded.tier.writes.left == pytest.approx(9.26 * SIZE, rel=0.01)


def test_write_all_says_how_each_was_written(coded):
    records = [make_record(number, SIZE, like_kv=number % 2 == 0) for number in range(8)]
    out = coded.flow.spawn(coded.tier.write_all(records)).result(10)
    codecs = [CODEC_RAW if number % 2 else CODEC_LOSSLESS for number in range(8)]
    assert [(one.status, one.header.codec) for one in out] == [(OK, codec) for codec in codecs]
    assert [one.header.id for one in out] == [record.header.id for record in records]


def test_a_store_that_raises_fails_its_batch_and_nothing_else(coded):
    coded.fail(OSError(5, "EIO"))
    assert coded.do("write") is FAILED
    coded.heal()
    assert coded.do("write") is OK


def test_records_are_encoded_some_mib_at_a_time_into_aligned_memory():
    lots: list[int] = []

    class Aligned(MemoryStore):
        ALIGNMENT = 4096

        def write_many(self, records):
            for record in records:
                address = np.frombuffer(record.data, np.uint8).ctypes.data
                assert address % 4096 == 0
            lots.append(len(records))
            return super().write_many(records)

    coding = Coding("mem", LOSSLESS, lambda: 0.0, Metrics(), always=True)
    coding.admit(NAMESPACE)
    store = Aligned()
    records = [make_record(number, 7 << 20, like_kv=True) for number in range(5)]
    out = send_each(store, records, coding)
    assert [one.status for one in out] == [OK] * 5
    assert lots == [2, 2, 1]


def test_a_record_that_is_encoded_already_stays(coded):
    header = structs.replace(coded.record.header, codec=CODEC_LOSSLESS)
    assert coded.tier.coding.encode(Write(header, coded.record.data), aligned(SIZE)) is None
