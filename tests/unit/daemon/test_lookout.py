"""The lookout: it looks for a moment before it sleeps, and only where something has come."""

from __future__ import annotations

import os

import pytest

from kvtier.daemon.lookout import Hope, Lookout


class Watched:
    """A lookout whose clock stands still but for `step` at each look, and one bell."""

    def __init__(self) -> None:
        self.now = self.step = 0.0
        self.looks = 0
        self.put_off: list[int] = []
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.lookout = Lookout(self.clock, self.rest)
        self.lookout.add(self.bell)

    def clock(self) -> float:
        self.looks += 1
        self.now += self.step
        if self.looks > 100:
            raise AssertionError("it looks for ever")
        return self.now

    def rest(self) -> bool:
        self.put_off.pop()
        return bool(self.put_off)

    def stir(self) -> None:
        """Let something come, and take it."""
        os.eventfd_write(self.bell, 1)
        assert [number for number, _ in self.lookout.wait(9)] == [self.bell]
        os.eventfd_read(self.bell)
        self.looks = 0


@pytest.fixture
def watched():
    one = Watched()
    yield one
    one.lookout.close()
    os.close(one.bell)


def test_where_nothing_came_it_sleeps_at_once(watched):
    assert watched.lookout.wait(0.001) == []
    assert watched.lookout.wait(0.001) == []
    assert not watched.looks


def test_once_something_came_it_looks_for_a_moment_and_then_sleeps(watched):
    watched.put_off, watched.step = [1], 0.00003
    watched.stir()
    assert watched.lookout.wait(0.001) == []
    assert watched.looks == 5  # four steps take longer than a tenth of a millisecond
    assert watched.lookout.wait(0.001) == []
    assert watched.looks == 5


def test_what_was_put_off_is_done_piece_by_piece_where_nothing_comes(watched):
    watched.put_off, watched.step = [1, 2, 3], 1.0
    watched.stir()
    assert watched.lookout.wait(0.001) == []
    assert not watched.put_off


def test_what_was_put_off_waits_while_something_comes(watched):
    watched.put_off, watched.step = [1, 2, 3], 1.0
    watched.stir()
    rest = watched.rest

    def rings() -> bool:
        os.eventfd_write(watched.bell, 1)
        return rest()

    watched.lookout._rest = rings
    assert [number for number, _ in watched.lookout.wait(9)] == [watched.bell]
    assert watched.put_off == [1, 2]


def test_it_hardly_looks_where_most_looks_are_in_vain(watched):
    watched.lookout._rest, watched.step = bool, 1.0
    for _ in range(9):
        watched.stir()
        assert watched.lookout.wait(0.001) == []
    watched.step = 0.00003
    counts = []
    for _ in range(17):
        watched.stir()
        assert watched.lookout.wait(0.001) == []
        counts.append(watched.looks)
    assert counts == [2] * 16 + [5]


def test_hope_comes_back_with_what_is_found():
    hope = Hope()
    for _ in range(9):
        assert hope.look()
        hope.tell(found=False)
    assert [hope.look() for _ in range(17)] == [False] * 16 + [True]
    hope.tell(found=True)
    for found in (False, False, False, True) * 50:
        assert hope.look()
        hope.tell(found=found)


def test_it_does_not_look_where_it_is_not_to_wait(watched):
    watched.put_off = [1]
    watched.stir()
    assert watched.lookout.wait(0) == []
    assert not watched.looks
    assert watched.put_off
