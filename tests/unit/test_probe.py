"""Probing a shared tier: how far it goes is found in few look-ups; what it lacks is remembered."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.catalog import probe
from kvtier.catalog.probe import Probe, search
from kvtier.testing.small_catalog import Clock


def searched(count: int, there: int) -> tuple[int, list[list[int]]]:
    """Search `count` positions of which the first `there` are present; return what was asked."""
    rounds: list[list[int]] = []

    async def ask(places):
        rounds.append(list(places))
        return [place < there for place in places]

    return asyncio.run(search(count, ask)), rounds


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 40, 255, 4096])
def test_the_end_of_a_prefix_is_found_in_three_rounds(count):
    for there in {0, 1, count // 3, count - 1, count} - {-1}:
        found, rounds = searched(count, min(there, count))
        assert found == min(there, count)
        assert len(rounds) <= 3
        assert all(asked == sorted(set(asked)) for asked in rounds)
        assert all(len(asked) <= 16 for asked in rounds)
        assert all(0 <= place < count for asked in rounds for place in asked)


def test_a_search_ends_once_it_knows():
    assert len(searched(10, 4)[1]) == 1
    assert len(searched(200, 0)[1]) == 1
    assert searched(0, 0) == (0, [])


def test_nothing_is_asked_twice():
    for there in range(0, 4097, 97):
        asked = [place for places in searched(4096, there)[1] for place in places]
        assert len(asked) == len(set(asked))


def test_beyond_three_rounds_the_answer_is_below_the_truth():
    found, rounds = searched(1 << 20, 777_777)
    assert len(rounds) == 3
    assert 777_777 - (1 << 8) <= found <= 777_777


def test_of_a_prefix_with_a_hole_nothing_is_found_behind_it():
    async def ask(places):
        return [place not in (5, 6) for place in places]

    assert asyncio.run(search(16, ask)) == 5


def test_what_was_missing_is_not_asked_for_until_its_time_is_over():
    clock = Clock()
    one = Probe(clock)
    assert one.due(b"a")
    one.missing(b"a")
    assert not one.due(b"a")
    assert one.due(b"b")
    clock.now += 4.9
    assert not one.due(b"a")
    clock.now = 105.0
    assert one.due(b"a")


def test_what_is_missing_again_is_remembered_for_longest(monkeypatch):
    monkeypatch.setattr(probe, "_REMEMBERED", 3)
    clock = Clock()
    one = Probe(clock)
    for name in (b"a", b"b", b"c"):
        one.missing(name)
    one.missing(b"b")  # it is the newest now, and nothing had to go for it
    assert not any(one.due(name) for name in (b"a", b"b", b"c"))
    one.missing(b"a")
    one.missing(b"d")
    assert [one.due(name) for name in (b"a", b"b", b"c", b"d")] == [False, False, True, False]


def test_the_memory_of_what_was_missing_is_bounded(monkeypatch):
    monkeypatch.setattr(probe, "_REMEMBERED", 3)
    one = Probe(Clock())
    for number in range(10):
        one.missing(bytes([number]))
        assert len(one._absent) == min(number + 1, 3)
