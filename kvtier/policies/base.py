"""The policy contract: in which order parts leave a tier. Shared with the simulator."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Policy(Protocol):
    """Orders the rows of one tier. Rows are small integers; calls come under one lock.

    A row's number may come to mean another part once it has left. A part's key never does: a
    policy that remembers what has left remembers keys.
    """

    def insert(self, row: int, key: Hashable, parent: int = -1) -> None:
        """A part came into the tier, or came again.

        parent: the row of the part that it continues, if any. Where that is in the tier the new
        one had better leave before it, or it is asked for in vain: it can only leave after it.
        """
        ...

    def touch(self, rows: Sequence[int]) -> None:
        """Parts were used, in this order; those that are not in the tier are passed over.

        A chain comes deepest-first, so that its head is newest.
        """
        ...

    def remove(self, row: int, *, evicted: bool = True) -> None:
        """A part left the tier; not `evicted`, it is only set aside. A no-op for a stranger."""
        ...

    def victims(self) -> Iterator[int]:
        """Yield rows, first to leave first.

        While this is read, rows that it has yielded may be removed; nothing else changes.
        """
        ...

    def __iter__(self) -> Iterator[int]:
        """Yield every row, about in the order in which they would leave; changes nothing."""
        ...

    def __len__(self) -> int:
        """Rows in the tier."""
        ...


@runtime_checkable
class FillablePolicy(Policy, Protocol):
    """A policy into which many parts can come at once."""

    def fill(self, rows: Sequence[int], parents: Sequence[int]) -> None:
        """Do as ``insert`` would for each row, in this order; all of them are new here."""
        ...


@runtime_checkable
class RenewablePolicy(Policy, Protocol):
    """A policy that counts uses: it is told what is no other use, but goes on."""

    def renew(self, rows: Sequence[int]) -> None:
        """Parts that were used are in use still; see ``Policy.touch``."""
        ...
