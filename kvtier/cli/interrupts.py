"""Interrupts that come before there is anything to clean up."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
FATAL: Final = 128
"""Added to the number of a signal that ends a process, as shells do."""

INTERRUPTED: Final = FATAL + signal.SIGINT
"""The exit status of what a user has interrupted."""


class AtOnce:
    """While in it, SIGINT and SIGTERM end this process at once, where they would raise.

    What they raise while modules are imported may be lost in a finalizer, which Python reports and
    passes over. To be entered in the main thread, and while nothing is there that has to be undone.
    """

    def __enter__(self) -> None:
        found = {number: signal.getsignal(number) for number in _SIGNALS}
        # What is ignored, as a shell does it for the background, stays so.
        self._before = {number: one for number, one in found.items() if callable(one)}
        for number in self._before:
            signal.signal(number, _end)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        del kind, error, at
        for number, before in self._before.items():
            signal.signal(number, before)


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    os._exit(FATAL + number)
