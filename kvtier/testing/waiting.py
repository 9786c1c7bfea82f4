"""What tests wait for: that something comes to be so, and that a process has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def until(look: Callable[[], T | None], seconds: float = 30.0) -> T:
    """Return what `look` finds, once it finds something. Raises TimeoutError."""
    give_up = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > give_up:
            raise TimeoutError("it did not come to be so")
        time.sleep(0.002)
    return found


def lives(pid: int) -> bool:
    """Say whether a process has not ended; one that nobody has waited for has."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] != "Z"
