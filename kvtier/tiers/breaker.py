"""The circuit breaker: a tier that fails is left alone for a while, then tried by one call.

What can be read and not written, as a bucket with such a policy or a disk that is full of errors,
is read all the same: the failures of other calls do not keep back one that reads, unless the last
one of these failed, too.
"""

from __future__ import annotations

from typing import Final

from kvtier.clock import Clock

FAILURES: Final = 5
"""Failed calls in a row that open it."""

REST_SECONDS: Final = 5.0
"""How long it stays open before one call may try again."""


_READS: Final = frozenset({"read", "look up", "list"})


class Breaker:
    """Closed: calls pass. Open: none does. Half open: one does, and decides.

    held: open until that is taken back, and never half open. verb: what a call does, as a Tier
    names it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures = 0
        self._open_until = 0.0
        self._probing = False
        self._unread = False  # whether a call that reads has failed since one worked
        self.held = False

    @property
    def closed(self) -> bool:
        """Say whether calls pass freely."""
        return self._failures < FAILURES and not self.held

    @property
    def reads(self) -> bool:
        """Say whether calls that read pass freely."""
        return not self.held and (self.closed or not self._unread)

    @property
    def rests(self) -> bool:
        """Say whether no call that reads passes, not even one that tries."""
        return not self.reads and not self._half_open()

    def allow(self, verb: str = "") -> bool:
        """Say whether a call may go; when half open, only the first that asks."""
        if self.closed or (verb in _READS and self.reads):
            return True
        if not self._half_open():
            return False
        self._probing = True
        return True

    def _half_open(self) -> bool:
        return not (self.held or self._probing or self._clock() < self._open_until)

    def report(self, verb: str = "", *, ok: bool) -> None:
        """Note how a call ended."""
        self._probing = False
        if verb in _READS:
            self._unread = not ok
        if ok:
            self._failures = 0
            return
        self._failures += 1
        if not self.closed:
            self._open_until = self._clock() + REST_SECONDS

    def pass_over(self) -> None:
        """Note that a call has ended in a way that says nothing of the tier."""
        self._probing = False
