"""CopyPlan: plain data that crosses processes, and is checked where it arrives."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from kvtier import copyplan as module
from kvtier.copyplan import CopyPlan, PlanPart
from kvtier.errors import ProtocolError

PLAN = CopyPlan(
    2,
    17,
    "save",
    2**40,
    0,
    (
        PlanPart(0, 8192, 3, 0, 0, 1, 0, 1, 16, (5, 4, 4000)),
        PlanPart(8192, 8192, 4, 1, 0, 1, 0, 1, 0, ()),
    ),
)
RAW = msgspec.msgpack.decode(bytes(PLAN))

ECHO = """
import sys
from kvtier.copyplan import CopyPlan
sys.stdout.buffer.write(bytes(CopyPlan.decode(sys.stdin.buffer.read())))
"""


def encoded(**changes: object) -> bytes:
    """Encode the plan with fields replaced, as only a faulty sender would."""
    names = ("version", "id", "kind", "arena", "tokens", "parts")
    return msgspec.msgpack.encode([changes.get(name, RAW[i]) for i, name in enumerate(names)])


def test_a_plan_crosses_a_process():
    command = [sys.executable, "-c", ECHO]
    done = subprocess.run(command, input=bytes(PLAN), capture_output=True, check=True, timeout=30)
    assert CopyPlan.decode(done.stdout) == PLAN


def test_a_plan_is_small():
    blocks = tuple(range(16))
    parts = tuple(PlanPart(i << 22, 1 << 22, i, 0, 0, 1, 0, 1, 0, blocks) for i in range(512))
    assert len(bytes(CopyPlan(2, 1, "load", 1, 8192, parts))) < 32_768


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "1"},
        {"version": 1.5},
        {"id": -1},
        {"kind": "move"},
        {"kind": None},
        {"arena": None},
        {"parts": None},
        {"parts": [RAW[5][0][:-1]]},
        {"parts": [[*RAW[5][0], 0]]},
        {"parts": [[-1, *RAW[5][0][1:]]]},
        {"parts": [[*RAW[5][0][:-1], [-1]]]},
        {"parts": [[*RAW[5][0][:-1], ["0"]]]},
        {"parts": [[*RAW[5][0][:-1], [True]]]},
    ],
    ids=str,
)
def test_a_wrong_value_is_a_protocol_error(changes: dict[str, object]):
    with pytest.raises(ProtocolError, match="not a copy plan of version 2"):
        CopyPlan.decode(encoded(**changes))


def test_another_version_is_refused_by_its_number():
    with pytest.raises(ProtocolError, match="plan version 3; this kvtier reads 2"):
        CopyPlan.decode(encoded(version=3))


def test_another_shape_is_refused_with_the_version_that_is_read():
    with pytest.raises(ProtocolError, match="of version 2"):
        CopyPlan.decode(msgspec.msgpack.encode([*RAW, "new"]))


def test_nesting_without_end_is_a_protocol_error():
    with pytest.raises(ProtocolError):
        CopyPlan.decode(b"\x96\x02\x01\xa4load\x01\x00" + b"\x91" * 100_000)


@pytest.mark.parametrize("count", [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"])
def test_a_promised_length_takes_no_memory(count: bytes):
    with pytest.raises(ProtocolError, match="truncated"):
        CopyPlan.decode(b"\x96\x02\x01\xa4load\x01\x00\xdd" + count)


def test_a_huge_message_is_not_read(monkeypatch):
    monkeypatch.setattr(module, "_MAX_BYTES", 10)
    with pytest.raises(ProtocolError, match="at most 10"):
        CopyPlan.decode(bytes(PLAN))


def test_plans_are_values_that_nobody_changes():
    assert CopyPlan.decode(bytes(PLAN)) == PLAN
    with pytest.raises(AttributeError):
        PLAN.id = 3
