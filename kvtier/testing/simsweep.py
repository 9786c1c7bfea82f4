"""A sweep: each request of one client of a schedule, cancelled at each of its awaits in turn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from kvtier.testing.simconditions import PHASES
from kvtier.testing.simloop import SimLoop
from kvtier.testing.simschedule import Schedule, live
from kvtier.testing.simworld import World


def swept(schedule: Schedule) -> Iterator[Schedule]:
    """Yield the schedule with a cancellation before, and after, each step of each request.

    Of one client, which the seed chooses. Nothing else is cancelled, so that the run is the same
    up to there.
    """
    calm = replace(schedule, without=tuple(dict.fromkeys((*schedule.without, "cancels"))))
    recorder = _Loops()
    live(calm, recorder)
    steps: dict[str, int] = {}
    for loop in recorder.loops:
        for name, count in loop.task_steps.items():
            if name.startswith("request-"):
                steps[name] = max(count, steps.get(name, 0))
    clients = list(dict.fromkeys(name.partition(".")[0] for name in steps))
    client = random.Random(f"{schedule.seed}/sweep").choice(clients) if clients else ""
    for name, count in steps.items():
        if name.partition(".")[0] == client:
            for step in range(1, count + 1):
                for phase in PHASES:
                    yield replace(calm, cancel=(name, step, phase))


class _Loops:
    """Keeps the loops of a schedule's lives."""

    def __init__(self) -> None:
        self.loops: list[SimLoop] = []

    def attach(self, world: World) -> None:
        """Take the loop of a world."""
        self.loops.append(world.loop)

    def event(self, name: str) -> None:
        """See Recorder."""
