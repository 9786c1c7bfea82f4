"""Processes that end with the one that started them, also with one that was killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

__all__ = ["with_parent"]

# The kernel sends the signal. The check after it is for a parent that was gone before.
_PROGRAM: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def with_parent(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command`, given by its path, until this process ends.

    The signal is per thread: start it from one that stays.
    """
    return [sys.executable, "-ISc", _PROGRAM, str(os.getpid()), *command]
