"""A DelayProxy in a process of its own, so that its work is not the measured process's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from kvtier.testing.proxy import DelayProxy, Fault

__all__ = ["FarProxy"]

_MOST_WAITING = 5000
_DROPPED_SECONDS = 0.2


class FarProxy:
    """See DelayProxy; a context manager."""

    def __init__(self, target_port: int, delay_s: float = 0.0) -> None:
        command = [sys.executable, __file__, str(target_port), str(delay_s)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._port = int(self._said())
        self.endpoint = f"http://127.0.0.1:{self._port}"

    @property
    def requests(self) -> int:
        """How many requests it has seen."""
        return int(self._ask("requests"))

    def inject(self, fault: Fault) -> None:
        """Apply a fault to every request from now on."""
        self._ask(fault.value)

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """Answer nothing, and take no connection: the kernel drops what asks for one meanwhile."""
        waiting = []
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            while len(waiting) < _MOST_WAITING:
                waiting.append(socket.socket())
                waiting[-1].settimeout(_DROPPED_SECONDS)
                try:
                    waiting[-1].connect(("127.0.0.1", self._port))
                except TimeoutError:
                    break  # the queue is full
            else:
                raise SystemExit("a stopped process takes connections without end")
            yield
        finally:
            for each in waiting:
                each.close()
            os.kill(self._process.pid, signal.SIGCONT)

    def _ask(self, text: str) -> str:
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()
        return self._said()

    def _said(self) -> str:
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.stdin.close()
        self._process.wait(10)


def serve(target_port: int, delay_s: float) -> None:
    """Run one until stdin ends; each line is a question, or a fault to inject."""
    with DelayProxy(target_port, delay_s) as proxy:
        print(proxy.port, flush=True)
        for line in sys.stdin:
            asked = line.strip()
            if asked != "requests":
                proxy.inject(Fault(asked))
            print(proxy.requests, flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]))
