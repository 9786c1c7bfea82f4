"""Servers that others have written, as processes on this host that end with this one."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvtier.testing.with_parent import with_parent

_OUTPUT: Final = "output"


def start(
    command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a server in a folder of its own, which gets what it says. From a thread that stays."""
    with (folder / _OUTPUT).open("wb") as output:
        return subprocess.Popen(  # noqa: S603  (our own command)
            with_parent(command),
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def said(folder: Path) -> str:
    """Return what the server of a folder has said."""
    return (folder / _OUTPUT).read_text(errors="replace")


def stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End a server in order, also one that is stopped, or by force when the time is over."""
    process.terminate()
    process.send_signal(signal.SIGCONT)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def is_free(port: int) -> bool:
    """Say whether nobody listens at a port of the loopback device."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
