"""A DelayProxy in a process of its own, so that its work is not the measured process's."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator

from beside import Beside

from kvtier.testing.proxy import DelayProxy, Fault

_MOST_WAITING = 5000
_DROPPED_SECONDS = 0.2


class FarProxy(Beside):
    """See DelayProxy; a context manager."""

    def __init__(self, target_port: int, delay_s: float = 0.0) -> None:
        super().__init__(__file__, target_port, delay_s)

    @property
    def requests(self) -> int:
        """How many requests it has seen."""
        return int(self.ask("requests"))

    def inject(self, fault: Fault) -> None:
        """Apply a fault to every request from now on."""
        self.ask(fault.value)

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """Answer nothing, and take no connection: the kernel drops what asks for one meanwhile."""
        waiting = []
        self.process.send_signal(signal.SIGSTOP)
        try:
            while len(waiting) < _MOST_WAITING:
                waiting.append(socket.socket())
                waiting[-1].settimeout(_DROPPED_SECONDS)
                try:
                    waiting[-1].connect(("127.0.0.1", self.port))
                except TimeoutError:
                    break  # the queue is full
            else:
                raise SystemExit("a stopped process takes connections without end")
            yield
        finally:
            for each in waiting:
                each.close()
            self.process.send_signal(signal.SIGCONT)


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
