"""The circuit breaker: a tier that fails is left alone for a while, then tried by one call."""

from __future__ import annotations

from typing import Final

from kvtier.clock import Clock

FAILURES: Final = 5
"""Failed calls in a row that open it."""

REST_SECONDS: Final = 5.0
"""How long it stays open before one call may try again."""


class Breaker:
    """Closed: calls pass. Open: none does. Half open: one does, and decides.

    held: open until that is taken back, and never half open.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures = 0
        self._open_until = 0.0
        self._probing = False
        self.held = False

    @property
    def closed(self) -> bool:
        """Say whether calls pass freely."""
        return self._failures < FAILURES and not self.held

    @property
    def rests(self) -> bool:
        """Say whether no call passes, not even one that tries."""
        return not self.closed and not self._half_open()

    def allow(self) -> bool:
        """Say whether a call may go; when half open, only the first that asks."""
        if self.closed:
            return True
        if not self._half_open():
            return False
        self._probing = True
        return True

    def _half_open(self) -> bool:
        return not (self.held or self._probing or self._clock() < self._open_until)

    def report(self, *, ok: bool) -> None:
        """Note how a call ended."""
        self._probing = False
        if ok:
            self._failures = 0
            return
        self._failures += 1
        if not self.closed:
            self._open_until = self._clock() + REST_SECONDS

    def pass_over(self) -> None:
        """Note that a call has ended in a way that says nothing of the tier."""
        self._probing = False
