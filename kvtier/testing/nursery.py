"""Daemons by the dozen, for tests: forked off one process that has imported all they need.

What runs is ``Supervisor`` and the server's ``main``, in processes of their own; only that neither
is executed anew, which would take most of a second each.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from kvtier.catalog.owners import Quota
from kvtier.config import Config
from kvtier.daemon import server
from kvtier.daemon.settings import Settings
from kvtier.daemon.supervisor import Supervisor
from kvtier.errors import ConfigError
from kvtier.testing.with_parent import with_parent

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


class Nursery:
    """Starts and ends daemons. For one thread; close it last. Blocks."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-")
        self._count = 0
        with (Path(self._folder.name) / "log").open("w") as log:
            self._process = subprocess.Popen(  # noqa: S603  (our own command)
                with_parent([sys.executable, "-m", "kvtier.testing.nursery", self._folder.name]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def start(
        self,
        tiers: Sequence[str],
        quotas: Mapping[str, Quota] | None = None,
        share: float = 1.0,
        path: str = "",
    ) -> tuple[str, int]:
        """Start a daemon; return the path of its socket, and the supervisor's process.

        path: one that was used before. Raises ConfigError where it refuses to start.
        """
        self._count += 1
        path = path or f"{self._folder.name}/{self._count}"
        shares = {name: [one.floor, one.ceiling] for name, one in (quotas or {}).items()}
        said = self._ask(tiers=list(tiers), quotas=shares, share=share, path=path)
        if said["wrong"]:
            raise ConfigError(said["wrong"])
        return path, said["pid"]

    def end(self, pid: int) -> None:
        """End a daemon in order, and wait until it has ended."""
        self._ask(end=pid)

    def log(self) -> str:
        """Return what all daemons have said."""
        return (Path(self._folder.name) / "log").read_text()

    def close(self) -> None:
        """End all daemons."""
        with self._process:
            cast("Any", self._process.stdin).close()
        self._folder.cleanup()

    def _ask(self, **what: object) -> dict[str, Any]:
        into, out = self._process.stdin, self._process.stdout
        if into is None or out is None:
            raise RuntimeError
        into.write(json.dumps(what) + "\n")
        into.flush()
        said: dict[str, Any] = json.loads(out.readline())
        return said


class _Forked:
    """A server as a fork of its supervisor; stands where a Popen does."""

    def __init__(self, arguments: list[str]) -> None:
        self.pid = os.fork()
        if not self.pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            sys.argv = ["server", *arguments]
            status = 1
            try:
                status = server.main()
            finally:
                os._exit(status)

    def wait(self) -> int:
        """Wait for its end; return its status as Popen does."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class _Supervisor(Supervisor):
    def _spawn(self, link: int) -> Any:
        listening = self.place.socket.fileno()
        ours = [listening, self._arena, self._grants, self._settings, link]
        numbers = [os.dup(number) for number in ours]  # a fork closes its supervisor's own
        try:
            return _Forked([*map(str, [*numbers, *self.facts])])
        finally:
            for number in numbers:
                os.close(number)


def _start(what: dict[str, Any]) -> dict[str, Any]:
    """Fork a supervisor; return its process, or why it does not start."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        wrong = os.read(reading, 1 << 16).decode()  # one write; its server has the pipe, too
        os.close(reading)
        if wrong != "ok":
            os.waitpid(pid, 0)
        return {"pid": pid, "wrong": "" if wrong == "ok" else wrong or "it died"}
    os.close(reading)
    try:
        _supervise(what, writing)
    finally:
        os._exit(0)


def _supervise(what: dict[str, Any], tell: int) -> None:
    """Run a daemon until SIGTERM comes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (0, 1):
        os.close(number)
        os.open(os.devnull, os.O_RDWR)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    quotas = {name: Quota(*shares) for name, shares in what["quotas"].items()}
    settings = Settings(tuple(what["tiers"]), os.geteuid(), what["share"], quotas)
    try:
        supervisor = _Supervisor(settings, what["path"])
        supervisor.start(60)
    except Exception as error:  # noqa: BLE001  (told to whoever asked)
        os.write(tell, str(error).encode())
        os.close(tell)
        return
    os.write(tell, b"ok")
    os.close(tell)
    signal.sigwait([signal.SIGTERM])
    supervisor.close()


def main() -> None:
    """Do what is asked, a line each, until nobody is there to ask."""
    os.chdir(sys.argv[1])  # what names no folder lands there
    running: dict[int, None] = {}
    Config.from_urls(["dram:1MiB", "lmdb:/kv?capacity=1GiB", "memory:x?capacity=unbounded"])
    gc.collect()
    gc.freeze()  # else each fork would look through what it has from here, and so get a copy
    for line in sys.stdin:
        what = json.loads(line)
        if "end" in what:
            _end(what["end"])
            running.pop(what["end"], None)
            answer: dict[str, Any] = {}
        else:
            answer = _start(what)
            if not answer["wrong"]:
                running[answer["pid"]] = None
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in running:
        _end(pid)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
