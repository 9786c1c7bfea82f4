"""A session with a daemon while it holds: its connections, and what its handles are good for."""

from __future__ import annotations

import contextlib
import os
import select
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from kvtier.clock import monotonic
from kvtier.daemon.answers import Failed, Joined, Welcome
from kvtier.daemon.frames import encode
from kvtier.daemon.messages import Bye, Hello, Message, Prompt, Resume
from kvtier.daemon.waits import Waits
from kvtier.daemon.wire import Wire, connect
from kvtier.errors import KvtierError
from kvtier.prefix import Prefix

_STAND_DOWN: Final = 0.2  # seconds
_TOLD: Final = 128  # prompts whose keys the daemon surely remembers


class Era(NamedTuple):
    """A daemon's life on one arena: plans of another one are not its own."""

    arena: int
    generation: int


class Seat(Protocol):
    """A desk as the link knows it. joining: how it is asked for."""

    joining: Message

    def returning(self) -> Iterator[Message]:
        """Yield what makes a daemon know it that has forgotten it, beginning with `joining`."""
        ...


@dataclass(slots=True)
class Ask:
    """How to ask.

    prefix: of the prompt that the message names. within: seconds, by default the link's patience.
    only: ask while that session holds. note: called with the answer before anybody else has a
    turn. late: called with one that came too late; returns the message that takes it back.
    """

    prefix: Prefix | None = None
    within: float | None = None
    only: Up | None = None
    note: Callable[[Up, Any], None] | None = None
    late: Callable[[Up, Any], Message | None] | None = None


class Up:
    """See the module. desks: their numbers there, by seat. owed: requests not answered in time.

    What is not said to be safe is for whoever has the turn on the first connection.
    """

    def __init__(self, calls: Wire, waits: Waits, welcome: Welcome) -> None:
        self.calls = calls
        self.waits = waits
        self.era = Era(welcome.arena, welcome.generation)
        self.tiers = welcome.tiers
        self.desks: dict[Seat, int] = {}
        self.owed: dict[int, tuple[Seat, Ask]] = {}
        self.silent_since = 0.0
        self._told: OrderedDict[bytes, None] = OrderedDict()
        self._number = 0

    def number(self) -> int:
        """Return the number of the next request on the first connection."""
        self._number += 1
        return self._number

    @property
    def events(self) -> int:
        """What to poll the first connection for, when nobody has the turn."""
        return (select.POLLIN if self.owed else 0) | (select.POLLOUT if self.calls.unsent else 0)

    def address(self, seat: Seat, message: Any) -> bool:
        """Name the desk in a message that has one; False for a desk that did not join."""
        if "desk" in message.__struct_fields__:
            number = self.desks.get(seat)
            if number is None:
                return False
            message.desk = number
        return True

    def name(self, message: Any, prefix: Prefix, *, whole: bool = False) -> None:
        """Name the prompt in a message; whole: by all its keys. Safe from any thread."""
        keys = prefix.keys
        last = keys[-1] if keys else b""
        known = not whole and last in self._told
        message.prompt = Prompt(
            len(prefix.tokens), len(keys), last, b"" if known else b"".join(keys)
        )

    def told(self, message: Any) -> None:
        """Note that the daemon has a message's keys."""
        if message.prompt.keys:
            self._told[message.prompt.last] = None
            if len(self._told) > _TOLD:
                self._told.popitem(last=False)

    def rejoin(self, seat: Seat, seconds: float) -> str:
        """Let a desk join again; return why it may not, or nothing. Raises OSError."""
        for message in seat.returning():
            number, until = self.number(), monotonic() + seconds
            if self.address(seat, message):
                self.calls.put(encode(message, number), until)
            reply: Message | None = None
            while reply is None and (found := self.calls.take(until)) is not None:
                reply = found[1] if found[0] == number else None
            if reply is None:
                raise TimeoutError("the daemon does not answer")
            if isinstance(reply, Failed):
                return reply.text
            if isinstance(reply, Joined):
                self.desks[seat] = reply.desk
        return ""

    def end(self) -> None:
        """End both connections; their descriptors stay. Safe from any thread."""
        self.calls.end()
        self.waits.wire.end()


def resuming(out: Iterable[tuple[Era, int]]) -> Resume:
    """Return what says which plans of a session are out, and that nothing else of it stands."""
    return Resume(np.array([plan for _, plan in list(out)], "<u8").tobytes())


def stand_down(path: str, hello: Hello, out: Iterable[tuple[Era, int]]) -> None:
    """Say so once more for a session that has ended, so that its slots do not stay out for ever.

    Waits a moment at most; a daemon that is gone needs no word.
    """
    with contextlib.suppress(OSError, KvtierError):
        wire, _, arena = connect(path, hello, monotonic() + _STAND_DOWN)
        os.close(arena)
        try:
            wire.put(encode(resuming(out)) + encode(Bye()), monotonic() + _STAND_DOWN)
        finally:
            wire.close()
