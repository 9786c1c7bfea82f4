"""A daemon that tests kill, stop and start again."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

import kvtier
from kvtier.testing.daemon import children
from kvtier.testing.nursery import Nursery
from kvtier.testing.toy import CHUNK, NAMESPACE, Toy, dram, prompt
from kvtier.testing.waiting import until


class Mortal:
    """See the module. tiers: URLs, by default DRAM for 64 chunks. Close it last."""

    def __init__(self, nursery: Nursery, *tiers: str) -> None:
        self._nursery = nursery
        self._tiers = tiers or (dram(64),)
        self.path, self.pid = nursery.start(self._tiers)
        self.toys: list[Toy] = []

    @property
    def server(self) -> int:
        """The server's process, once there is one."""
        return until(lambda: next(iter(children(self.pid)), 0))

    def open(self, patience: float = 5.0, namespace: kvtier.Namespace = NAMESPACE) -> Toy:
        """Put a toy engine on a cache of it; it is closed with this."""
        url = f"unix:{self.path}?patience={patience:.3f}s&timeout=30s"
        self.toys.append(Toy(kvtier.open(url, namespace=namespace)))
        return self.toys[-1]

    def kill_server(self) -> None:
        """Kill the server; the supervisor starts another one."""
        kill(self.server)

    def kill(self) -> None:
        """Kill the supervisor; its server goes with it."""
        server = self.server
        kill(self.pid, with_it=server)
        self._nursery.end(self.pid)

    def start(self) -> None:
        """Start another daemon in the place of one that was killed."""
        self.path, self.pid = self._nursery.start(self._tiers, path=self.path)

    def close(self) -> None:
        """Close the engines, and end it."""
        for server in children(self.pid):
            with contextlib.suppress(ProcessLookupError):  # it was killed, and another follows
                os.kill(server, signal.SIGCONT)
        for toy in self.toys:
            toy.close()
        self._nursery.end(self.pid)


def kill(pid: int, with_it: int = 0) -> None:
    """Kill a process, and wait until it, and the other one, are dead."""
    descriptors = [os.pidfd_open(one) for one in (pid, with_it) if one]
    os.kill(pid, signal.SIGKILL)
    for one in descriptors:
        assert select.select([one], [], [], 30)[0], "it does not die"
        os.close(one)


def figure(toy: Toy, name: str) -> float:
    """Return a gauge of the daemon."""
    return toy.cache.figures()[f"kvtier_{name}"]


def arenas() -> int:
    """Return how many arenas this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("kvtier-arena" in line for line in lines)


def serves(toy: Toy, seed: int = 0) -> None:
    """See that the cache is there again, and exact."""
    tokens = prompt(4 * CHUNK + 1, 1000 + seed)

    def works() -> bool:
        try:
            toy.save("again", tokens[: 4 * CHUNK])
        except TimeoutError:  # killed while it was written down
            return False
        return toy.load("then", tokens)[0] == 4 * CHUNK

    until(works)
    assert toy.load("and then", tokens)[2]
