"""Retention: how long, and how dearly, the KV of a range of tokens is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtier.errors import ConfigError, MisuseError

__all__ = ["Retention", "Term", "terms"]

_LOWEST: Final = -100
_HIGHEST: Final = 100


@dataclass(frozen=True, slots=True)
class Retention:
    """How the chunks that overlap tokens [start, stop) are kept. stop: None for the prompt's end.

    priority: from -100 to 100; all that may leave of a lower one leaves before any of a higher
    one. seconds: after that the parts are withdrawn from all tiers, None for never. It is counted
    from the save, and kept in memory only: what a durable or a shared tier has when the process
    ends is there without an end, and without priority, afterwards.
    """

    start: int
    stop: int | None
    priority: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        stop = self.stop
        if not _whole(self.start) or not (stop is None or _whole(stop)):
            raise ConfigError(f"a retention's start and stop are token places, not {self}")
        if self.start < 0 or (stop is not None and self.start >= stop):
            raise ConfigError(
                f"a retention must have 0 <= start < stop, not {self.start}..{self.stop}"
            )
        if not _whole(self.priority) or not _LOWEST <= self.priority <= _HIGHEST:
            raise ConfigError(
                f"a retention's priority is a whole number from {_LOWEST} to {_HIGHEST}, not "
                f"{self.priority!r}"
            )
        if self.seconds is not None and not (_number(self.seconds) and self.seconds > 0):
            raise ConfigError(
                f"a retention's seconds must be above 0, or None for ever, not {self.seconds!r}"
            )


class Term(NamedTuple):
    """What holds for one chunk."""

    priority: int = 0
    seconds: float = math.inf


def terms(retention: Sequence[Retention], chunks: int, size: int) -> list[Term]:
    """Return for each of some chunks of `size` tokens what holds for it; none given, nothing.

    Where ranges overlap a chunk, the highest priority and the shortest time hold.
    Raises MisuseError for anything but Retentions.
    """
    if not retention:
        return []
    priorities: list[int | None] = [None] * chunks
    seconds = [math.inf] * chunks
    for one in retention:
        if not isinstance(one, Retention):
            raise MisuseError(f"retention takes kvtier.Retention, not {one!r}")
        stop = chunks if one.stop is None else min(-(-one.stop // size), chunks)
        for chunk in range(one.start // size, stop):
            before = priorities[chunk]
            priorities[chunk] = one.priority if before is None else max(before, one.priority)
            if one.seconds is not None:
                seconds[chunk] = min(seconds[chunk], one.seconds)
    return [Term(level or 0, until) for level, until in zip(priorities, seconds, strict=True)]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
