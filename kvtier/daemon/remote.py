"""What a daemon's client hands out: leases, slots and figures that are kept elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.catalog.catalog import Part
from kvtier.catalog.lease import Keeper, Lease, LeaseState
from kvtier.clock import monotonic
from kvtier.daemon.up import Era, Up
from kvtier.errors import MisuseError
from kvtier.identity.record import RecordId
from kvtier.memory.arena import Slot
from kvtier.metrics import TABLE, Metrics, parsed


class Origin(Keeper, Protocol):
    """The desk that a lease is of."""

    owner: int

    @property
    def link(self) -> object:
        """The session's link."""
        ...

    def stands(self, lease: RemoteLease) -> bool:
        """Say whether the daemon still knows the lease."""
        ...


class RemoteLease(Lease):
    """See Lease. number: the daemon's; up: the session that it is good for.

    It ends with that session, too, and by this process's clock at the latest.
    """

    __slots__ = ("_found", "number", "origin", "up")
    _found: LeaseState

    def __init__(
        self,
        span: tuple[int, int],
        names: Sequence[Sequence[RecordId]],
        packed: bytes,
        deadline: float,
        origin: Origin,
        key: tuple[Up, int],
    ) -> None:
        self.origin = origin
        self.up, self.number = key
        first, tokens = span
        super().__init__(first, tokens, names, [], packed, deadline, origin)

    @property
    def state(self) -> LeaseState:
        """See Lease."""
        if self._found is LeaseState.HELD and (
            monotonic() >= self.deadline or not self.origin.stands(self)
        ):
            self._found = LeaseState.EXPIRED
        return self._found

    @state.setter
    def state(self, state: LeaseState) -> None:
        self._found = state


class Taken(list[tuple[Part, Slot]]):
    """Slots that a save fills. era: of the daemon that gave them."""

    def __init__(self, parts: Sequence[tuple[Part, Slot]], era: Era) -> None:
        super().__init__(parts)
        self.era = era


class RemoteMetrics(Metrics):
    """The daemon's figures, and those counted here, which it does not know.

    Each look asks; without an answer the last one holds.
    """

    def __init__(self, ask: Callable[[], dict[str, float] | None]) -> None:
        super().__init__()
        self._ask = ask
        self._pid = os.getpid()
        self._here = Metrics()
        self._there: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """See Metrics. Asks nobody."""
        self._here.add(name, amount, **labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        """See Metrics. Asks nobody."""
        self._here.set(name, value, **labels)

    def get(self, name: str, **labels: str) -> float:
        """See Metrics. Waits for the daemon, bounded."""
        self._refresh()
        return super().get(name, **labels)

    def snapshot(self) -> dict[str, float]:
        """See Metrics. Waits for the daemon, bounded."""
        self._refresh()
        return super().snapshot()

    def _refresh(self) -> None:
        if os.getpid() != self._pid:
            raise MisuseError("a daemon's figures do not cross fork; open a cache in the child")
        values = self._ask()
        here = {parsed(series): value for series, value in self._here.snapshot().items()}
        with self._lock:
            if values is not None:
                read = {parsed(series): value for series, value in values.items()}
                # Without what another release may count.
                self._there = {key: value for key, value in read.items() if key[0] in TABLE}
            self._values = self._there | here
