"""Retention: how long, and how dearly, the KV of a range of tokens is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtier.checks import check_kind, check_whole, is_number
from kvtier.errors import ConfigError, MisuseError

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
        check_whole("a retention's start", self.start, error=ConfigError)
        if self.stop is not None:
            check_whole("a retention's stop", self.stop, self.start + 1, error=ConfigError)
        check_whole("a retention's priority", self.priority, _LOWEST, _HIGHEST, ConfigError)
        if self.seconds is not None and not (is_number(self.seconds) and self.seconds > 0):
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
    check_kind("retention", retention, Sequence)
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
