"""A process with one guard less, by KVTIER_CARELESS. See test_soak.py and test_torch_forks.py."""

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


def keep() -> None:
    """Let a client keep the memory of a daemon that is gone."""
    from kvtier.daemon.mapped import MappedArena

    kept: list[object] = []
    unmap = MappedArena.unmap

    def keeping(self: MappedArena) -> None:
        kept.append(self._mapped)
        unmap(self)

    MappedArena.unmap = keeping  # type: ignore[method-assign]


def forking() -> None:
    """Let a fork go on when what it was forked off has ended: ask for no signal then."""
    from kvtier.testing import with_parent

    with_parent._PR_SET_PDEATHSIG = 0  # type: ignore[misc]


for module, careless in (
    ("kvtier.daemon.server", {"revoke": revoke, "forget": forget}),
    ("kvtier.testing.soak", {"keep": keep}),
    ("kvtier.testing.torch_forks", {"forking": forking}),
):
    if module in sys.orig_argv and CARELESS in careless:
        careless[CARELESS]()
