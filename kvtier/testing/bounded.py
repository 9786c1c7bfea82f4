"""Bounds for code that may have lost its own: it ends, and takes no more than its share."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, process_time
from typing import Final

_TICK_SECONDS: Final = 0.25
_BLOCKED_SECONDS: Final = 20  # as many times longer a thread may wait than it may compute
_MORE_BYTES: Final = 1 << 30


class Endless(KeyboardInterrupt):
    """The time is over. Not an Exception: what must end may catch those, and go on."""


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise Endless in what runs inside after as many seconds of the processor, or 20 times that.

    It may have one GiB more memory than the process has now, then MemoryError is raised. To be
    called in the main thread.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    more = _data_bytes() + _MORE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (more if hard < 0 else min(more, hard), hard))
    used, begun = process_time(), monotonic()

    def tick(signum: int, frame: object) -> None:
        nonlocal used, begun
        del signum, frame
        if process_time() - used > seconds or monotonic() - begun > _BLOCKED_SECONDS * seconds:
            used, begun = process_time(), monotonic()  # should somebody catch it
            raise Endless(f"more than {seconds:g} s of the processor, or blocked")

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, _TICK_SECONDS, _TICK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def own_clock() -> float:
    """Return seconds that go on while this thread runs or waits, but not for a processor.

    On a machine with other work that is what its calls take: by the wall clock they take longer.
    """
    try:
        stats = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    except FileNotFoundError:  # a kernel that does not count it
        return monotonic()
    return monotonic() - int(stats[1]) / 1e9


def _data_bytes() -> int:
    """Return what counts against the limit: heap, stacks and private mappings of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    return pages * resource.getpagesize()
