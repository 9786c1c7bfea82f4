"""Tiers: exact bytes or a status, whatever the Store does. The fixture is in conftest.py."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from msgspec import structs

from kvtier.errors import Corrupt, Full, Unavailable
from kvtier.identity.record import CODEC_LOSSLESS, Header, PartName
from kvtier.testing.records import NAMESPACE, aligned, make_record
from kvtier.tiers import exact, tier
from kvtier.tiers.store import Status, Write
from kvtier.tiers.tier import Fetched, Wanted

SIZE = 5000
OK, ABSENT, CORRUPT, FAILED = Status.OK, Status.ABSENT, Status.CORRUPT, Status.FAILED
VERBS = ("read", "write", "delete", "contains")


# --------------------------------------------------------------------------------- exact or absent


def test_what_was_written_is_read_exactly(bench):
    assert bench.do("contains") is ABSENT
    assert bench.do("write") is OK
    fetched, buffer = bench.read()
    assert fetched == Fetched(OK, bench.record.header.raw_sum)
    assert buffer == bench.record.data
    assert bench.do("contains") is OK
    assert bench.do("delete") is OK
    assert bench.do("read") is ABSENT


LIES: dict[str, Callable[[Header], Header | None]] = {
    "another namespace": lambda h: structs.replace(h, namespace=bytes(32)),
    "another key": lambda h: structs.replace(h, key=bytes(32)),
    "another part": lambda h: structs.replace(h, part=PartName(1)),
    "another shard": lambda h: structs.replace(h, part=PartName(0, 0, 2)),
    "another raw length": lambda h: structs.replace(h, raw_bytes=SIZE - 1),
    "another stored length": lambda h: structs.replace(h, stored_bytes=SIZE - 1),
    "both lengths": lambda h: structs.replace(h, raw_bytes=1, stored_bytes=1),
    "bytes that are another codec's": lambda h: structs.replace(h, codec=CODEC_LOSSLESS),
    "another stored checksum": lambda h: structs.replace(h, stored_sum=bytes(16)),
    "another raw checksum": lambda h: structs.replace(h, raw_sum=bytes(16)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_header_that_is_not_the_wanted_ones_is_corrupt(bench, lie, caplog):
    bench.do("write")
    bench.store.headers = lie
    assert bench.read()[0] == Fetched(CORRUPT)
    assert bench.count("corrupt_records") == 1
    assert bench.count("fetched_bytes") == 0
    assert "corrupt" in caplog.text


def flip(bench) -> None:
    """Change one bit of what the store keeps, as a bad disk would."""
    header, data = bench.store._records[bench.record.header.id]
    rotten = bytearray(data)
    rotten[SIZE // 2] ^= 1
    bench.store._records[bench.record.header.id] = header, memoryview(rotten)


def test_one_flipped_bit_is_corrupt(bench):
    bench.do("write")
    flip(bench)
    assert bench.read()[0] == Fetched(CORRUPT)


def test_a_record_of_another_length_than_wanted_is_corrupt(bench):
    bench.do("write")
    assert bench.read(SIZE + 1)[0].status is CORRUPT
    assert bench.read(SIZE - 1)[0].status is FAILED, "the store itself refused the short buffer"
    assert bench.read(raw_bytes=SIZE - 1)[0].status is CORRUPT


def test_a_claim_without_a_header_is_a_failure(bench):
    bench.do("write")
    bench.store.headers = lambda header: None
    assert bench.read()[0] == Fetched(FAILED)


@pytest.mark.parametrize("how", ["flip", *LIES])
def test_unverified_the_corrupt_bytes_would_get_through(bench, how: str, monkeypatch):
    """The twin: the same faults, with verification passed by."""
    monkeypatch.setattr(exact, "is_exact", lambda header, wanted: True)
    bench.do("write")
    if how == "flip":
        flip(bench)
    else:
        bench.store.headers = LIES[how]
    fetched, buffer = bench.read()
    assert fetched.status is OK
    assert (buffer == bench.record.data) == (how != "flip")
    assert bench.count("corrupt_records") == 0


def test_one_bad_record_does_not_spoil_its_batch(bench):
    records = [make_record(number, SIZE) for number in range(3)]
    assert bench.flow.spawn(bench.tier.write(records)).result(10) == [OK] * 3
    bench.record = records[1]
    flip(bench)
    ids = [record.header.id for record in records] + [make_record(9, SIZE).header.id]
    wanted = [Wanted(name, NAMESPACE, SIZE, aligned(SIZE)) for name in ids]
    out = bench.flow.spawn(bench.tier.read(wanted)).result(10)
    assert [one.status for one in out] == [OK, CORRUPT, OK, ABSENT]
    assert bench.count("fetched_bytes") == 2 * SIZE
    assert bench.count("corrupt_records") == 1
    assert bench.count("spilled_bytes") == 3 * SIZE
    assert bench.count("tier_errors") == 0


# -------------------------------------------------------------------------- faults become statuses

ERRORS = [
    *(Unavailable("x"), Full("x"), Corrupt("x"), OSError(5, "EIO"), KeyError("k"), MemoryError()),
    *(StopIteration("x"), StopAsyncIteration(), AssertionError(), RecursionError(), TimeoutError()),
    *(asyncio.CancelledError(), GeneratorExit(), SystemExit(3), KeyboardInterrupt()),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_exception_of_any_kind_becomes_a_status(bench, error, caplog):
    bench.fail(error)
    for verb in VERBS:
        assert bench.do(verb) is FAILED
    assert bench.count("tier_errors") == len(VERBS)
    (line,) = caplog.messages
    assert line.startswith(f"mem: {type(error).__name__}"), "one line, and it names the cause"
    bench.heal()
    assert bench.do("write") is OK, "neither the loop nor the pool was harmed"


def test_unguarded_one_of_them_would_hang_its_caller(bench, monkeypatch):
    """The twin: StopIteration cannot be set on an asyncio future."""
    monkeypatch.setattr(tier, "guarded", lambda call, items: call(items))
    bench.fail(StopIteration("x"))
    reported = threading.Event()
    bench.flow._running().set_exception_handler(lambda loop, context: reported.set())
    running = bench.start("contains")
    if reported.wait(5):  # Python 3.11
        assert not running.done()
    else:  # later ones turn it into a RuntimeError
        assert running.done()


@pytest.mark.parametrize(
    "answer", [lambda out: [], lambda out: out * 2, lambda out: None, lambda out: 7]
)
def test_an_answer_of_another_length_becomes_a_status(bench, answer):
    bench.store.answer = answer
    for verb in VERBS:
        assert bench.do(verb) is FAILED
    assert bench.count("tier_errors") == len(VERBS)


def test_statuses_of_a_store_come_through(bench):
    for status in Status:
        bench.store.answer = lambda out, status=status: [status] * len(out)
        assert bench.do("write") is status
    assert bench.count("tier_errors") == 1, "only FAILED is an error"
    assert bench.count("spilled_bytes") == SIZE


def test_nothing_asked_is_nothing_done(bench):
    for verb in VERBS:
        assert bench.flow.spawn(getattr(bench.tier, verb)([])).result(10) == []
    assert bench.store.calls == 0


def test_writes_borrow_their_payload_without_a_copy(bench):
    seen: list[Write] = []
    bench.store.write_many = lambda records: seen.extend(records) or [OK] * len(records)
    bench.do("write")
    assert seen[0].data is bench.record.data


@pytest.mark.parametrize("answer", [0, -5, None, "5000", 5000.5, float("inf")])
def test_a_footprint_that_cannot_be_is_that_of_the_payload(bench, caplog, answer):
    """A budget that charges nothing for a record would never be full."""
    bench.store.footprint = lambda nbytes: answer
    assert bench.tier.footprint(5000) == 5000
    assert "mem: footprint: " in caplog.text


def test_a_footprint_below_the_payload_is_taken(bench):
    bench.store.footprint = lambda nbytes: nbytes // 2
    assert bench.tier.footprint(5000) == 2500
