"""A process beside the one that is measured, which is asked and answers by lines."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Self

SECONDS = 60.0
"""Until it has answered; one that has not by then is killed."""


class Beside:
    """Runs a script that first says at which port it listens; a context manager.

    It ends when its stdin does.
    """

    def __init__(self, script: str, *arguments: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._said())
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def ask(self, text: str) -> str:
        """Say a line, and return what it answers. Blocks, bounded. Raises RuntimeError."""
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self._said()

    def _said(self) -> str:
        late = threading.Timer(SECONDS, self.process.kill)
        late.start()
        try:
            said = self.process.stdout.readline().strip()
        finally:
            late.cancel()
        if not said:
            raise RuntimeError(f"{self.process.args[1]} has ended, or said nothing in {SECONDS} s")
        return said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait(10)
