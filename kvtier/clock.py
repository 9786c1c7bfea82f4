"""The one place where kvtier's core reads a clock, so that tests can put another in its place."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Clock", "monotonic"]

Clock = Callable[[], float]
"""Seconds since an arbitrary moment; never goes back."""


def monotonic() -> float:
    """Return the system's monotonic clock in seconds."""
    return time.monotonic()
