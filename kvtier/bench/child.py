"""The processes of arms, seen from the benchmark's own process."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self, TypeVar

import msgspec

from kvtier.bench.messages import Failed, Reply, Request
from kvtier.errors import ConfigError, KvtierError
from kvtier.testing.with_parent import with_parent

_CLOSE_SECONDS: Final = 60.0
_ANSWER_SECONDS: Final = 1800.0
"""A request takes seconds, or minutes with a large model; an arm that takes longer hangs."""

_LOG_CHARACTERS: Final = 300
R = TypeVar("R", bound=Reply)


class Child:
    """One process that answers requests, as a context manager. For one thread.

    program: the module that it runs. log: the file that gets what it says on stderr; None: this
    process's own stderr.
    env: variables to set besides those of this process, or to unset (None).
    """

    def __init__(
        self,
        name: str,
        *,
        program: str,
        threads: int,
        log: Path | None,
        env: Mapping[str, str | None],
    ) -> None:
        self.name = name
        self._program = program
        self._threads = threads
        self._log = log
        limits = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        variables = {**os.environ, **dict.fromkeys(limits, str(threads)), **env}
        self._env = {name: value for name, value in variables.items() if value is not None}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", self._program, str(self._threads)]
        stderr = self._log.open("wb") if self._log else None
        try:
            self._process = subprocess.Popen(  # noqa: S603  (our own command)
                with_parent(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=self._env,
                start_new_session=True,  # Ctrl-C is for the benchmark, which then ends its arms
            )
        finally:
            if stderr is not None:
                stderr.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(now=kind is not None)

    def send(self, request: Request) -> None:
        """Send a request; its answer must be received before the next is sent."""
        try:
            stdin = self._alive().stdin
            if stdin is not None:
                stdin.write(msgspec.json.encode(request) + b"\n")
                stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def receive(self, kind: type[R]) -> R:
        """Wait for the answer, at most half an hour.

        Raises ConfigError when the arm refused, KvtierError if it died or does not answer.
        """
        stdout = self._alive().stdout
        if stdout is not None and not select.select([stdout], [], [], _ANSWER_SECONDS)[0]:
            raise KvtierError(f"arm {self.name} has not answered for {_ANSWER_SECONDS:.0f} s")
        line = stdout.readline() if stdout is not None else b""
        if not line:
            raise self._gone()
        reply = msgspec.json.decode(line, type=Reply)
        if isinstance(reply, Failed):
            raise ConfigError(reply.error)
        if not isinstance(reply, kind):
            raise KvtierError(f"arm {self.name} answered {type(reply).__name__}")
        return reply

    def ask(self, request: Request, kind: type[R]) -> R:
        """Send a request and wait for its answer."""
        self.send(request)
        return self.receive(kind)

    def hang_up(self) -> None:
        """Tell the process to end, without waiting for it."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def close(self, *, now: bool = False) -> None:
        """End the process: in order, bounded, or at once. Idempotent. Blocks."""
        self.hang_up()
        process, self._process = self._process, None
        if process is None:
            return
        if now:
            process.kill()
        if process.stdout is not None:
            process.stdout.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CLOSE_SECONDS)
        finally:
            process.kill()
            process.wait()

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise KvtierError(f"arm {self.name} is not running")
        return self._process

    def _gone(self) -> KvtierError:
        status = self._alive().wait()
        said = ""
        if self._log is not None:
            text = " ".join(self._log.read_text(errors="replace").split())
            said = f"; it said last: {text[-_LOG_CHARACTERS:]}"
        return KvtierError(f"the process of arm {self.name} ended with status {status}{said}")
