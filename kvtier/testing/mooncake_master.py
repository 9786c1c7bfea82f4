"""A real Mooncake master for tests on this host, from the wheel of Mooncake's transfer engine."""

from __future__ import annotations

import importlib.util
import random
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final, Self

from kvtier.errors import ConfigError, Unavailable
from kvtier.testing.servers import said, start, stop

_READY_SECONDS: Final = 20.0
_STOP_SECONDS: Final = 5.0
_LOW_PORTS: Final = (23_000, 32_000)


class MooncakeMaster:
    """A master on free loopback ports, as a context manager.

    Entering blocks until it listens, about a second. Raises ConfigError where the wheel is not
    installed, or the libraries that it asks of the system; Unavailable when it does not come up.
    """

    def __init__(self) -> None:
        self.port = 0
        self.admin_port = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def location(self) -> str:
        """What follows ``mooncake:`` in a URL."""
        return f"//127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        binary = _binary()
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-mooncake-")
        self.port, self.admin_port = random.sample(range(*_LOW_PORTS), 2)
        command = [
            *(str(binary), "-rpc_address=127.0.0.1", f"-rpc_port={self.port}"),
            *("-metrics_host=127.0.0.1", f"-metrics_port={self.admin_port}"),
            "-default_kv_lease_ttl=500",
        ]
        self._process = start(command, Path(self._folder.name))
        late = time.monotonic() + _READY_SECONDS
        while not (_listens(self.port) and _listens(self.admin_port)):
            if self._process.poll() is not None or time.monotonic() > late:
                why = said(Path(self._folder.name))
                self.close()
                raise Unavailable(f"the Mooncake master did not come up; it said: {why[-500:]}")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop it. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            stop(process, _STOP_SECONDS)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _binary() -> Path:
    try:
        import mooncake.store  # noqa: F401  (the binary asks for the same libraries)
    except ImportError as error:
        raise ConfigError(f"Mooncake absent: `make mooncake` installs it ({error})") from error
    found = importlib.util.find_spec("mooncake")
    for folder in (found.submodule_search_locations or ()) if found else ():
        if Path(folder, "mooncake_master").is_file():
            return Path(folder, "mooncake_master")
    raise ConfigError("Mooncake absent: the wheel has no mooncake_master")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
