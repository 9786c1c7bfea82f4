"""What happened in a schedule, line by line, and the shortest schedule that still fails."""

from __future__ import annotations

from asyncio import tasks
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic
from typing import Any, Final

from kvtier.testing.faults import FaultyStore
from kvtier.testing.simscenario import TROUBLES
from kvtier.testing.simschedule import Outcome, Schedule, live
from kvtier.testing.simworld import World

_RUNS: Final = 400
_SHUFFLES: Final = 4
_SECONDS: Final = 30.0  # a schedule that spends its whole budget of steps takes one or two
_FREQUENT: Final = ("eviction_refused_for_hold", "eviction_refused_for_child")
_UNSAID: Final = ("step", "call", "effect", "figures", "store")
_CALLS: Final = ("contains_many", "read_many", "write_many", "delete_many")


def history(schedule: Schedule) -> tuple[Outcome, list[str]]:
    """Run a schedule, and return how it ended and what happened, one line each."""
    recorder = _Lines()
    outcome = live(schedule, recorder)
    return outcome, recorder.lines


def shorten(schedule: Schedule, failed: Outcome) -> Schedule:
    """Return the shortest schedule that was found to fail in the same way.

    It leaves out calls, clients and kinds of trouble, each in a few orders, for as long as that
    still fails: 400 runs and 30 seconds at most.
    """
    until = monotonic() + _SECONDS
    tried: set[Schedule] = set()
    best, progress = schedule, True
    while progress:
        progress = False
        shorts = (one for less in _shorter(best, failed) for one in _shuffled(less))
        for shorter in shorts:
            if shorter in tried:
                continue
            if len(tried) >= _RUNS or monotonic() > until:
                return best
            tried.add(shorter)
            outcome = live(shorter)
            if failed.same(outcome):
                best, failed, progress = shorter, outcome, True
                break
    return best


def _shorter(schedule: Schedule, failed: Outcome) -> Iterator[Schedule]:
    """Yield schedules that have less in them, those with least first."""
    world = schedule.scenario()
    ops = failed.ops
    for fewer in sorted({1, ops // 4, ops // 2, ops * 3 // 4, ops - 1}):
        if 0 < fewer < ops:
            yield replace(schedule, ops=fewer)
    kept = world.kept_clients
    half = len(kept) // 2
    groups = [kept[:half], kept[half:]] if half > 1 else []
    groups += [[one for one in kept if one != left_out] for left_out in kept]
    for group in groups:
        if group:
            yield replace(schedule, only=tuple(group))
    for what in TROUBLES:
        if what not in schedule.without and world.without(what) != world:
            yield replace(schedule, without=(*schedule.without, what))


def _shuffled(schedule: Schedule) -> Iterator[Schedule]:
    """Yield a schedule as it is, then in a few other orders."""
    for shuffle in dict.fromkeys((schedule.shuffle, *range(1, _SHUFFLES))):
        yield replace(schedule, shuffle=shuffle)


class _Lines:
    """Writes down calls on the cache, calls of stores with their answers, and events."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._loop: Any = None

    def attach(self, world: World) -> None:
        """Look at a world in which nothing has happened."""
        self._loop = world.loop
        note = world.loop.note

        def noted(kind: str, what: str = "") -> None:
            note(kind, what)
            if kind not in _UNSAID:
                self._say(f"{kind} {what}" if kind in ("cancel", "read") else kind)

        world.loop.note = noted  # type: ignore[method-assign]
        for number, store in enumerate(world.stores, 1):
            for name in _CALLS:
                self._watch(store, f"tier {number}", name)

    def event(self, name: str) -> None:
        """Take an event of EVENTS that happens now."""
        if name not in _FREQUENT:
            self._say(f"  {name.replace('_', ' ')}")

    def _watch(self, store: FaultyStore, tier: str, name: str) -> None:
        call: Callable[..., list[Any]] = getattr(store, name)
        verb = name.partition("_")[0]

        def watched(records: Any, *args: Any) -> list[Any]:
            try:
                answers = call(records, *args)
            except Exception as error:
                self._say(f"{tier}: {verb} {len(records)}: {type(error).__name__}")
                raise
            counts = Counter(getattr(one, "status", one).name.lower() for one in answers)
            said = ", ".join(f"{count} {status}" for status, count in counts.items())
            self._say(f"{tier}: {verb} {len(records)}: {said}")
            return answers

        setattr(store, name, watched)

    def _say(self, what: str) -> None:
        task = tasks.current_task(self._loop)
        name = task.get_name() if task is not None else "-"
        self.lines.append(f"{self._loop.time():12.6f}  {name:<14.14}  {what}")
