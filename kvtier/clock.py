"""The one place where kvtier's core reads a clock, so that tests can put another in its place."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since an arbitrary moment; never goes back."""


def monotonic() -> float:
    """Return the system's monotonic clock in seconds."""
    return time.monotonic()


def epoch() -> float:
    """Return the seconds from 1970 to the zero of ``monotonic``, by the system's clock as it is."""
    return time.time() - time.monotonic()
