"""Processes that end with the one that started them, also with one that was killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_libc: Final = ctypes.CDLL(None)

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


def end_with(parent: int) -> bool:
    """Let this process be killed when its parent ends; say whether that is there. For a fork."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def fork_with_parent(call: Callable[[], None], keep: Collection[int] = ()) -> int:
    """Run `call` in a fork of this process, until that ends or this one does; return its id.

    The fork has no descriptors but the first three and those to keep. To be called where there is
    one thread.
    """
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        wanted = end_with(parent)
        for above, below in pairwise([2, *sorted(keep), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(above + 1, below)
        if wanted:
            call()
            status = 0
    finally:
        os._exit(status)
