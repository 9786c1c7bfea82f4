"""A daemon of one engine's own: a child of the process that starts it, which ends with it.

The engine's ranks find it by the engine's id. See ``place.rendezvous``.
"""

from __future__ import annotations

import atexit
import itertools
import os
from typing import Final, Self

from kvtier.daemon.place import clear_dead, rendezvous, runtime_folder
from kvtier.daemon.settings import Settings
from kvtier.daemon.supervisor import Supervisor

_START_SECONDS: Final = 60.0
_LEAST_BYTES_A_SECOND: Final = 256 << 20  # that the system makes of memory, however busy it is
_numbers: Final = itertools.count(1)


class PrivateDaemon:
    """Started when it is made; ends with ``close``, or with this process, however that ends.

    tiers: URLs, DRAM first. engine: the id that its ranks name, made up unless given. path: where
    to connect. timeout: seconds until it serves; a minute unless given, and more for much memory.
    Blocks until then. Raises ConfigError with cause and remedy, and TimeoutError.
    A forked child cannot close it.
    """

    def __init__(self, *tiers: str, engine: str = "", timeout: float | None = None) -> None:
        self.engine = engine or f"{os.getpid()}-{next(_numbers)}"
        path = rendezvous(self.engine)
        # Each engine's socket has a name of its own: nobody else would do so.
        clear_dead(runtime_folder())
        self._supervisor = Supervisor(Settings(tiers, os.geteuid(), share=1.0), path)
        self.path = self._supervisor.path
        if timeout is None:
            timeout = _START_SECONDS + self._supervisor.nbytes / _LEAST_BYTES_A_SECOND
        self._supervisor.start(timeout)
        atexit.register(self.close)

    @property
    def server(self) -> int:
        """The server's process, 0 while there is none."""
        return self._supervisor.server

    def close(self) -> None:
        """End it: what waits to be written to durable tiers is. Blocks, bounded. Idempotent."""
        atexit.unregister(self.close)
        self._supervisor.close()

    def __enter__(self) -> Self:
        """Return the daemon."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()
