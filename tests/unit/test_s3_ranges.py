"""Into how many requests spans of packs go: fewer, and longer ones, where many are read at once."""

from __future__ import annotations

import pytest

from kvtier.storage_backends.s3_ranges import Ranges, following, together
from kvtier.tiers.store import Span

MIB = 1 << 20
MOST = 16


def span(start: int, size: int, name: bytes = b"pack", total: int = 99) -> Span:
    half = size // 2
    return Span(
        name, start, [memoryview(bytearray(half)), memoryview(bytearray(size - half))], total
    )


def cells(count: int) -> list[Span]:
    """Return the spans of 4 MiB of so many packs of 16 MiB."""
    starts = range(0, 16 * MIB, 4 * MIB)
    return [span(at, 4 * MIB, bytes([cell])) for cell in range(count) for at in starts]


@pytest.mark.parametrize(("others", "requests"), [(0, 4), (4, 4), (5, 2), (7, 2), (8, 1), (40, 1)])
def test_a_pack_is_read_by_as_many_requests_as_there_is_room_for(others, requests):
    ranges, spans = Ranges(MOST), cells(1)
    with ranges.reading(1 + others):
        lots = ranges.lots(following(spans))
    assert len(lots) == requests
    assert [one for lot in lots for one in lot] == spans


def test_packs_of_one_call_share_the_room_too():
    ranges, spans = Ranges(MOST), cells(8)
    runs = following(spans)
    with ranges.reading(len(runs)):
        lots = ranges.lots(runs)
    assert [len(lot) for lot in lots] == [2] * 16
    assert [one for lot in lots for one in lot] == spans


def test_spans_that_are_read_together_are_one_span():
    first, second = span(100, 6), span(106, 8)
    (lot,) = Ranges(MOST).lots(following([first, second]))
    got = together(lot)
    assert (got.id, got.start, got.total) == (b"pack", 100, 99)
    assert [id(one) for one in got.into] == [id(one) for one in [*first.into, *second.into]]


@pytest.mark.parametrize(
    "second",
    [span(107, 8), span(105, 8), span(106, 8, b"other"), span(106, 8, total=98)],
    ids=["a gap", "an overlap", "another record", "another length"],
)
def test_what_does_not_follow_is_read_apart(second):
    assert len(Ranges(MOST).lots(following([span(100, 6), second]))) == 2


def test_of_a_record_of_any_length_each_span_has_its_own_fate():
    assert len(following([span(0, 6, total=0), span(6, 8, total=0)])) == 2
