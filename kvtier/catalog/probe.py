"""Probe: ask a shared tier how far it has a prefix that others may have written there.

A prefix is present up to some chunk and absent after it, so its end is found by searching: at
most three rounds of at most sixteen look-ups, each round in parallel. The answer is a hint; a
read that fails later shortens the load.

Where small parts are packed, a look-up is for a run of chunks (see ``tiers.pack``). First the
longest runs are searched, the cells; then, in the cell in which they end, shorter ones.

Of windows and states the last chunks of what was found are asked for, in one of these rounds.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvtier.clock import Clock
from kvtier.identity.shape import Shape
from kvtier.tiers.pack import Run, runs_over

_ROUNDS: Final = 3
_WIDTH: Final = 16
_TTL_SECONDS: Final = 5.0
_REMEMBERED: Final = 1 << 16
_SPREAD: Final = 4  # look-ups for a window, where there are states too
_BACK: Final = 8  # chunks before the end at which a window may end, where there are no states


def rounds(shape: Shape, grids: int) -> Iterator[int]:
    """Yield in how many rounds each of some grids may be searched.

    Together three at most, with the one that windows and states take; each has one, though.
    """
    left = _ROUNDS if shape.plain or not shape.always else _ROUNDS - 1
    for grid in range(grids):
        share = max(-(-left // (grids - grid)), 1)
        left -= share
        yield share


async def search(
    first: int,
    stop: int,
    order: int,
    ask: Callable[[Sequence[Run]], Awaitable[list[bool]]],
    most: int = _ROUNDS,
) -> tuple[int, list[Run]]:
    """Return the chunk behind the last of [first, stop) that is present, and the packs up to it.

    order: of the longest run; 0 where nothing is packed. ask: says for each of some runs whether
    it is present. Where so many rounds do not tell exactly, the answer is below the truth; of a run
    that was not asked for, a longer prefix said that it is there.
    """
    seen = _Seen(first, stop, order)
    for _ in range(most):
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


class Ends(NamedTuple):
    """What to ask for of a component at a prefix's end: its parts of a chunk, and the chunks.

    window: what is between two chunks that it has, it has too.
    """

    places: tuple[int, ...]
    chunks: tuple[int, ...]
    window: bool

    def there(self, answers: Mapping[int, bool]) -> list[int]:
        """Return the chunks that it has, by what was answered for those that were asked for."""
        found = [chunk for chunk in self.chunks if answers[chunk]]
        if self.window:
            for before, after in itertools.pairwise(self.chunks):
                if answers[before] and answers[after]:
                    found += range(before + 1, after)
        return sorted(found)


def ends(shape: Shape, stop: int) -> list[Ends]:
    """Return what to ask for at the end of a prefix of so many chunks: sixteen look-ups at most.

    A window reaches back by its length from wherever a state may be, and is looked for at some
    of these chunks; states are, at each of the last ones.
    """
    windows = _alike(shape, [at for at, _ in shape.windows])
    states = _alike(shape, shape.states)
    each = max(_WIDTH // max(len(windows) + len(states), 1), 1)
    spread = min(each, _SPREAD) if states else each
    back = (_WIDTH - spread * len(windows)) // len(states) if states else _BACK
    back = min(max(back, 1), stop)
    lengths = dict(shape.windows)
    found = []
    for places in windows:
        span = min(-(-lengths[places[0]] // shape.chunk_tokens) + back, stop)
        steps = [(span - 1) * step // max(spread - 1, 1) for step in range(spread)]
        found.append(Ends(places, tuple(sorted({stop - 1 - step for step in steps})), window=True))
    last = tuple(range(stop - back, stop))
    found += [Ends(places, last, window=False) for places in states]
    return found[:_WIDTH]


def _alike(shape: Shape, places: Iterable[int]) -> list[tuple[int, ...]]:
    """Return places together that are of one component."""
    kinds: dict[int, list[int]] = {}
    for at in places:
        kinds.setdefault(shape.names[at].component, []).append(at)
    return [tuple(one) for one in kinds.values()]


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
