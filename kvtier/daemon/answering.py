"""What the server's loop hands messages to, and how it says no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, Protocol, TypeVar

from kvtier.daemon.answers import Failed
from kvtier.daemon.frames import encode
from kvtier.daemon.messages import Hello, Message
from kvtier.daemon.process import Process
from kvtier.errors import ConfigError, KvtierError, NamespaceMismatch, ProtocolError

S = TypeVar("S")

_SAID: Final = 4096  # characters of an error


class Answering(Protocol[S]):
    """What the server hands messages to: ``sessions.Sessions``. Called by the loop's thread."""

    def hello(self, hello: Hello, process: Process) -> S:
        """Begin a session, or add a connection to it. Raises ProtocolError and ConfigError."""
        ...

    def first_plan(self, session: S) -> int:
        """Return from which plan on a client may copy."""
        ...

    def handle(self, session: S, message: Message, reply: Callable[[Message], None]) -> None:
        """Deal with a message; reply any number of times, now or later, from any thread."""
        ...

    def closed(self, session: S) -> None:
        """One of the session's connections has ended."""
        ...

    def died(self, process: Process) -> None:
        """A process that said Hello has ended."""
        ...

    def tick(self) -> None:
        """Four times a second."""
        ...

    def rest(self) -> bool:
        """Do a piece of what was put off, while nobody asks; say whether there is more."""
        ...


def failed(error: KvtierError, number: int) -> bytes:
    """Return the frame that says an error of kvtier's."""
    name: Literal["ConfigError", "MisuseError", "NamespaceMismatch", "ProtocolError"]
    match error:
        case ConfigError():
            name = "ConfigError"
        case ProtocolError():
            name = "ProtocolError"
        case NamespaceMismatch():
            name = "NamespaceMismatch"
        case _:
            name = "MisuseError"
    return encode(Failed(name, str(error)[:_SAID]), number)
