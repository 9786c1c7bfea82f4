"""The write budget of a tier: how many bytes may be sent to its Store, so that flash lasts."""

from __future__ import annotations

import math
from typing import Final

from kvtier.clock import Clock

_DAY: Final = 86_400.0


class WriteBudget:
    """A token bucket: `a_day` bytes deep, full at first, refilled at that rate; inf for no limit.

    It is not written down: a process that is started anew begins with a full day's worth.
    Spent on the flow loop; may be read from any thread.
    """

    def __init__(self, a_day: float, clock: Clock) -> None:
        self.a_day = a_day
        self._clock = clock
        self._level = (a_day, clock())  # bytes that were left, and when: one value, never torn

    @property
    def left(self) -> float:
        """Bytes that may be sent now."""
        left, when = self._level
        if math.isinf(left):
            return left
        return min(left + (self._clock() - when) * self.a_day / _DAY, self.a_day)

    @property
    def short(self) -> bool:
        """Whether less than half of a day's worth is left."""
        return self.left < self.a_day / 2

    def spend(self, nbytes: int) -> None:
        """Note that bytes are sent to the Store, whatever becomes of them."""
        self._level = (self.left - nbytes, self._clock())
