"""A daemon for tests: ``kvtier serve`` as an operator runs it, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.testing.waiting import lives
from kvtier.testing.with_parent import with_parent

_START_SECONDS = 60.0
_END_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running daemon. ready: what it said when it was; log: what it said since."""

    path: str
    supervisor_pid: int
    ready: dict[str, Any]
    process: subprocess.Popen[bytes]
    log: Path

    def server_pid(self) -> int:
        """Return the process of the server that runs now, 0 while there is none."""
        return next(iter(children(self.supervisor_pid)), 0)

    @property
    def url(self) -> str:
        """What ``kvtier.open`` takes."""
        return f"unix:{self.path}"


def children(pid: int) -> list[int]:
    """Return the child processes of a process, of all its threads, that have not ended."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text(encoding="ascii").split())
    return list(filter(lives, found))  # what was killed is there until its parent asks for it


@contextlib.contextmanager
def running(
    *urls: str, path: str | Path | None = None, config: str | Path | None = None
) -> Iterator[Daemon]:
    """Run a daemon while the block runs; it ends with the test, however that ends.

    path: of its socket, by default in a folder of its own. config: a file in place of URLs; path
    is its socket then. Raises RuntimeError with what it said when it does not start.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvtier-"))
    where = [] if config is not None and path is None else ["--socket", str(path or folder / "s")]
    given = ["--config", str(config)] if config is not None else list(urls)
    command = [sys.executable, "-m", "kvtier", "serve", "--json", *where, *given]
    said = folder / "said"  # no pipe: nobody reads on
    try:
        with said.open("w") as out, (folder / "log").open("w") as log:
            process = subprocess.Popen(with_parent(command), stdout=out, stderr=log)  # noqa: S603  (our own command)
        try:
            ready = _ready(process, said)
            yield Daemon(ready["socket"], ready["pid"], ready, process, folder / "log")
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            process.kill()
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ready(process: subprocess.Popen[bytes], said: Path) -> dict[str, Any]:
    """Return the first line, once it is whole. Raises RuntimeError with the log."""
    until = time.monotonic() + _START_SECONDS
    while "\n" not in (text := said.read_text()):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(said.with_name("log").read_text())
        time.sleep(0.005)
    ready: dict[str, Any] = json.loads(text.partition("\n")[0])
    return ready
