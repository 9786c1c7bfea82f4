"""What a daemon says of itself to whoever may connect: no namespace, no arena, one question each.

It is how an operator's tools look at a daemon. They count as a session while they ask.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from kvtier.daemon.answers import Answer, Failed, Healthy, Welcome
from kvtier.daemon.frames import encode
from kvtier.daemon.messages import Bye, Figures, Health, Hello, Message
from kvtier.daemon.place import check_own
from kvtier.daemon.wire import Wire, connect, failure, wait_for_daemon
from kvtier.errors import ConfigError
from kvtier.seams import drawn

_SESSION_BYTES: Final = 16


class Status(NamedTuple):
    """generation: counts the starts of its server. troubles: why, by tier that is not served.

    figures: all metrics, as ``Cache.figures`` has them.
    """

    generation: int
    arena_bytes: int
    tiers: tuple[str, ...]
    troubles: dict[str, str]
    figures: dict[str, float]


def ask_status(path: str, timeout: float) -> Status:
    """Ask the daemon at a socket. Blocks, `timeout` seconds at most.

    Raises ConfigError where none answers, or it is another user's, and ProtocolError for one of
    another version.
    """
    found: list[Status] = []

    def come_up(until: float) -> None:
        check_own(path)
        hello = Hello(drawn(_SESSION_BYTES), "", "scheduler")
        wire, welcome, arena = connect(path, hello, until)
        os.close(arena)
        try:
            found.append(_asked(wire, welcome, until))
        finally:
            wire.close()

    wait_for_daemon(path, come_up, timeout)
    return found[0]


def _asked(wire: Wire, welcome: Welcome, until: float) -> Status:
    health = _answer(wire, Health(), 2, until)
    figures = _answer(wire, Figures(), 3, until)
    wire.put(encode(Bye()), until)
    if not isinstance(health, Healthy) or not isinstance(figures, Answer):
        raise ConfigError("what listens there answers as no daemon does")
    return Status(
        welcome.generation, welcome.nbytes, welcome.tiers, health.troubles, figures.figures
    )


def _answer(wire: Wire, message: Message, number: int, until: float) -> Message:
    """Ask, and return the answer. Raises OSError where none comes in time, and what it refuses."""
    wire.put(encode(message, number), until)
    while (found := wire.take(until)) is not None:
        if found[0] == number:
            if isinstance(found[1], Failed):
                raise failure(found[1])
            return found[1]
    raise TimeoutError("the daemon does not answer")
