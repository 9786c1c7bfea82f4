"""Load or recompute: what each takes on this machine, learnt from what it took.

A fetch tells how long a tier takes for so many bytes, the engine's steps how long the model takes
for so many tokens. From both follows where loading a prompt stops paying (``kvtier.cut``).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Literal

from kvtier.clock import Clock
from kvtier.cut import Ahead, Speed, best_cut, slowest

__all__ = ["LEAST_SPAN", "Advice", "Costs", "Line", "Prefill", "Reading"]

_OLD: Final = 0.7
"""What an observation of a tier still weighs when the next one comes: weather changes fast."""

_OLD_STEP: Final = 0.95
"""The same of an engine's steps: its speed is the machine's."""

_NEWS: Final = 0.5
"""A read that took less than this part of what was expected: the tier is another than before."""

_FASTER: Final = 0.25
"""Of what was expected, the least that a step counts as: one wrong time outweighs no others."""

LEAST_SPAN: Final = 16
"""Tokens of the longest span of a step that tells of prefill; shorter ones are decode steps."""

_MEET: Final = 0.85
"""Meeting in the middle must take at most this part of the best other way: it costs compute."""

_PROBE_SECONDS: Final = 5.0
_PROBE_MOST_SECONDS: Final = 80.0

Choice = Literal["load", "cut", "recompute", "meet"]


@dataclass(frozen=True, slots=True)
class Advice:
    """What to load of a prompt.

    tokens: load up to here; what follows is to be computed. begin: the first token to load, while
    the engine computes those before it; 0 when all are loaded first. seconds: what this is
    estimated to take until the whole prompt is there, and recompute: without a load; 0 when the
    model's speed is not known yet. A tier whose speed is not known yet counts as no time.
    skipped: the tier that lost, if one did.
    """

    choice: Choice
    tokens: int
    begin: int = 0
    seconds: float = 0.0
    recompute: float = 0.0
    skipped: str = ""


class Line:
    """Seconds of a tier's reads as ``latency + bytes * per_byte``; least squares, old ones fading.

    Not safe from several threads.
    """

    def __init__(self) -> None:
        self.latency = self.per_byte = 0.0
        self.known = False
        self._forget()

    def _forget(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Take note that `nbytes`, those queued before them included, took `seconds`."""
        if self.known and seconds < _NEWS * self.seconds(nbytes):
            self._forget()
        self._n = self._n * _OLD + 1
        self._x = self._x * _OLD + nbytes
        self._y = self._y * _OLD + seconds
        self._xx = self._xx * _OLD + nbytes * nbytes
        self._xy = self._xy * _OLD + nbytes * seconds
        self.known = True
        spread = self._n * self._xx - self._x * self._x
        # Sizes that hardly differ tell nothing of the latency: all of it is the rate's then.
        if spread > 0.01 * self._n * self._xx:
            self.per_byte = max((self._n * self._xy - self._x * self._y) / spread, 0.0)
            self.latency = (self._y - self.per_byte * self._x) / self._n
        else:
            self.latency = -1.0
        if self.latency < 0:
            self.latency, self.per_byte = 0.0, self._xy / self._xx

    def seconds(self, nbytes: int) -> float:
        """Return what so many bytes are estimated to take."""
        return self.latency + nbytes * self.per_byte


class Prefill:
    """Seconds of the tokens [start, stop) of a prompt: ``a * tokens + b * pairs``.

    pairs: of a token and one that it attends to. Least squares of the relative errors.
    Not safe from several threads.
    """

    def __init__(self) -> None:
        self.per_token = self.per_pair = 0.0
        self.known = False
        self._tt = self._tp = self._pp = self._t = self._p = 0.0

    def add(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """Take note that a step of these spans of tokens, one of each request, took `seconds`."""
        if seconds <= 0 or max((stop - start for start, stop in spans), default=0) < LEAST_SPAN:
            return
        if self.known:
            seconds = max(seconds, _FASTER * sum(self.seconds(*span) for span in spans))
        tokens = sum(stop - start for start, stop in spans) / seconds
        pairs = sum(_pairs(start, stop) for start, stop in spans) / seconds
        self._tt = self._tt * _OLD_STEP + tokens * tokens
        self._tp = self._tp * _OLD_STEP + tokens * pairs
        self._pp = self._pp * _OLD_STEP + pairs * pairs
        self._t = self._t * _OLD_STEP + tokens
        self._p = self._p * _OLD_STEP + pairs
        self.known = True
        spread = self._tt * self._pp - self._tp * self._tp
        a = b = -1.0
        if spread > 1e-6 * self._tt * self._pp:
            a = (self._t * self._pp - self._p * self._tp) / spread
            b = (self._p * self._tt - self._t * self._tp) / spread
        if a < 0 or b < 0:
            a, b = self._t / self._tt, 0.0
        self.per_token, self.per_pair = a, b

    def seconds(self, start: int, stop: int) -> float:
        """Return what computing these tokens is estimated to take."""
        return (stop - start) * self.per_token + _pairs(start, stop) * self.per_pair


@dataclass(frozen=True, slots=True)
class Reading:
    """A read from below DRAM that is under way.

    tier: that most is read from; "" while nobody knows. nbytes: what is read there; queued: that,
    and what was before it. recompute: seconds that computing instead is estimated to take.
    """

    tier: str
    nbytes: int
    queued: int
    began: float
    recompute: float


class Costs:
    """The estimates of one cache. Memory only, and safe from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tiers: dict[str, Line] = {}
        self._queued: dict[str, int] = {}
        self._numbers = {"dram": "\0"}  # of each tier whose speed is known; the others have none
        self._prefill = Prefill()
        self._probes: dict[str, tuple[float, float]] = {}  # when the next is due, and its interval

    # ---- what is known beforehand

    def believe_tier(self, tier: str, latency: float, per_byte: float) -> None:
        """Take a tier for one that answers after `latency` seconds, `per_byte` each, until read."""
        with self._lock:
            line = self._known(tier)
            line.latency, line.per_byte, line.known = latency, per_byte, True

    def believe_prefill(self, per_token: float, per_pair: float = 0.0) -> None:
        """Take the model for one that computes in so many seconds, until a step has told."""
        with self._lock:
            self._prefill.per_token, self._prefill.per_pair = per_token, per_pair
            self._prefill.known = True

    # ---- what was seen

    def computed(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """Take note of a step: it computed tokens [start, stop) of some requests."""
        with self._lock:
            self._prefill.add(spans, seconds)

    def begin(self, tier: str, nbytes: int, recompute: float) -> Reading:
        """Take note that a read begins; see Reading."""
        with self._lock:
            queued = self._queued[tier] = self._queued.get(tier, 0) + nbytes
        return Reading(tier, nbytes, queued, self._clock(), recompute)

    def end(self, reading: Reading, tier: str, arrived: int, asked: float = 0.0) -> float:
        """Take note that a read has ended, and `arrived` bytes of `tier` are here.

        asked: seconds of it in which nothing was read yet.
        Returns its seconds. One that brought nothing says nothing of a tier's speed.
        """
        seconds = self._clock() - reading.began
        with self._lock:
            self._queued[reading.tier] -= reading.nbytes
            if arrived > 0:
                before = reading.queued - reading.nbytes if tier == reading.tier else 0
                line = self._known(tier)
                line.add(before + arrived, max(seconds - asked, 0.0))
        return seconds

    def overdue(self, reading: Reading, tier: str, nbytes: int) -> None:
        """Take note that a read ended with its time, and brought nothing of so many bytes.

        The tier takes longer than that.
        """
        seconds = self._clock() - reading.began
        nbytes = reading.queued if tier == reading.tier else nbytes
        with self._lock:
            line = self._known(tier)
            if seconds > line.seconds(nbytes):
                line.add(nbytes, seconds)

    # ---- what follows

    def figures(self) -> Mapping[str, tuple[float, float]]:
        """Return latency in seconds, and bytes a second, of each tier that was read."""
        with self._lock:
            return {
                name: (line.latency, 1 / line.per_byte if line.per_byte else 0.0)
                for name, line in self._tiers.items()
            }

    def slowest(self, nbytes: Mapping[str, int]) -> str:
        """Return the tier whose bytes are estimated to take longest: of equals, the first."""
        with self._lock:
            return self._slowest(nbytes)

    def recompute(self, start: int, stop: int) -> float:
        """Return the seconds that computing tokens [start, stop) takes; 0 when not known yet."""
        with self._lock:
            return self._prefill.seconds(start, stop)

    def advise(
        self,
        tiers: Sequence[str],
        computed: int,
        tokens: int,
        chunk: tuple[int, int],
        *,
        whole: bool,
        meet: bool,
    ) -> Advice:
        """Say what of a match to load.

        tiers: of each chunk that is matched; computed: tokens that the engine has; tokens: those
        of the match. chunk: its tokens, and bytes. whole: any part of the match is usable too,
        as of a model of full attention. meet: the engine can compute while it loads.
        A tier, or a model, whose speed is not known yet is given a try.
        """
        with self._lock:
            first = computed // chunk[0]
            behind = tiers[first:]
            alone = _alone(behind)
            if not self._prefill.known or not behind or (alone and behind[0] == "dram"):
                return Advice("load", tokens)
            ahead = self._ahead(behind, (first, tokens), chunk, alone=alone)
            best = recompute = self._prefill.seconds(computed, tokens)
            stop = first
            load, count = best_cut(ahead) if whole else (slowest(ahead)[0], len(behind))
            if load <= best:
                best, stop = load, first + count
            if whole and meet and alone:
                begin, seconds = self._middle(behind[0], (computed, len(tiers)), chunk)
                if begin and seconds <= _MEET * best:
                    return Advice("meet", tokens, begin, seconds, recompute)
            cut = min(max(stop * chunk[0], computed), tokens)
            if cut == tokens:
                return Advice("load", tokens, 0, best, recompute)
            choice: Choice = "cut" if stop > first else "recompute"
            skipped = tiers[stop] if whole else self._loser(behind, ahead)
            return Advice(choice, cut, 0, best, recompute, skipped)

    def _known(self, tier: str) -> Line:
        """Return what is known of a tier of which something is."""
        if tier != "dram" and tier not in self._tiers:
            self._numbers[tier] = chr(1 + len(self._tiers))
        return self._tiers.setdefault(tier, Line())

    def _line(self, tier: str) -> Line:
        """Return what is known of a tier; one that is not known yet takes no time."""
        return self._tiers.get(tier) or Line()

    def _slowest(self, nbytes: Mapping[str, int]) -> str:
        return max(nbytes, key=lambda tier: self._line(tier).seconds(nbytes[tier]))

    def _ahead(
        self, tiers: Sequence[str], at: tuple[int, int], chunk: tuple[int, int], *, alone: bool
    ) -> Ahead:
        """Return chunks that lie in these tiers, as what cuts them sees them.

        at: the first chunk, and the tokens of the match. alone: all are in one tier.
        """
        numbers = self._numbers
        if alone:
            where = numbers.get(tiers[0], "\0") * len(tiers)
        else:
            try:
                where = "".join(itemgetter(*tiers)(numbers))  # no loop in Python
            except KeyError:
                where = "".join(numbers.get(tier, "\0") for tier in tiers)
        speeds = {}
        for tier, line in self._tiers.items():
            if tier != "dram" and numbers[tier] in where:
                queued = self._queued.get(tier, 0)
                speeds[ord(numbers[tier])] = Speed(line.seconds(queued), line.per_byte * chunk[1])
        prefill = self._prefill
        speed = prefill.per_token, prefill.per_pair
        return Ahead(where.encode("latin-1"), speeds, at[0], chunk[0], at[1], *speed)

    def _loser(self, tiers: Sequence[str], ahead: Ahead) -> str:
        """Return the tier that takes longest of chunks that are loaded together or not at all."""
        return tiers[ahead.where.index(slowest(ahead)[1])]

    def _middle(
        self, tier: str, span: tuple[int, int], chunk: tuple[int, int]
    ) -> tuple[int, float]:
        """Return where a load from the back meets the engine that computes from the front.

        With the seconds until then; 0 and no time for a tier that is not known. span: the token
        where the engine begins, and the chunks of the match, of which the tier has all others.
        """
        computed, stop = span
        first = computed // chunk[0]
        if computed % chunk[0] or tier not in self._tiers:
            return 0, 0.0
        line, queued = self._tiers[tier], self._queued.get(tier, 0)

        def both(at: int) -> tuple[float, float]:
            load = line.seconds((stop - at) * chunk[1] + queued)
            return self._prefill.seconds(computed, at * chunk[0]), load

        low, high = first + 1, stop - 1  # the first chunk that takes longer to compute to
        while low < high:
            middle = (low + high) // 2
            compute, load = both(middle)
            low, high = (low, middle) if compute >= load else (middle + 1, high)
        if low >= stop:
            return 0, 0.0
        best = min((max(both(at)), at) for at in (max(low - 1, first + 1), low))
        return best[1] * chunk[0], best[0]

    # ---- tiers that lose

    def probe_due(self, tier: str) -> bool:
        """Say whether a tier that is skipped is to be tried again now; then the next is later."""
        now = self._clock()
        with self._lock:
            due, interval = self._probes.get(tier, (now, _PROBE_SECONDS))
            if now < due:
                return False
            self._probes[tier] = (now + interval, min(2 * interval, _PROBE_MOST_SECONDS))
            return True

    @property
    def losing(self) -> bool:
        """Whether a tier has lost, and is tried now and then."""
        return bool(self._probes)

    def wins(self, tier: str) -> None:
        """Take note that a tier is worth loading from: when it loses next, try again soon."""
        with self._lock:
            self._probes.pop(tier, None)


def _pairs(start: int, stop: int) -> float:
    return (stop * stop - start * start) / 2


def _alone(tiers: Sequence[str]) -> bool:
    """Say whether there are chunks, and all in one tier. One of a tuple in C."""
    if not tiers or tiers[0] != tiers[-1]:
        return False
    return tiers.count(tiers[0]) == len(tiers)
