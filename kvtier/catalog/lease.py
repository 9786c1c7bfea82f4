"""Leases: counted holds on slots, each with a deadline, each with one owner."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvtier.errors import MisuseError
from kvtier.memory.arena import Slot

__all__ = ["Lease", "LeaseState"]


class LeaseState(enum.Enum):
    """Where a lease is in its life."""

    HELD = "held"
    RELEASED = "released"
    EXPIRED = "expired"


class Lease:
    """A hold on the slots of a run of chunks, so that they can be copied to the engine.

    first: index of the first chunk. slots: those of each chunk, one a part. sources: for each
    chunk, the tier that its bytes came from. It ends by ``release`` (or ``with``), or at its
    deadline; a CopyPlan issued before that keeps the slots until the copy has settled.
    """

    __slots__ = ("_end", "deadline", "first", "plans", "rows", "slots", "sources", "state")

    def __init__(
        self,
        first: int,
        rows: tuple[tuple[int, ...], ...],
        slots: tuple[tuple[Slot, ...], ...],
        sources: tuple[str, ...],
        deadline: float,
        end: Callable[[Lease], None],
    ) -> None:
        self.first = first
        self.rows = rows
        self.slots = slots
        self.sources = sources
        self.deadline = deadline
        self.state = LeaseState.HELD
        self.plans = 0
        self._end = end

    @property
    def chunks(self) -> int:
        """How many chunks are held."""
        return len(self.rows)

    def release(self) -> None:
        """End the lease. A no-op after its deadline; MisuseError when released twice."""
        if self.state is LeaseState.RELEASED:
            raise MisuseError("this lease was released before")
        self._end(self)

    def __enter__(self) -> Self:
        """Return the lease."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release, unless that was done inside."""
        if self.state is LeaseState.HELD:
            self._end(self)
