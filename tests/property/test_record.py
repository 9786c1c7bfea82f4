"""Records and plans under Hypothesis: what is written reads back, what is not is refused."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvtier.copyplan import CopyPlan, PlanPart
from kvtier.errors import Corrupt, ProtocolError
from kvtier.identity.record import (
    HEADER_BYTES,
    Header,
    PartName,
    checksum,
    record_id,
    split_record_id,
)

U16 = st.integers(0, 2**16 - 1)
U64 = st.integers(0, 2**64 - 1)
PARTS = st.builds(
    lambda c, a, b, d, e: PartName(c, min(a, b), max(a, b), min(d, e), max(d, e)), *[U16] * 5
).filter(lambda part: part.shard < part.shards and part.stage < part.stages)
KEYS = st.binary(min_size=32, max_size=32)
SUMS = st.binary(min_size=16, max_size=16)
SIZES = st.integers(0, 1 << 40)
HEADERS = st.builds(
    Header,
    namespace=KEYS,
    key=KEYS,
    parent=st.none() | st.binary(min_size=42, max_size=42).filter(lambda name: any(name[:32])),
    depth=st.integers(0, 2**31 - 1),
    part=PARTS,
    raw_bytes=SIZES,
    stored_bytes=SIZES,
    raw_sum=SUMS,
    stored_sum=SUMS,
    codec=U16,
)
PLAN_PARTS = st.builds(PlanPart, *[U64] * 9, st.lists(U64, max_size=5).map(tuple))
PLANS = st.builds(
    CopyPlan,
    st.just(2),
    U64,
    st.sampled_from(["load", "save"]),
    U64,
    U64,
    st.lists(PLAN_PARTS, max_size=4).map(tuple),
)
MUTATIONS = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | U64 | st.integers(-(2**63), -1) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=30,
)


def mutated(data: bytes, changes: list[tuple[int, int]]) -> bytes:
    out = bytearray(data)
    for at, change in changes:
        out[at % len(out)] ^= change
    return bytes(out)


# --------------------------------------------------------------------------------------- records


@given(HEADERS)
def test_a_header_reads_back(header: Header):
    data = header.pack()
    assert len(data) == HEADER_BYTES
    assert Header.unpack(data) == header


@given(KEYS, PARTS)
def test_a_name_splits_back(key: bytes, part: PartName):
    assert split_record_id(record_id(key, part)) == (key, part)


@given(HEADERS, MUTATIONS)
def test_a_mutated_header_is_corrupt_or_untouched(header: Header, changes: list[tuple[int, int]]):
    data = mutated(header.pack(), changes)
    if data == header.pack():
        assert Header.unpack(data) == header
    else:
        assert_corrupt(data)


@given(st.binary(max_size=2 * HEADER_BYTES), st.binary(min_size=232, max_size=232))
def test_random_bytes_are_corrupt_and_nothing_else(data: bytes, body: bytes):
    assert_corrupt(data)
    assert_corrupt(b"KVTIERrc" + data)
    whole = b"KVTIERrc" + body  # what only a forger has: a right checksum over nonsense
    try:
        header = Header.unpack(whole + checksum(whole))
    except Corrupt:
        return
    assert header.part.shard < header.part.shards


def assert_corrupt(data: bytes) -> None:
    try:
        Header.unpack(data)
    except Corrupt:
        return
    raise AssertionError("read as a header")


# ----------------------------------------------------------------------------------------- plans


@given(PLANS)
def test_a_plan_reads_back(plan: CopyPlan):
    assert CopyPlan.decode(bytes(plan)) == plan
    assert CopyPlan.decode(memoryview(bytearray(bytes(plan)))) == plan


def assert_plan_or_protocol_error(data: bytes) -> None:
    try:
        plan = CopyPlan.decode(data)
    except ProtocolError:
        return
    assert plan.version == 2
    assert plan.kind in {"load", "save"}
    for part in plan.parts:
        numbers = (part.offset, part.nbytes, part.serial, part.component, part.shard, part.shards)
        assert all(type(number) is int and number >= 0 for number in numbers)
        assert all(type(block) is int and block >= 0 for block in part.blocks)


@given(PLANS, MUTATIONS, st.integers(0, 1 << 20))
def test_a_mutated_or_cut_plan_is_a_protocol_error(
    plan: CopyPlan, changes: list[tuple[int, int]], cut: int
):
    data = mutated(bytes(plan), changes)
    assert_plan_or_protocol_error(data)
    assert_plan_or_protocol_error(data[: cut % len(data)])
    assert_plan_or_protocol_error(data + b"\0")


@given(st.binary(max_size=200))
def test_random_bytes_are_a_protocol_error(data: bytes):
    assert_plan_or_protocol_error(data)


@given(VALUES, st.lists(VALUES, min_size=1, max_size=1))
def test_other_messages_are_a_protocol_error(value: object, inner: list[object]):
    assert_plan_or_protocol_error(msgspec.msgpack.encode(value))
    assert_plan_or_protocol_error(msgspec.msgpack.encode([2, 1, "load", 1, 0, inner]))
