"""A Session: one client of the daemon, and what it holds."""

from __future__ import annotations

from typing import Literal

from kvtier.catalog.lease import Lease
from kvtier.daemon.grants import Who
from kvtier.daemon.prompts import Recall
from kvtier.local import LocalDesk
from kvtier.memory.packed import packed_bytes


class Holding:
    """A lease of a session. nbytes: of all its slots.

    plans: of it that are out; charged: bytes that the session is charged for it now.
    """

    __slots__ = ("charged", "desk", "lease", "nbytes", "number", "plans")

    def __init__(self, number: int, lease: Lease, desk: LocalDesk) -> None:
        self.number = number
        self.lease = lease
        self.desk = desk
        self.nbytes = packed_bytes(lease.packed)
        self.plans = 0
        self.charged = 0

    @property
    def weight(self) -> int:
        """The bytes that the session is to be charged for it. Pins have a limit of their own."""
        counts = self.plans or (self.lease.held and not self.lease.pinned)
        return self.nbytes if counts else 0


class Session:
    """One client. token: the 16 bytes that it drew; engine: a digest of whom it serves.

    over: whether it has ended, with all that it held but its plans.
    """

    __slots__ = (
        "connections",
        "desks",
        "engine",
        "holdings",
        "over",
        "prompts",
        "role",
        "token",
        "who",
    )

    def __init__(
        self,
        token: bytes,
        engine: bytes,
        who: Who,
        role: Literal["scheduler", "worker"],
        recall: Recall,
    ) -> None:
        self.token = token
        self.engine = engine
        self.who = who
        self.role = role
        self.connections = 0
        self.desks: dict[int, LocalDesk] = {}
        self.holdings: dict[int, Holding] = {}
        self.prompts = recall.of(token)
        self.over = False
