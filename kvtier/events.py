"""What an operator is told: one line a cause, at most once in ten seconds."""

from __future__ import annotations

import logging
from typing import Final

from kvtier.clock import Clock

__all__ = ["Reporter"]

_QUIET_SECONDS: Final = 10.0
_MAX_CAUSES: Final = 256
_log = logging.getLogger("kvtier")


class Reporter:
    """Logs warnings, each cause at a bounded rate; says how many it kept to itself."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: dict[str, tuple[float, int]] = {}

    def warn(self, subject: str, cause: str) -> None:
        """Log ``subject: cause`` unless that was done a moment ago. Never raises or blocks."""
        key, now = f"{subject}: {cause}", self._clock()
        when, kept = self._last.get(key, (-_QUIET_SECONDS, 0))
        if now - when < _QUIET_SECONDS:
            self._last[key] = (when, kept + 1)
            return
        if len(self._last) > _MAX_CAUSES:  # causes carry error texts, which may vary without end
            self._last.clear()
        self._last[key] = (now, 0)
        _log.warning("%s%s", key, f" ({kept} more like it)" if kept else "")
