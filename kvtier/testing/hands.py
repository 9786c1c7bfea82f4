"""A clock that tests move by hand."""

from __future__ import annotations


class Hands:
    """Says `now`, in seconds, which stands until it is set."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the time."""
        return self.now
