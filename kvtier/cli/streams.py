"""The three streams of a process, whatever it was started with."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Final

_STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def ready_streams() -> None:
    """Let all three be there, and stdout take every character.

    One that is closed becomes /dev/null: Python has None in its place, and what is opened next, a
    store's file or a socket, would get its number, and what is printed. What stdout's encoding has
    not, such as a name of a file, is written as an escape. To be called before anything is opened.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the least number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(ValueError):  # it was closed
            sys.stdout.reconfigure(errors="backslashreplace")
