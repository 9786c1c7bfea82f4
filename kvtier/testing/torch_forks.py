"""Processes forked off one that has imported torch, which by itself takes two seconds of each.

``python -m kvtier.testing.torch_forks LINK`` is that one: a descriptor of its socket to whoever
asks. A request is one message, with the descriptors that go to the fork; the answer is the fork's
id, with a descriptor of its process. All end with whoever has asked, also with one that is killed.
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
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvtier.testing.with_parent import fork_with_parent, with_parent

_MESSAGE_BYTES: Final = 1 << 16
_DESCRIPTORS: Final = 8
_FORK_SECONDS: Final = 50.0


class TorchFork:
    """One fork, as a Popen is one process. For one thread; close it last.

    pid: the process; descriptor: a pidfd of it, which means it still when it has ended.
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.descriptor = descriptor

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """Wait for its end. Blocks. Raises TimeoutError."""
        if not select.select([self.descriptor], [], [], seconds)[0]:
            raise TimeoutError(f"process {self.pid} has not ended in {seconds:.0f} s")

    def close(self) -> None:
        """Let go of it. It goes on if it has not ended."""
        os.close(self.descriptor)


class TorchForks:
    """Starts forks. For one thread, which stays; close it last, and all forks end. Blocks."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.settimeout(_FORK_SECONDS)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(  # noqa: S603  (our own command)
                with_parent([sys.executable, "-m", __name__, str(number)]), pass_fds=[number]
            )

    def start(self, which: str, words: Sequence[str], descriptors: Sequence[int]) -> TorchFork:
        """Run `main` of a module here in a fork, with words and with the descriptors' numbers.

        which: "ranked" or "served". descriptors: sent, and the caller's to close. Raises
        TimeoutError where nobody answers.
        """
        socket.send_fds(self._link, [json.dumps([which, *words]).encode()], descriptors)
        pid, received, _, _ = socket.recv_fds(self._link, _MESSAGE_BYTES, 1)
        if not received:
            raise RuntimeError("what forks has ended; see what it said")
        return TorchFork(int(pid), received[0])

    def close(self) -> None:
        """End all. Blocks."""
        self._link.close()
        try:
            self._process.wait(_FORK_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()


def main(arguments: Sequence[str]) -> None:
    """Fork what is asked for, until nobody is there to ask. Blocks."""
    import torch

    from kvtier.testing import ranked, served

    torch.set_num_threads(1)  # a fork has none of the other threads
    mains = {"ranked": ranked.main, "served": served.main}
    with socket.socket(fileno=int(arguments[0])) as link:
        while True:
            message, descriptors, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, _DESCRIPTORS)
            if not message:
                return
            which, *words = json.loads(message)
            numbers = [*words, *map(str, descriptors)]
            child = fork_with_parent(partial(_run, mains[which], numbers), descriptors)
            place = os.pidfd_open(child)
            socket.send_fds(link, [str(child).encode()], [place])
            for number in (place, *descriptors):
                os.close(number)
            _reap()


def _run(call: Callable[[Sequence[str]], None], words: Sequence[str]) -> None:
    """Say why it ends, where that is not in order: its process ends then without a word."""
    try:
        call(words)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise


def _reap() -> None:
    """Let go of those that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main(sys.argv[1:])
