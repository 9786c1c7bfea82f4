"""A daemon's server with one guard less, where KVTIER_CARELESS names it. See test_soak.py."""

from __future__ import annotations

import os
import sys
import time

CARELESS = os.environ.get("KVTIER_CARELESS")


def revoke() -> None:
    """Give the slots of a plan away when that has been out for half a second."""
    from kvtier.daemon.sessions import Sessions

    tick = Sessions.tick
    since: dict[int, float] = {}

    def revoking(self: Sessions) -> None:
        tick(self)
        now = time.monotonic()
        with self._lock:
            for out in list(self._outs._all.values()):
                if now - since.setdefault(out.plan, now) > 0.5:
                    self._outs._end(out, ok=False)

    Sessions.tick = revoking  # type: ignore[method-assign]


def forget() -> None:
    """Begin a server as if the one before had granted nothing."""
    from kvtier.daemon.grants import _MARKS_AT, Grants

    left = Grants._read

    def forgotten(self: Grants) -> object:
        for grant in left(self):
            self._map[_MARKS_AT + self._heads.pop(grant.plan)[0]] = 0
        return ()

    Grants._read = forgotten  # type: ignore[method-assign,assignment]


if CARELESS and "kvtier.daemon.server" in sys.orig_argv:
    {"revoke": revoke, "forget": forget}[CARELESS]()
