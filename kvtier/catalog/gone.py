"""Gone: why parts that are in no tier are not, as far as that is remembered. Under the lock."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvtier.clock import Clock
from kvtier.identity.record import RecordId

_REMEMBERED: Final = 1 << 13


class Why(NamedTuple):
    """What became of a part: the reason, the tier that had it last, and when that was."""

    reason: str
    tier: str
    at: float


class Gone:
    """Remembers the last parts that went, at least 8192 and at most twice as many.

    It forgets by halves: so each note costs one entry of a dict, whatever was noted before.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._newer: dict[RecordId, tuple[str, str, float]] = {}
        self._older: dict[RecordId, tuple[str, str, float]] = {}

    def __len__(self) -> int:
        """Notes that are kept."""
        return len(self._newer) + len(self._older)

    def note(self, name: RecordId, reason: str, tier: str = "") -> None:
        """Remember why a part is not there any more, or did not come."""
        if len(self._newer) >= _REMEMBERED:
            self._older, self._newer = self._newer, {}
        self._newer[name] = (reason, tier, self._clock())

    def why(self, name: RecordId) -> Why | None:
        """Return what was noted last; None for a part that never was there, or long ago."""
        found = self._newer.get(name) or self._older.get(name)
        return None if found is None else Why(*found)
