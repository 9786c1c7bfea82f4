"""Ages: which rows of a tier were not used for a given time, beside whatever policy it has."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from typing import Final

_STEPS: Final = 16
"""Steps of time in a life. Rows are as old as their step, and so may stay a step longer."""


class Ages:
    """Rows by the step of time in which they were used last. seconds: that they may go unused."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._length = seconds / _STEPS
        self._steps: dict[int, int] = {}  # by row
        self._rows: dict[int, dict[int, None]] = {}  # by step
        self._order: list[int] = []  # steps, oldest first

    def __len__(self) -> int:
        """Rows in the tier."""
        return len(self._steps)

    def enter(self, row: int) -> None:
        """A row came into the tier."""
        self._put(row, int(self._clock() / self._length))

    def used(self, rows: Iterable[int]) -> None:
        """Rows were used; those that are not in the tier are passed over."""
        step = int(self._clock() / self._length)
        steps = self._steps
        for row in rows:
            if steps.get(row, step) != step:
                self._put(row, step)

    def leave(self, row: int) -> None:
        """A row left the tier."""
        step = self._steps.pop(row, None)
        if step is not None:
            del self._rows[step][row]

    def overdue(self, most: int) -> list[int]:
        """Return rows whose time is over, those that came last in their step first.

        Who keeps such a row does nothing: it is told again a step later.
        """
        last = self._last
        found: list[int] = []
        while self._order and self._order[0] <= last and len(found) < most:
            rows = self._rows[self._order[0]]
            while rows and len(found) < most:
                found.append(rows.popitem()[0])
            if not rows:
                del self._rows[self._order.pop(0)]
        for row in found:
            del self._steps[row]
            self._put(row, last + 1)
        return found

    def waiting(self) -> bool:
        """Say whether some row's time may be over."""
        return bool(self._order) and self._order[0] <= self._last

    @property
    def _last(self) -> int:
        """The newest step that is over for as long as rows may go unused."""
        return int(self._clock() / self._length) - _STEPS - 1

    def _put(self, row: int, step: int) -> None:
        self.leave(row)
        rows = self._rows.get(step)
        if rows is None:
            rows = self._rows[step] = {}
            insort(self._order, step)
        rows[row] = None
        self._steps[row] = step
