"""Until when whoever asked for a batch of a Store's calls waits for it.

A Tier says it for the thread that works on the batch, and a Store asks for it by ``current``: so
the verbs are the same for a Store that has no use for it. What is submitted to an IoPool has the
Deadline of whoever submits it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator


class Deadline:
    """A moment of the monotonic clock, in seconds. Safe from any thread.

    until: it may be put off while a call runs, when another waits for the same bytes for longer;
    so it is looked at again at each step. It never comes nearer.
    """

    __slots__ = ("until",)

    def __init__(self, until: float = math.inf) -> None:
        self.until = until

    def extend(self, until: float) -> None:
        """Put it off, unless it is later already. By one thread at a time."""
        self.until = max(self.until, until)

    def left(self, now: float) -> float:
        """Return the seconds that are left; zero or less when it is over."""
        return self.until - now


NEVER = Deadline()


class _Calling(threading.local):
    deadline = NEVER


_calling = _Calling()


def current() -> Deadline:
    """Return the Deadline of the batch that this thread works on; one that never comes if none."""
    return _calling.deadline


@contextlib.contextmanager
def under(deadline: Deadline) -> Iterator[None]:
    """Work on a batch with that Deadline, on this thread, until the end of the block."""
    before, _calling.deadline = _calling.deadline, deadline
    try:
        yield
    finally:
        _calling.deadline = before
