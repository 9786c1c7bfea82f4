"""A server's health, as its operator hears of it: when a tier fails, and when it is well again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

_log: Final = logging.getLogger("kvtier")


class Watch:
    """Looks at what is not served, and tells of changes.

    look: returns why, by tier; tell: is called with that when other tiers are in it than before,
    and again with the next turn unless it says that it has told.
    """

    def __init__(
        self, look: Callable[[], dict[str, str]], tell: Callable[[Mapping[str, str]], bool]
    ) -> None:
        self._look = look
        self._tell = tell
        self._known: dict[str, str] = {}

    def turn(self) -> None:
        """Look once. Never blocks."""
        found = self._look()
        if found.keys() == self._known.keys() or not self._tell(found):
            return
        for tier in sorted(found.keys() - self._known.keys()):
            _log.warning("degraded: %s is left alone: %s", tier, found[tier])
        for tier in sorted(self._known.keys() - found.keys()):
            _log.info("%s is well again", tier)
        self._known = found
