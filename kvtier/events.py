"""What an operator is told: one line a cause, at most once in ten seconds.

What a thread had to say is kept, too, whether it was logged or not: a Tier asks for it when a call
of its Store has failed.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from kvtier.clock import Clock

_QUIET_SECONDS: Final = 10.0
_MAX_CAUSES: Final = 256
_COUNTED_CAUSES: Final = 64
_log = logging.getLogger("kvtier")
_noted = threading.local()


def note(cause: str) -> None:
    """Keep what this thread has to say."""
    _noted.text = cause


def noted() -> str:
    """Return what this thread had to say last, once; nothing if that was nothing."""
    text: str = getattr(_noted, "text", "")
    _noted.text = ""
    return text


class Causes:
    """Counts what went wrong, by a few words of cause. Thread-safe; bounded."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._counts: dict[str, int] = {}

    def note(self, cause: str) -> None:
        """Count one; the 65th cause and all further ones as "other"."""
        with self._guard:
            if cause not in self._counts and len(self._counts) >= _COUNTED_CAUSES:
                cause = "other"
            self._counts[cause] = self._counts.get(cause, 0) + 1

    def counts(self) -> dict[str, int]:
        """Return how often each was noted."""
        with self._guard:
            return dict(self._counts)


class Reporter:
    """Logs warnings, each cause at a bounded rate; says how many it kept to itself."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: dict[str, tuple[float, int]] = {}

    def warn(self, subject: str, cause: str) -> None:
        """Log ``subject: cause`` unless that was done a moment ago. Never raises or blocks."""
        key, now = f"{subject}: {cause}", self._clock()
        note(key)
        when, kept = self._last.get(key, (-_QUIET_SECONDS, 0))
        if now - when < _QUIET_SECONDS:
            self._last[key] = (when, kept + 1)
            return
        if len(self._last) >= _MAX_CAUSES:  # causes carry error texts, which may vary without end
            fresh = [each for each in list(self._last.items()) if now - each[1][0] < _QUIET_SECONDS]
            if len(fresh) >= _MAX_CAUSES:  # whoever makes them up does not fill the log
                return
            self._last = dict(fresh)
        self._last[key] = (now, 0)
        _log.warning("%s%s", key, f" ({kept} more like it)" if kept else "")
