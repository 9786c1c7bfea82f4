"""One schedule as a value: its world, how it ends, and the command that runs it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Protocol

from kvtier.errors import ConfigError, check_known
from kvtier.testing.bounded import Endless, bounded
from kvtier.testing.mutations import removed
from kvtier.testing.simconditions import Cancel
from kvtier.testing.simevents import Events
from kvtier.testing.simscenario import TROUBLES, Scenario
from kvtier.testing.simtask import Deadlock, Leak, Livelock
from kvtier.testing.simworld import World, run_world

KINDS: Final = ("violation", "deadlock", "leak")
"""How a schedule may fail."""

_MUTANT_SECONDS: Final = 5.0  # without a guard a schedule may never end; others take 0.1 at most
_ADDRESS: Final = re.compile(r"0x[0-9a-f]+")
_NUMBER: Final = re.compile(r"\b[0-9a-f]{8}\b|-?\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A seed, and how much of its world is kept.

    ops: calls on the cache after which no request begins; None for what the seed draws. only:
    numbers of the clients that take part; empty for all. without: of TROUBLES. shuffle: not 0, the
    same world in another order. cancel: see Conditions.cancel_at. mutation: the guard that is
    taken away.
    """

    seed: int
    ops: int | None = None
    only: tuple[int, ...] = ()
    without: tuple[str, ...] = ()
    shuffle: int = 0
    cancel: Cancel | None = None
    mutation: str | None = None

    def scenario(self) -> Scenario:
        """Return its world. Raises ConfigError for a trouble or a client that there is not."""
        drawn = Scenario.draw(self.seed)
        drawn = replace(drawn, ops=self.ops, only=self.only, shuffle=self.shuffle)
        drawn = replace(drawn, cancel_at=self.cancel)
        check_known("trouble", self.without, TROUBLES)
        for what in self.without:
            drawn = drawn.without(what)
        if strangers := [number for number in self.only if not 0 <= number < drawn.clients]:
            raise ConfigError(
                f"seed {self.seed} has clients 0 to {drawn.clients - 1}, not {strangers[0]}"
            )
        return drawn

    def command(self) -> str:
        """Return the command that runs it again."""
        words = [f"kvtier sim --seed {self.seed} --schedules 1"]
        if self.ops is not None:
            words.append(f"--ops {self.ops}")
        if self.only:
            words.append(f"--only {','.join(map(str, self.only))}")
        if self.without:
            words.append(f"--without {','.join(self.without)}")
        if self.shuffle:
            words.append(f"--shuffle {self.shuffle}")
        if self.cancel is not None:
            words.append(f"--cancel {':'.join(map(str, self.cancel))}")
        if self.mutation is not None:
            words.append(f"--mutate {self.mutation}")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a schedule ended. kind: of KINDS, or empty when it ended well. ops: calls made."""

    kind: str
    message: str
    steps: int
    ops: int
    digest: str
    events: dict[str, int]

    def same(self, other: Outcome) -> bool:
        """Say whether both failed in the same way, whatever numbers and names enter."""
        one, two = (_NUMBER.sub("#", out.message.partition("\n")[0]) for out in (self, other))
        return bool(self.kind) and self.kind == other.kind and one == two


class Recorder(Protocol):
    """What writes down how a schedule goes."""

    def attach(self, world: World) -> None:
        """Look at a world in which nothing has happened."""

    def event(self, name: str) -> None:
        """Take an event of EVENTS that happens now."""


def live(schedule: Schedule, recorder: Recorder | None = None) -> Outcome:
    """Run a schedule to its end, and say how it ended."""
    worlds: list[tuple[World, Events]] = []

    def watch(world: World) -> None:
        tell = recorder.event if recorder is not None else _ignore
        worlds.append((world, Events(world.cache, tell)))
        if recorder is not None:
            recorder.attach(world)

    kind = message = ""
    scenario, whole = schedule.scenario(), schedule.mutation is None
    bound = contextlib.nullcontext() if whole else bounded(_MUTANT_SECONDS)
    with removed(schedule.mutation), _silence():
        try:
            with bound:
                run_world(schedule.seed, scenario, watch=watch)
        except (Exception, asyncio.CancelledError, Endless) as error:
            if whole and not worlds:  # it was not the world that failed
                raise
            kind, message = _kind(error), _ADDRESS.sub("0x", f"{type(error).__name__}: {error}")
    if not worlds:
        return Outcome(kind, message, 0, 0, "", {})
    counts: Counter[str] = Counter()
    for world, events in worlds:
        events.finish(cancelled=len(world.loop.cancelled), abandoned=world.abandoned)
        counts.update(events.counts)
        if world.left is not None:
            counts.update(world.left.counts)
    steps, last = sum(world.loop.steps for world, _ in worlds), worlds[-1][0]
    return Outcome(kind, message, steps, last.calls, last.loop.digest, dict(counts))


def _kind(error: BaseException) -> str:
    if isinstance(error, Leak):
        return "leak"
    return "deadlock" if isinstance(error, Deadlock | Livelock | Endless) else "violation"


def _ignore(name: str) -> None:
    del name


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep the core from warning about tiers that fail on purpose."""
    log = logging.getLogger("kvtier")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)
