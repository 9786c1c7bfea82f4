"""The three streams of a process, whatever it was started with."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from typing import Final

_ERRORS: Final = "backslashreplace"  # as Python's own stderr has it
_ESCAPED: Final = "kvtier.escaped"
_STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def ready_streams() -> None:
    """Let all three be there, and stdout take every character.

    One that is closed becomes /dev/null: Python has None in its place, and what is opened next, a
    store's file or a socket, would get its number, and what is printed; in a process that is
    started from here, too, as a server's arena did. What stdout's encoding has not, such as a name
    of a file, is written as an escape of JSON, which it may be part of. To be called before
    anything is opened.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            # It gets the least number that is free. Processes that are started here need it, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003
        if getattr(sys, name) is None:
            stream = os.fdopen(number, mode, encoding="utf-8", errors=_ERRORS, closefd=False)
            setattr(sys, name, stream)
    codecs.register_error(_ESCAPED, _escaped)
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(ValueError):  # it was closed
            sys.stdout.reconfigure(errors=_ESCAPED)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Return characters as JSON writes them in ASCII, and where what follows begins."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2)), error.end
