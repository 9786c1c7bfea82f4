"""A daemon's frames: each kind has its golden bytes, all read back, and nothing else is read.

``python tests/property/test_daemon_frames.py write`` writes the golden file anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from kvtier.daemon import frames, messages
from kvtier.daemon.calls import Calls
from kvtier.daemon.frames import HEADER, KINDS, VERSION, decode, encode, open_frame
from kvtier.daemon.messages import LARGE, MOST_CHUNKS, Message
from kvtier.daemon.out import Outs
from kvtier.daemon.sessions import Session, Sessions
from kvtier.errors import ConfigError, MisuseError, ProtocolError
from kvtier.identity.geometry import DTYPE_BYTES, LAYOUT, Component, Geometry, Needs
from kvtier.local import LocalDesk
from kvtier.memory.arena import Slot
from kvtier.memory.packed import pack_slots, unpack_slots
from kvtier.testing import besieged, fuzz
from kvtier.testing.hostile import WAYS, hostile
from kvtier.testing.wire import NUMBER, SAMPLES

GOLDEN = Path(__file__).parents[1] / "unit" / "golden" / f"frames-v{VERSION}.json"
MOST = (1 << 63) - 1
INPUTS = 20_000


def golden() -> dict[str, str]:
    """Return the frame of each kind of message, in hex."""
    return {type(sample).__name__: encode(sample, NUMBER).hex() for sample in SAMPLES}


# ------------------------------------------------------------------------------------ strategies

SMALL = st.integers(1, 64)
COMPONENTS = st.builds(
    lambda layers, heads, size, planes, name, window, replicated: Component(
        layers,
        heads,
        size,
        planes,
        name,
        Needs.TRAILING if window else Needs.ALL,
        window,
        replicated,
    ),
    *(SMALL, SMALL, SMALL, SMALL, st.text(max_size=8), st.integers(0, 99), st.booleans()),
)
GEOMETRIES = st.builds(
    Geometry,
    st.lists(COMPONENTS, min_size=1, max_size=3).map(tuple),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.just((16,)),
    st.integers(1, 64).map(lambda blocks: 16 * blocks),
    st.just(LAYOUT),
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for what a field may have, as msgspec reads its type."""
    return BY_TYPE[type(kind)](kind)


def built(kind: Any) -> st.SearchStrategy[Any]:
    if kind.cls is Geometry:
        return GEOMETRIES
    return st.builds(kind.cls, *(values(one.type) for one in kind.fields))


def whole(kind: Any) -> st.SearchStrategy[int]:
    most = kind.le if kind.lt is None else kind.lt - 1
    return st.integers(-MOST if kind.ge is None else kind.ge, MOST if most is None else most)


def binary(kind: Any) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=kind.min_length or 0, max_size=min(kind.max_length or 99, 99))


BY_TYPE: dict[type, Callable[[Any], st.SearchStrategy[Any]]] = {
    inspect.StructType: built,
    inspect.DataclassType: built,
    inspect.IntType: whole,
    inspect.FloatType: lambda kind: st.floats(kind.ge, kind.le, allow_nan=False),
    inspect.StrType: lambda _: st.text(max_size=9),
    inspect.BytesType: binary,
    inspect.ListType: lambda kind: st.lists(values(kind.item_type), max_size=4),
    inspect.VarTupleType: lambda kind: st.lists(values(kind.item_type), max_size=4).map(tuple),
    inspect.TupleType: lambda kind: st.tuples(*map(values, kind.item_types)),
    inspect.DictType: lambda kind: st.dictionaries(
        values(kind.key_type), values(kind.value_type), max_size=3
    ),
    inspect.UnionType: lambda kind: st.one_of(*map(values, kind.types)),
    inspect.LiteralType: lambda kind: st.sampled_from(kind.values),
    inspect.BoolType: lambda _: st.booleans(),
    inspect.NoneType: lambda _: st.none(),
}
MESSAGES = st.sampled_from(sorted(KINDS)).flatmap(
    lambda kind: values(inspect.type_info(KINDS[kind]))
)
SLOTS = st.lists(st.builds(Slot, *[st.integers(0, (1 << 64) - 1)] * 3), max_size=5)


# ---------------------------------------------------------------------------------------- golden


def test_the_frames_are_the_golden_ones():
    kept = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden() == kept
    for sample in SAMPLES:
        frame = bytes.fromhex(kept[type(sample).__name__])
        kind, length, number = open_frame(frame[: HEADER.size])
        assert (kind, HEADER.size + length, number) == (sample.KIND, len(frame), NUMBER)
        assert decode(kind, frame[HEADER.size :]) == sample


def test_there_is_a_golden_frame_of_every_kind():
    assert sorted(KINDS) == sorted(sample.KIND for sample in SAMPLES)
    assert len({sample.KIND for sample in SAMPLES}) == len(SAMPLES)


def test_the_header_lies_where_the_text_says():
    frame = encode(messages.Leave(7), NUMBER)
    assert frame[:4] == bytes([ord("K"), ord("V"), 1, 3])
    assert int.from_bytes(frame[4:8], "little") == len(frame) - 16
    assert int.from_bytes(frame[8:16], "little") == NUMBER
    assert frame[16:] == b"\x91\x07"


# ------------------------------------------------------------------------------------ round trips


@given(MESSAGES, st.integers(0, (1 << 64) - 1))
def test_a_message_reads_back(message: Message, number: int):
    frame = encode(message, number)
    kind, length, same = open_frame(memoryview(frame)[: HEADER.size])
    assert (kind, length, same) == (message.KIND, len(frame) - HEADER.size, number)
    assert decode(kind, bytearray(frame[HEADER.size :])) == message


@given(SLOTS)
def test_slots_read_back(slots: list[Slot]):
    data = pack_slots(slots)
    assert len(data) == 24 * len(slots)
    assert unpack_slots(data) == slots
    if slots:
        with pytest.raises(ProtocolError, match="are no slots"):
            unpack_slots(data[:-1])


def test_the_longest_prompt_fits_every_message_that_carries_one():
    keys = bytes(32 * MOST_CHUNKS)
    prompt = messages.Prompt(MOST, MOST_CHUNKS, keys[:32], keys)
    carriers = [sample for sample in SAMPLES if hasattr(sample, "prompt")]
    assert len(carriers) == 8
    for sample in carriers:
        message = msgspec.structs.replace(sample, prompt=prompt)
        if isinstance(message, messages.Reserve):
            message.places = [[0, 1, 2, 3, 4, 5]] * MOST_CHUNKS
            message.kept = []
        assert decode(message.KIND, encode(message)[HEADER.size :]) == message


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("at", "value", "word"),
    [
        (0, b"HT", "another program's socket"),
        (2, b"\x02", "version 2; this kvtier speaks 1: install the same release"),
        (3, b"\xff", "unknown kind 255"),
        (4, b"\xff\xff\xff\xff", "Leave of 4294967295 bytes; at most 4096 are read"),
    ],
)
def test_a_header_is_refused_with_a_word(at: int, value: bytes, word: str):
    header = bytearray(encode(messages.Leave(7))[: HEADER.size])
    header[at : at + len(value)] = value
    with pytest.raises(ProtocolError, match=word):
        open_frame(header)


def test_no_kind_may_be_longer_than_is_said_of_it():
    for kind in KINDS.values():
        header = HEADER.pack(b"KV", VERSION, kind.KIND, kind.MOST, 0)
        assert open_frame(header)[1] == kind.MOST <= LARGE
        with pytest.raises(ProtocolError, match="at most"):
            open_frame(HEADER.pack(b"KV", VERSION, kind.KIND, kind.MOST + 1, 0))


def test_a_message_that_is_too_long_is_not_sent():
    with pytest.raises(ProtocolError, match="a Clear of 5014 bytes; at most 4096 are sent"):
        encode(messages.Clear(7, "x" * 5000, 1.0))


@pytest.mark.parametrize(
    "message",
    [
        messages.Leave(-1),
        messages.Leave(1 << 63),
        messages.Hello(bytes(15), "", "scheduler"),
        messages.Hello(bytes(16), "x" * 257, "scheduler"),
        messages.Hello(bytes(16), "", "operator"),  # type: ignore[arg-type]
        messages.Renew(9, float("nan")),
        messages.Renew(9, float("inf")),
        messages.Renew(9, -1.0),
        messages.Purge(7, bytes(31), 1.0),
        messages.Match(7, messages.Prompt(1, MOST_CHUNKS + 1, b"", b"")),
        messages.Match(7, messages.Prompt(1, 0, bytes(33), b"")),
    ],
)
def test_a_value_out_of_bounds_is_refused(message: Message):
    with pytest.raises(ProtocolError, match=f"not a {type(message).__name__}"):
        decode(message.KIND, encode(message)[HEADER.size :])


def test_a_geometry_that_cannot_be_is_refused():
    with pytest.raises(ConfigError):
        Component(layers=0, heads=1, head_size=1)
    join = next(sample for sample in SAMPLES if isinstance(sample, messages.Join))
    body = msgspec.msgpack.decode(encode(join)[HEADER.size :])
    body[1]["components"][0]["layers"] = 0
    with pytest.raises(ProtocolError, match="not a Join"):
        decode(join.KIND, msgspec.msgpack.encode(body))


# ------------------------------------------------------------------------------------------- fuzz


def test_hostile_input_is_a_protocol_error_and_nothing_else():
    found = fuzz.fuzz(INPUTS)  # what passes goes on to live sessions
    assert found.inputs == INPUTS
    assert set(found.ways) == set(WAYS)
    assert found.refused > INPUTS // 3
    assert found.messages > INPUTS // 10


def test_what_is_well_formed_harms_neither_the_daemon_nor_another_client():
    found = fuzz.fuzz(INPUTS, seed=1)
    assert found.taken > INPUTS // 20
    assert found.honest_checks > INPUTS // 1000
    assert found.honest_refused < found.honest_checks // 2
    assert found.hostile_deaths >= INPUTS // 5000
    assert not found.held


def test_without_its_guard_one_session_would_end_the_desk_of_another(monkeypatch):
    found: list[Sessions] = []
    opened = Sessions.__init__

    def noted(self: Sessions, *given: Any, **named: Any) -> None:
        found.append(self)
        opened(self, *given, **named)

    def any_desk(session: Session, number: int) -> LocalDesk:
        for one in [session, *found[-1]._all.values()]:
            if number in one.desks:
                return one.desks[number]
        raise MisuseError("no such desk")

    monkeypatch.setattr(Sessions, "__init__", noted)
    monkeypatch.setattr(Calls, "_desk", staticmethod(any_desk))
    with pytest.raises(AssertionError, match=r"input \d+ of seed 0"):
        fuzz.fuzz(5_000)


def test_without_its_guard_the_slots_of_the_dead_would_be_held(monkeypatch):
    monkeypatch.setattr(Outs, "died", lambda self, who: None)
    monkeypatch.setattr(besieged, "_WAIT_SECONDS", 2.0)
    with pytest.raises(AssertionError, match="slots are held when all is over"):
        fuzz.fuzz(5_000)


def test_the_same_seed_gives_the_same_input():
    assert [hostile(3, number) for number in range(99)] == [
        hostile(3, number) for number in range(99)
    ]
    assert hostile(3, 5) != hostile(4, 5)


def test_without_its_guard_a_broken_body_would_raise_another_error(monkeypatch):
    def unguarded(kind: int, body: bytes) -> Message:
        return frames._decoders[kind].decode(body)

    monkeypatch.setattr(fuzz, "decode", unguarded)
    with pytest.raises(AssertionError, match=r"input \d+ of seed 0"):
        fuzz.fuzz(200)


def test_without_its_cap_a_list_would_take_more_memory_than_it_may():
    class Uncapped(messages.Reserve):
        places: list[list[int]] | None

    many = 1 << 20
    prompt = msgspec.msgpack.encode(messages.Prompt(0, 0, b"", b""))
    body = b"\x95\x00" + prompt + b"\x00\xdd" + many.to_bytes(4, "big") + b"\x90" * many + b"\x90"
    data = HEADER.pack(b"KV", VERSION, Uncapped.KIND, len(body), 0) + body
    assert fuzz.memory_taken(data) <= fuzz.memory_limit(len(data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(frames._decoders, Uncapped.KIND, msgspec.msgpack.Decoder(Uncapped))
        assert fuzz.memory_taken(data) > fuzz.memory_limit(len(data))


if __name__ == "__main__" and sys.argv[1:] == ["write"]:
    GOLDEN.write_text(json.dumps(golden(), indent=1) + "\n", encoding="utf-8")
