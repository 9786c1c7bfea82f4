"""Leases: counted holds on slots, each with a deadline, each with one owner."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol, Self, TypeVar

from kvtier.catalog.pins import Pins
from kvtier.catalog.shelf import Room
from kvtier.checks import check_ahead
from kvtier.clock import Clock
from kvtier.errors import MisuseError
from kvtier.identity.record import RecordId
from kvtier.memory.arena import Slot
from kvtier.memory.packed import unpack_slots
from kvtier.metrics import Metrics

T = TypeVar("T")


class LeaseState(enum.Enum):
    """Where a lease is in its life."""

    HELD = "held"
    RELEASED = "released"
    EXPIRED = "expired"


class Lease:
    """A hold on the slots of a run of chunks, so that they can be copied to the engine.

    first: index of the first chunk. tokens: the length of the prefix that can be continued with
    what is held, counted from the prompt's first token. names and slots: of each chunk, those of
    the parts that such a prefix needs; packed: all these slots, in one. rows: of these parts, in
    one list; none where the index is a daemon's. sources: for each chunk, the tier that its bytes
    came from. It ends by ``release`` (or ``with``), or at its deadline; a CopyPlan issued before
    that keeps the slots until the copy has settled.
    pinned: the number of the cache whose pin it is; it ends with that too. 0 for no pin.
    asked: seconds in which a shared tier was asked what it has, before anything was read.
    """

    __slots__ = (
        "_keeper",
        "_slots",
        "asked",
        "deadline",
        "first",
        "names",
        "packed",
        "pinned",
        "plans",
        "rows",
        "serial",
        "sources",
        "state",
        "tokens",
    )

    def __init__(
        self,
        first: int,
        tokens: int,
        names: Sequence[Sequence[RecordId]],
        rows: list[int],
        packed: bytes,
        deadline: float,
        keeper: Keeper,
    ) -> None:
        self.first = first
        self.tokens = tokens
        self.names = names
        self.rows = rows
        self.packed = packed
        self.sources = ("dram",) * len(names)
        self.asked = 0.0
        self.deadline = deadline
        self.state = LeaseState.HELD
        self.plans = 0
        self.pinned = 0
        self.serial = 0
        self._keeper = keeper
        self._slots: tuple[tuple[Slot, ...], ...] | None = None

    @property
    def chunks(self) -> int:
        """How many chunks are held."""
        return len(self.names)

    @property
    def slots(self) -> tuple[tuple[Slot, ...], ...]:
        """For each chunk, the slots of the parts that it is needed for; made when first asked."""
        if self._slots is None:
            self._slots = by_chunk(unpack_slots(self.packed), self.names)
        return self._slots

    @property
    def held(self) -> bool:
        """Whether it has neither been released nor found past its deadline."""
        return self.state is LeaseState.HELD

    def release(self) -> None:
        """End the lease. A no-op after its deadline.

        Raises MisuseError when it was released before, or in a forked child.
        """
        if self.state is LeaseState.RELEASED:
            raise MisuseError("this lease was released before")
        self._keeper.end_lease(self)

    def renew(self, seconds: float) -> bool:
        """Move the deadline to so many seconds from now. Memory only.

        False when the lease has ended, by release or by its deadline: a renewal comes before
        that. Raises MisuseError for seconds that are not ahead, or in a forked child.
        """
        check_ahead("a lease's deadline", seconds)
        return self._keeper.renew_lease(self, seconds)

    def __enter__(self) -> Self:
        """Return the lease."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release, unless that was done inside."""
        if self.state is LeaseState.HELD:
            self._keeper.end_lease(self)


class Keeper(Protocol):
    """Where a lease is kept: the Catalog."""

    def end_lease(self, lease: Lease) -> None:
        """End a lease that its owner releases."""
        ...

    def renew_lease(self, lease: Lease, seconds: float) -> bool:
        """Move its deadline; False when it has ended."""
        ...


class Leases:
    """All leases that still hold something. Called under the Catalog's lock."""

    def __init__(self, room: Room, clock: Clock, metrics: Metrics) -> None:
        self._room = room
        self._clock = clock
        self._metrics = metrics
        self._all: dict[int, Lease] = {}
        self._serial = 0
        self.pins = Pins(room.index, room.arena)

    def __len__(self) -> int:
        """Leases that hold slots."""
        return len(self._all)

    @property
    def quarantined(self) -> int:
        """Slots whose lease has ended while a copy may still use them."""
        ended = (lease for lease in self._all.values() if lease.state is not LeaseState.HELD)
        return sum(len(lease.rows) for lease in ended)

    def keeps(self, lease: Lease) -> bool:
        """Say whether it is one of these, and holds something still."""
        return self._all.get(lease.serial) is lease

    def new(
        self,
        first: int,
        tokens: int,
        names: Sequence[Sequence[RecordId]],
        rows: list[int],
        seconds: float,
        keeper: Keeper,
        pin: int = 0,
    ) -> Lease | None:
        """Hold parts that are in DRAM, of chunks from `first` on, and make a lease of them.

        rows: of all these parts, none of them twice. pin: the number of the cache that pins them;
        None then when that were too much.
        """
        index = self._room.index
        if pin and not self.pins.fit((row, index.raw_bytes[row]) for row in rows):
            self._metrics.add("refused_pins")
            return None
        packed = index.hold_all(rows)
        lease = Lease(first, tokens, names, rows, packed, self._clock() + seconds, keeper)
        lease.serial = self._serial = self._serial + 1
        self._all[lease.serial] = lease
        if pin:
            lease.pinned = pin
            self.pins.add(rows)
        return lease

    def end(self, lease: Lease, state: LeaseState) -> None:
        """End a lease, once; its slots are let go when no plan uses them."""
        if lease.state is LeaseState.HELD:
            lease.state = state
            self.drop(lease)

    def expire(self) -> None:
        """End the leases whose deadline has passed."""
        now = self._clock()
        for lease in [one for one in self._all.values() if one.deadline <= now]:
            if lease.state is LeaseState.HELD:
                if not lease.pinned:  # a pin is meant to end so
                    self._metrics.add("expired_leases")
                self.end(lease, LeaseState.EXPIRED)

    def renew(self, lease: Lease, seconds: float) -> bool:
        """Move a lease's deadline; False when it has ended."""
        self.expire()
        if lease.state is LeaseState.HELD:
            lease.deadline = self._clock() + seconds
        return lease.state is LeaseState.HELD

    def unpin(self, pinned: int) -> None:
        """End all pins of one cache."""
        for lease in [one for one in self._all.values() if one.pinned == pinned]:
            self.end(lease, LeaseState.EXPIRED)

    def drop(self, lease: Lease) -> None:
        """Let go of what an ended lease holds, unless a plan still uses it."""
        if lease.state is not LeaseState.HELD and not lease.plans:
            del self._all[lease.serial]
            if lease.pinned:
                self.pins.drop(lease.rows)
            self._room.unhold(lease.rows)


def by_chunk(values: Iterable[T], names: Sequence[Sequence[RecordId]]) -> tuple[tuple[T, ...], ...]:
    """Return values, one for each name, grouped as the names are."""
    each = iter(values)
    sizes = set(map(len, names))
    if len(sizes) == 1:  # no loop in Python
        return tuple(zip(*[each] * sizes.pop(), strict=True))
    return tuple(tuple(itertools.islice(each, len(parts))) for parts in names)
