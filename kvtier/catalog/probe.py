"""Probe: ask a shared tier how far it has a prefix that others may have written there.

A prefix is present up to some chunk and absent after it, so its end is found by searching: at
most three rounds of at most sixteen look-ups, each round in parallel. The answer is a hint; a
read that fails later shortens the load.

Where small parts are packed, a look-up is for a run of chunks (see ``tiers.pack``). First the
longest runs are searched, the cells; then, in the cell in which they end, shorter ones.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, NamedTuple

from kvtier.clock import Clock
from kvtier.tiers.pack import Run, runs_over

_ROUNDS: Final = 3
_WIDTH: Final = 16
_TTL_SECONDS: Final = 5.0
_REMEMBERED: Final = 1 << 16


async def search(
    first: int, stop: int, order: int, ask: Callable[[Sequence[Run]], Awaitable[list[bool]]]
) -> tuple[int, list[Run]]:
    """Return the chunk behind the last of [first, stop) that is present, and the packs up to it.

    order: of the longest run; 0 where nothing is packed. ask: says for each of some runs whether
    it is present. Where three rounds do not tell exactly, the answer is below the truth; of a run
    that was not asked for, a longer prefix said that it is there.
    """
    seen = _Seen(first, stop, order)
    for _ in range(_ROUNDS):
        asked = sorted(itertools.islice(seen.worth_asking(), _WIDTH))
        if not asked:
            break
        for run, present in zip(asked, await ask(asked), strict=True):
            seen.note(run, present=present)
    return seen.end, seen.packs()


class _Seen:
    """What is known of a prefix. Every cell before one that is there is taken to be there."""

    def __init__(self, first: int, stop: int, order: int) -> None:
        self._first = first
        self._stop = stop
        self._order = order
        self._answers: dict[Run, bool] = {}
        self._low = self._cell(first).start  # the cells before this are there
        self._high = stop >> order << order  # and those from this on are not

    def _cell(self, chunk: int) -> Run:
        return Run(chunk >> self._order << self._order, self._order)

    def note(self, run: Run, *, present: bool) -> None:
        """Take an answer. Those of one round come in order."""
        self._answers[run] = present
        if run.order == self._order:
            if present and run.stop <= self._high:
                self._low = run.stop
            elif not present and self._low <= run.start < self._high:
                self._high = run.start

    def _tail(self) -> list[Run]:
        """Return the runs that are there behind the cells that are."""
        at, runs = max(self._low, self._first), []
        while at < self._stop:
            over = runs_over(at, self._stop, self._order)
            run = next((one for one in over if self._answers.get(one)), None)
            if run is None:
                break
            runs.append(run)
            at = run.stop
        return runs

    @property
    def end(self) -> int:
        """The chunk behind the last that is there, as far as is known."""
        tail = self._tail()
        return tail[-1].stop if tail else max(self._low, self._first)

    def packs(self) -> list[Run]:
        """Return the runs of more than one chunk up to there."""
        if not self._order:
            return []
        cells = range(self._cell(self._first).start, self._low, 1 << self._order)
        return [*(Run(at, self._order) for at in cells), *filter(_order, self._tail())]

    def worth_asking(self) -> Iterator[Run]:
        """Yield runs that were not asked for, each once, the ones that tell most first.

        None once no run over the first chunk that is not there is: what follows it is of no use.
        """
        at = self.end
        over = runs_over(at, self._stop, self._order)
        if at >= self._stop or all(run in self._answers for run in over):
            return
        given: dict[Run, None] = {}
        for run in itertools.chain(over, self._cells(_WIDTH + 1 - len(over)), self._within(at)):
            if run not in self._answers and run not in given:
                given[run] = None
                yield run

    def _cells(self, room: int) -> Iterator[Run]:
        """Yield cells of which it is not known whether they are there, evenly spaced."""
        low, high = self._low >> self._order, self._high >> self._order
        for place in sorted({low + (high - low) * i // room for i in range(room)}):
            if place < high:
                yield Run(place << self._order, self._order)

    def _within(self, at: int) -> Iterator[Run]:
        """Yield the shorter runs of the cell from chunk `at` on, the longest first."""
        stop = min(self._cell(at).stop, self._stop)
        for order in range(self._order - 1, -1, -1):
            for start in range(-(-at >> order) << order, stop - (1 << order) + 1, 1 << order):
                yield Run(start, order)


def _order(run: Run) -> int:
    return run.order


class Missed(NamedTuple):
    """Until when a part is not asked for, and of which tiers it is not known that they lack it.

    failed: those that could not be asked; newer: those that have it of a later version.
    """

    until: float
    failed: tuple[int, ...] = ()
    newer: tuple[int, ...] = ()


class Probe:
    """Remembers for a short time what shared tiers did not have, in bounded memory."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._absent: OrderedDict[bytes, Missed] = OrderedDict()

    def due(self, name: bytes) -> bool:
        """Say whether it is worth asking for the part: it was not found missing just now."""
        found = self._absent.get(name)
        return found is None or found.until <= self._clock()

    def asked(self, name: bytes) -> tuple[float, Missed] | None:
        """Return how many seconds ago the part was not found, and where, if that is known."""
        found = self._absent.get(name)
        return None if found is None else (self._clock() - found.until + _TTL_SECONDS, found)

    def missing(self, name: bytes, failed: Sequence[int] = (), newer: Sequence[int] = ()) -> None:
        """Remember that the part was not found. failed, newer: see Missed."""
        self._absent.pop(name, None)
        if len(self._absent) >= _REMEMBERED:
            self._absent.popitem(last=False)
        until = self._clock() + _TTL_SECONDS
        self._absent[name] = Missed(until, tuple(failed), tuple(newer))
