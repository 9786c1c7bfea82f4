"""Who touched which bytes last, and which two accesses are not ordered. See ``race``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

from kvtier.errors import MisuseError

Region = NDArray[Any] | tuple[int, int]
"""Bytes that work touches: an array, strided or not, or addresses [low, high)."""

Clock = Mapping[str, int]
"""How many operations of each stream and thread are behind."""

Span = tuple[int, int]
_Kind = Literal["write, read", "write, write", "read, write", "failed, read"]


@dataclass(slots=True)
class Operation:
    """One piece of work. actor: its stream or thread, of which it is number `tick`."""

    actor: str
    tick: int
    name: str
    failed: bool = False

    def before(self, clock: Clock) -> bool:
        """Say whether who has this clock comes after it."""
        return clock.get(self.actor, 0) >= self.tick


@dataclass(frozen=True, slots=True)
class Race:
    """Two operations on the same bytes [low, high), of which no fence says which comes first.

    kind: what the first did and the second does. "failed" stands for a write that has failed, so
    that the bytes that the second reads mean nothing.
    """

    kind: _Kind
    first: str
    second: str
    low: int
    high: int

    def __str__(self) -> str:
        where = f"{self.high - self.low} bytes at {self.low:#x}"
        did, does = self.kind.split(", ")
        if did == "failed":
            return f"{self.second} reads {where}, which {self.first} has failed to write"
        return (
            f"{self.second} {does}s {where}, which {self.first} {did}s, and nothing orders the "
            f"two: let the second come after a fence of the first"
        )


class RaceError(MisuseError):
    """Two operations are not ordered. The message names both."""


@dataclass(slots=True)
class _Cell:
    """Bytes with one history: the last write, and each actor's last read since."""

    low: int
    high: int
    write: Operation | None = None
    reads: dict[str, Operation] = field(default_factory=dict)


class History:
    """What touched which bytes last: cells in the order of their addresses, none overlapping."""

    def __init__(self) -> None:
        self._lows: list[int] = []
        self._ordered: list[_Cell] = []

    def races(
        self, operation: Operation, reads: Sequence[Span], writes: Sequence[Span], clock: Clock
    ) -> list[Race]:
        """Return the races of an operation, one for each other operation and kind."""
        found: dict[tuple[str, str], Race] = {}

        def note(kind: _Kind, last: Operation, cell: _Cell) -> None:
            race = Race(kind, last.name, operation.name, cell.low, cell.high)
            found.setdefault((kind, last.name), race)

        for cell in self._cells(reads):
            last = cell.write
            if last is not None and not last.before(clock):
                note("write, read", last, cell)
            elif last is not None and last.failed:
                note("failed, read", last, cell)
        for cell in self._cells(writes):
            if cell.write is not None and not cell.write.before(clock):
                note("write, write", cell.write, cell)
            for last in cell.reads.values():
                if not last.before(clock):
                    note("read, write", last, cell)
        return list(found.values())

    def note(self, operation: Operation, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        """Take down what an operation accesses."""
        for cell in self._cells(reads):
            cell.reads[operation.actor] = operation
        for cell in self._cells(writes):
            cell.write, cell.reads = operation, {}

    def _cells(self, ranges: Sequence[Span]) -> Iterator[_Cell]:
        """Yield the cells of ranges, one range after another."""
        for span in ranges:
            yield from self._over(*span)

    def _over(self, low: int, high: int) -> list[_Cell]:
        """Return cells that cover [low, high) exactly; those across its ends are cut."""
        at = bisect_right(self._lows, low)
        if at and self._ordered[at - 1].high > low:
            at -= 1
            if self._ordered[at].low < low:
                self._cut(at, low)
                at += 1
        first = at
        while low < high:
            if at == len(self._ordered) or self._ordered[at].low > low:
                end = high if at == len(self._ordered) else min(high, self._lows[at])
                self._insert(at, _Cell(low, end))
            elif self._ordered[at].high > high:
                self._cut(at, high)
            low = self._ordered[at].high
            at += 1
        return self._ordered[first:at]

    def _cut(self, at: int, middle: int) -> None:
        cell = self._ordered[at]
        self._insert(at + 1, _Cell(middle, cell.high, cell.write, dict(cell.reads)))
        cell.high = middle

    def _insert(self, at: int, cell: _Cell) -> None:
        self._ordered.insert(at, cell)
        self._lows.insert(at, cell.low)


def join(clock: dict[str, int], other: Clock) -> None:
    """Let who has `clock` come after what `other` says."""
    for actor, tick in other.items():
        if tick > clock.get(actor, 0):
            clock[actor] = tick


def _array_spans(array: NDArray[Any]) -> list[Span]:
    """Return the addresses of an array's bytes, as few ranges as its strides allow."""
    if not array.size:
        return []
    outer: list[tuple[int, int]] = []
    run = array.itemsize
    for length, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if length > 1 and stride == run and not outer:
            run *= length
        elif length > 1:
            outer.append((length, stride))
    starts = [int(array.__array_interface__["data"][0])]
    for length, stride in reversed(outer):
        starts = [start + stride * number for start in starts for number in range(length)]
    return [(start, start + run) for start in starts]


def spans(regions: Sequence[Region]) -> list[Span]:
    """Return the addresses of regions' bytes."""
    return [
        span
        for region in regions
        for span in ([region] if isinstance(region, tuple) else _array_spans(region))
    ]
