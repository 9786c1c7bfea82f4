"""What takes its time at the daemon: requests whose answers come when they are there."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier.clock import monotonic
from kvtier.daemon.answers import Progress, Resend
from kvtier.daemon.frames import encode
from kvtier.daemon.messages import Message
from kvtier.daemon.wire import Wire
from kvtier.seams import Future

_UNSENT_BYTES: Final = 64 << 20


@dataclass(slots=True)
class Request:
    """A message whose answer somebody waits for.

    until: after that it counts as not answered. done: makes the result of the answer, of None
    where none came; late: takes an answer back that came after that. whole: puts all keys of its
    prompt into the message.
    """

    message: Message
    until: float
    done: Callable[[Message | None], Any]
    late: Callable[[Message], None] | None = None
    whole: Callable[[], None] | None = None
    progress: Callable[[int], None] | None = None
    future: Future[Any] = field(default_factory=Future)


class Waits:
    """The second connection of a session. Requests come from any thread, `turn` from one."""

    def __init__(self, wire: Wire, poke: Callable[[], None]) -> None:
        self.wire = wire
        self._poke = poke
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: dict[int, Request] = {}
        self._overdue: dict[int, Request] = {}
        self._closed = False

    def begin(self, request: Request) -> Future[Any]:
        """Send a request; its future always comes to an end. Never blocks."""
        request.future.set_running_or_notify_cancel()
        with self._lock:
            if not self._closed and len(self.wire.unsent) < _UNSENT_BYTES:
                self._number += 1
                self._waiting[self._number] = request
                with contextlib.suppress(OSError):  # the reading side notices, and ends it
                    self.wire.put(encode(request.message, self._number), 0.0)
                self._poke()  # its time counts, too
                return request.future
        _end(request, None)
        return request.future

    @property
    def events(self) -> int:
        """What to poll the wire for."""
        return select.POLLIN | (select.POLLOUT if self.wire.unsent else 0)

    def milliseconds(self) -> float | None:
        """Return how long to poll at most."""
        with self._lock:
            times = [request.until for request in self._waiting.values()]
        return max(min(times) - monotonic(), 0.0) * 1e3 if times else None

    def turn(self) -> None:
        """Take what has arrived, end what is overdue, send what is left. Does not block.

        Raises ConnectionError and ProtocolError.
        """
        while (found := self.wire.take(0.0)) is not None:
            self._take(*found)
        now = monotonic()
        with self._lock:
            if self.wire.unsent:
                self.wire.put(b"", 0.0)
            overdue = [number for number, one in self._waiting.items() if one.until <= now]
            for number in overdue:
                self._overdue[number] = self._waiting.pop(number)
        for number in overdue:
            _end(self._overdue[number], None)

    def _take(self, number: int, reply: Message) -> None:
        request = self._waiting.get(number)
        if request is None:
            late = self._overdue.pop(number, None)
            if late is not None and late.late is not None:
                late.late(reply)
        elif isinstance(reply, Progress):
            self._tell(request, number, reply.parts)
        elif isinstance(reply, Resend) and request.whole is not None:
            request.whole()
            with self._lock:
                self.wire.put(encode(request.message, number), 0.0)
        else:
            with self._lock:
                self._waiting.pop(number)
            _end(request, reply)

    def _tell(self, request: Request, number: int, parts: int) -> None:
        """Tell of progress; who fails at it hears that, and waits no more."""
        if request.progress is None:
            return
        try:
            request.progress(parts)
        except Exception as error:  # noqa: BLE001  (the caller's own; others wait here, too)
            with self._lock:
                self._waiting.pop(number)
            request.future.set_exception(error)

    def close(self) -> None:
        """Give the descriptor back, and end all that waits. Idempotent."""
        with self._lock:
            self._closed = True
            left = list(self._waiting.values())
            self._waiting.clear()
            self.wire.close()
        for request in left:
            _end(request, None)


def _end(request: Request, reply: Message | None) -> None:
    """Tell who waits; what goes wrong there is theirs to hear, and nobody else's."""
    try:
        result = request.done(reply)
    except Exception as error:  # noqa: BLE001  (handed to whoever waits)
        request.future.set_exception(error)
    else:
        request.future.set_result(result)
