"""Writers that die at one of their steps, and what they were told before: for tests of a Store."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import Final

from kvtier.tiers.store import Status, Store, Write

GONE: Final = -1
"""Stands for the version of what is not there."""


class Steps:
    """Counts steps, and kills the process at one of them; at none for 0."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self) -> None:
        """Take one."""
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def write_and_delete(
    store: Store,
    log: int,
    turns: Iterable[tuple[int, int]],
    record_of: Callable[[int, int], Write],
) -> None:
    """Write versions of names; where there is no room, delete what was written first.

    log: a descriptor that gets each intention (small letter) and each OK (capital). turns: number
    of a name, and version. Raises SystemExit where a record is not written.
    """
    there: list[int] = []
    for number, version in turns:
        record = record_of(number, version)
        os.write(log, b"w %d %d\n" % (number, version))
        (status,) = store.write_many([record])
        while status is Status.FULL and there:
            victim = there.pop(0)
            os.write(log, b"d %d %d\n" % (victim, GONE))
            if store.delete_many([record_of(victim, 0).header.id]) == [Status.OK]:
                os.write(log, b"D %d %d\n" % (victim, GONE))
            (status,) = store.write_many([record])
        if status is not Status.OK:
            raise SystemExit(f"a record was not written: {status}")
        os.write(log, b"W %d %d\n" % (number, version))
        there = [other for other in there if other != number] + [number]


def promised(log: str, names: int) -> dict[int, set[int]]:
    """Return for each name the versions that may be there, by a log of ``write_and_delete``.

    An acknowledged change leaves one; an intention that was not acknowledged adds another.
    """
    allowed: dict[int, set[int]] = {number: {GONE} for number in range(names)}
    for line in log.splitlines():
        verb, number, version = line.split()
        if verb in "WD":
            allowed[int(number)] = {int(version)}
        else:
            allowed[int(number)] |= {int(version)}
    return allowed


def die_at_each(work: Callable[[int], object], every: int) -> None:
    """Let a fork of this process die at its first step, the next at `every` more, until one ends.

    work: is told at which. Raises SystemExit for one that dies otherwise.
    """
    at = 1
    while True:
        child = os.fork()
        if child == 0:
            work(at)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        if os.WTERMSIG(status) != signal.SIGKILL:
            raise SystemExit(f"the writer of step {at} died otherwise: {status}")
        at += every
