"""Forks that have torch end with whoever has asked for them, also with one that was killed.

Here that one has a fork of its own, which holds all of its descriptors and lives on, so that no
closed socket tells of the death.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvtier.testing.with_parent import with_parent

SECONDS = 30.0
ASKING = """
import os, sys
from kvtier.testing import torch_forks
number, careless = int(sys.argv[1]), sys.argv[2]
if careless == "starting":
    torch_forks.with_parent = list
forks = torch_forks.TorchForks()
fork = forks.start("served", [""], [number])
print(forks._process.pid, fork.pid, flush=True)
os.fork()
sys.stdin.read()
"""


class Forked:
    """What forks, and a fork of it that serves an engine, once whoever has asked was killed."""

    def __init__(self, link: socket.socket, pids: list[int]) -> None:
        self.forks, self.fork = map(os.pidfd_open, pids)
        self._link = link

    def answers(self) -> bool:
        """Say whether the fork goes on: it answers a prompt."""
        with self._link.makefile("rw") as lines:
            lines.write("[1, 2, 3]\n")
            lines.flush()
            return bool(json.loads(lines.readline())["tokens"])

    def close(self) -> None:
        for process in (self.forks, self.fork):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            assert ended(process)
            os.close(process)


def ended(process: int) -> bool:
    return bool(select.select([process], [], [], SECONDS)[0])


@contextlib.contextmanager
def orphaned(root: Path, careless: str = "") -> Iterator[Forked]:
    """Kill whoever has asked for a fork. careless: the guard that is taken away."""
    paths = os.pathsep.join([str(root), str(Path(__file__).parent / "careless")])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(SECONDS)
        number = theirs.fileno()
        with subprocess.Popen(
            with_parent([sys.executable, "-c", ASKING, str(number), careless]),
            env=os.environ | {"PYTHONPATH": paths, "KVTIER_CARELESS": careless},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[number],
            text=True,
        ) as asking:
            assert asking.stdout is not None
            forked = Forked(ours, [int(one) for one in asking.stdout.readline().split()])
            with contextlib.closing(forked):
                asking.kill()
                asking.wait()
                yield forked


def test_a_fork_ends_with_whoever_has_asked_for_it(root: Path) -> None:
    with orphaned(root) as forked:
        assert ended(forked.forks)
        assert ended(forked.fork)


def test_without_its_own_signal_a_fork_outlives_what_it_was_forked_off(root: Path) -> None:
    with orphaned(root, "forking") as forked:
        assert ended(forked.forks)
        assert forked.answers()


def test_without_the_signal_at_its_start_what_forks_outlives_whoever_asked(root: Path) -> None:
    with orphaned(root, "starting") as forked:
        assert forked.answers()
        assert not select.select([forked.forks], [], [], 0)[0]
