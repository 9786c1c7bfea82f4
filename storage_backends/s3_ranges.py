"""Into how many requests what is read is cut: each of them costs both ends what some MiB do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

from kvtier.tiers.store import Span

_RANGE: Final = 4 << 20  # payload bytes a GET; a request costs about what 1 MiB of payload does,
_TAIL: Final = 2 << 20  # so that a rest of less than this joins the range before it
_GATHER_SECONDS: Final = 3e-4  # in which the other records of a fetch are asked for, too


class Ranges:
    """Of one Store. Safe from any thread. most: requests that it has in flight."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock, self._reading = threading.Lock(), 0

    @contextlib.contextmanager
    def reading(self, records: int) -> Iterator[None]:
        """Count so many records as being read."""
        self._count(records)
        try:
            yield
        finally:
            self._count(-records)

    def _count(self, records: int) -> None:
        with self._lock:
            self._reading += records

    def step(self, size: int) -> int:
        """Return the bytes of a range of what has that size: more where many records are read.

        Blocks for a moment, in which the others begin, unless they have.
        """
        if size > _RANGE + _TAIL and self._reading < self._most:
            time.sleep(_GATHER_SECONDS)
        ranges = max(self._most // max(self._reading, 1), 1)
        return max(-(-size // ranges), _RANGE)

    def lots(self, runs: Sequence[Sequence[Span]]) -> list[list[Span]]:
        """Return the spans of ``following`` in their order, those together that one request reads.

        Blocks as ``step`` does.
        """
        longest = max((_size(run) for run in runs if len(run) > 1), default=0)
        step = self.step(longest) if longest else 0
        lots: list[list[Span]] = []
        for run in runs:
            whole, at, end = _size(run), 0, -1
            for span in run:
                after = at + _size([span])
                if after > end:
                    lots.append([])
                    end = stop(at, whole, step)
                lots[-1].append(span)
                at = after
        return lots


def stop(start: int, size: int, step: int) -> int:
    """Return where a range that begins there ends."""
    return size if size - start < step + _TAIL else start + step


def following(spans: Sequence[Span]) -> list[list[Span]]:
    """Return spans in their order, those together that follow each other in one record.

    One of a record of any length is alone: where that ends too early, the ones before it may do.
    """
    runs: list[list[Span]] = []
    for span in spans:
        above = runs[-1][-1] if runs else None
        if (
            above is None
            or not span.total
            or (above.id, above.total) != (span.id, span.total)
            or above.start + _size([above]) != span.start
        ):
            runs.append([])
        runs[-1].append(span)
    return runs


def together(lot: Sequence[Span]) -> Span:
    """Return the span that spans which follow each other are together."""
    first = lot[0]
    into = [view for span in lot for view in span.into]
    return Span(first.id, first.start, into, first.total)


def _size(spans: Sequence[Span]) -> int:
    return sum(len(view) for span in spans for view in span.into)
