"""A progress bar on stderr, if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["progress"]


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield what to call with the step that begins, and how many of how many are behind."""
    if not sys.stderr.isatty():
        yield lambda _text, _done, _count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")

        def tell(text: str, done: int, count: int) -> None:
            bar.update(task, description=text, completed=done, total=count)

        yield tell
