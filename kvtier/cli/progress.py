"""A progress bar on stderr; where that is no terminal, a line now and then on long work."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

_QUIET_SECONDS: Final = 30.0


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield what to call with the step that begins, and how many of how many are behind."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")

        def tell(text: str, done: int, count: int) -> None:
            bar.update(task, description=text, completed=done, total=count)

        yield tell


def _lines() -> Callable[[str, int, int], None]:
    """Return what says how far it is, at most every 30 s, from then on."""
    began = said = time.monotonic()

    def tell(text: str, done: int, count: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= _QUIET_SECONDS:
            said = now
            sys.stderr.write(f"{now - began:.0f} s: {text} ({done:,} of {count:,})\n")
            sys.stderr.flush()

    return tell
