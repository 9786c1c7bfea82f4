"""Probing a shared tier: how far it goes is found in few look-ups; what it lacks is remembered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvtier.catalog import probe
from kvtier.catalog.probe import Probe, ends, rounds, search
from kvtier.identity.geometry import Component, Geometry, Needs
from kvtier.identity.shape import Shape, chunk_shape
from kvtier.testing.hands import Hands
from kvtier.tiers.pack import Run, cut


def searched(count: int, there: int) -> tuple[int, list[list[int]]]:
    """Search `count` positions of which the first `there` are present; return what was asked."""
    end, _, rounds = looked_up(0, count, 0, lambda run: run.stop <= there)
    return end, [[run.start for run in asked] for asked in rounds]


def looked_up(
    first: int, stop: int, order: int, there: Callable[[Run], bool]
) -> tuple[int, list[Run], list[list[Run]]]:
    """Search for runs; return how far they go, the packs, and what was asked in each round."""
    rounds: list[list[Run]] = []

    async def ask(runs):
        rounds.append(list(runs))
        return [there(run) for run in runs]

    return *asyncio.run(search(first, stop, order, ask)), rounds


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


@pytest.mark.parametrize("order", range(8))
@pytest.mark.parametrize(("first", "stop"), [(0, 512), (100, 150), (0, 50), (128, 600), (7, 9)])
def test_where_nothing_is_one_round_tells(first, stop, order):
    end, _, rounds = looked_up(first, stop, order, lambda _: False)
    assert (end, len(rounds)) == (first, 1)


def test_nothing_is_asked_twice():
    for there in range(0, 4097, 97):
        asked = [place for places in searched(4096, there)[1] for place in places]
        assert len(asked) == len(set(asked))


def test_beyond_three_rounds_the_answer_is_below_the_truth():
    found, rounds = searched(1 << 20, 777_777)
    assert len(rounds) == 3
    assert 777_777 - (1 << 8) <= found <= 777_777


def test_of_a_prefix_with_a_hole_nothing_is_found_behind_it():
    assert looked_up(0, 16, 0, lambda run: run.start not in (5, 6))[0] == 5


@pytest.mark.parametrize(("order", "short"), [(7, 7), (5, 3), (4, 1), (3, 0), (2, 0)])
def test_where_runs_are_packed_little_is_missed_and_nothing_is_made_up(order, short):
    for there in range(0, 513, 3):
        written = set(cut(0, there, order))
        end, packs, rounds = looked_up(0, 512, order, written.__contains__)
        assert set(packs) <= written
        assert there - short <= end <= there
        assert len(rounds) <= 3
        assert all(len(asked) <= 16 for asked in rounds)
        assert any(0 in range(run.start, run.stop) for run in rounds[0]), "the root among them"


def test_a_run_that_begins_before_what_is_known_is_found():
    assert looked_up(5, 130, 7, {Run(0, 7)}.__contains__)[:2] == (128, [Run(0, 7)])


def test_runs_of_one_prompt_written_little_by_little_are_found_by_and_by():
    written = [run for a, b in ((0, 8), (8, 48), (48, 100), (100, 101)) for run in cut(a, b, 7)]
    known = 0
    for _ in range(3):
        known, _, _ = looked_up(known, 128, 7, set(written).__contains__)
    assert known == 101


def component(needs: Needs, number: int, window: int = 0) -> Component:
    return Component(1, 8, 8, name=f"{needs.value}-{number}", needs=needs, window=window)


def shape_of(windows: tuple[int, ...], states: int, shards: int = 1) -> Shape:
    kinds = [component(Needs.ALL, 0)]
    kinds += [component(Needs.TRAILING, at, window) for at, window in enumerate(windows)]
    kinds += [component(Needs.LAST, at) for at in range(states)]
    return chunk_shape(Geometry(tuple(kinds), block_tokens=(16,), chunk_tokens=256), shards)


SHAPES = [((1024,), 0), ((1024,), 1), ((), 1), ((128, 1 << 17), 2), ((1,) * 20, 20), ((), 40)]


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize(("windows", "states"), SHAPES)
@pytest.mark.parametrize("stop", [1, 2, 9, 512])
def test_windows_and_states_take_sixteen_look_ups_however_many_ranks(windows, states, shards, stop):
    shape = shape_of(windows, states, shards)
    wanted = ends(shape, stop)
    assert 1 <= sum(len(one.chunks) for one in wanted) <= 16
    assert sum(rounds(shape, 1)) == sum(rounds(shape, 2)) == 2, "and there are two rounds besides"
    for one in wanted:
        assert len(one.places) == shards
        assert one.chunks == tuple(sorted(set(one.chunks)))
        assert one.chunks[-1] == stop - 1
        assert one.chunks[0] >= 0


def test_a_window_is_looked_for_as_far_back_as_it_reaches_from_wherever_a_state_may_be():
    window, state = ends(shape_of((1024,), 1), 512)
    assert state.chunks == tuple(range(500, 512))
    assert (len(window.chunks), window.chunks[0]) == (4, 500 - 1024 // 256)
    assert window.there(dict.fromkeys(window.chunks, True)) == list(range(496, 512))
    answers = dict(zip(window.chunks, (True, True, False, True), strict=True))
    assert window.there(answers) == [*range(496, 502), 511]
    assert state.there({at: at in (503, 510) for at in state.chunks}) == [503, 510]


def test_models_without_windows_and_states_have_three_rounds():
    shape = shape_of((), 0)
    assert ends(shape, 512) == []
    assert [list(rounds(shape, grids)) for grids in (1, 2, 3)] == [[3], [2, 1], [1, 1, 1]]


def test_what_was_missing_is_not_asked_for_until_its_time_is_over():
    clock = Hands()
    one = Probe(clock)
    assert one.due(b"a")
    one.missing(b"a")
    assert not one.due(b"a")
    assert one.due(b"b")
    clock.now += 4.9
    assert not one.due(b"a")
    clock.now = 105.0
    assert one.due(b"a")


def test_of_what_was_missing_it_is_remembered_who_could_not_be_asked():
    clock = Hands()
    one = Probe(clock)
    assert one.asked(b"a") is None
    one.missing(b"a", [1], [2])
    clock.now += 2
    assert one.asked(b"a") == (2.0, probe.Missed(clock.now + 3, (1,), (2,)))


def test_what_is_missing_again_is_remembered_for_longest(monkeypatch):
    monkeypatch.setattr(probe, "_REMEMBERED", 3)
    clock = Hands()
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
    one = Probe(Hands())
    for number in range(10):
        one.missing(bytes([number]))
        assert len(one._absent) == min(number + 1, 3)
