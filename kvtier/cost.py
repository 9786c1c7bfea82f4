"""Load or recompute: what each takes on this machine, learnt from what it took.

A fetch tells how long a tier takes for so many bytes, the engine's steps how long the model takes
for so many tokens. From both follows where loading a prompt stops paying (``kvtier.cut``).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

from kvtier.clock import Clock
from kvtier.cut import Ahead, Speed, best_cut, middle, slowest

_OLD: Final = 0.7
"""What an observation of a tier still weighs when the next one comes: weather changes fast."""

_OLD_STEP: Final = 0.95
"""The same of an engine's steps: its speed is the machine's."""

_NEWS: Final = 0.5
"""A read that took less than this part of what was expected: the tier is another than before."""

_FASTER: Final = 0.25
"""Of what was expected, the least that a step counts as: one wrong time outweighs no others."""

_LATER: Final = 2.0
"""How many times what was expected a read is taken to need that brought nothing in its time."""

LEAST_SPAN: Final = 16
"""Tokens of the longest span of a step that tells of prefill; shorter ones are decode steps."""

_MEET: Final = 0.85
"""Meeting in the middle must take at most this part of the best other way: it costs compute."""

_PROBE_SECONDS: Final = 5.0
_PROBE_MOST_SECONDS: Final = 20.0
"""A tier that hung for long is back in use within half a minute of its recovery."""

Choice = Literal["load", "cut", "recompute", "meet"]
CHOICES: Final[tuple[Choice, ...]] = get_args(Choice)


class Advice(NamedTuple):
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

    def late(self, nbytes: int, seconds: float) -> None:
        """Believe that `nbytes` take at least `seconds`, whatever was before."""
        self._forget()
        self.add(nbytes, seconds)

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
    and what was before it. estimate: seconds that this is estimated to take, 0 when that is not
    known yet; recompute: those of computing instead.
    """

    tier: str
    nbytes: int
    queued: int
    began: float
    estimate: float
    recompute: float


class Costs:
    """The estimates of one cache. Memory only, and safe from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tiers: dict[str, Line] = {}
        self._queued: dict[str, int] = {}
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
            estimate = self._line(tier).seconds(queued)
        return Reading(tier, nbytes, queued, self._clock(), estimate, recompute)

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

        The tier takes longer than that, and longer than was expected: each time twice as long. Or
        it would never lose where computing takes longer than a read may.
        """
        seconds = self._clock() - reading.began
        nbytes = reading.queued if tier == reading.tier else nbytes
        with self._lock:
            line = self._known(tier)
            if seconds > 0:
                line.late(nbytes, max(seconds, _LATER * line.seconds(nbytes)))

    # ---- what follows

    def figures(self) -> Mapping[str, tuple[float, float]]:
        """Return latency in seconds, and bytes a second, of each tier that was read."""
        with self._lock:
            return {
                name: (line.latency, 1 / line.per_byte if line.per_byte else 0.0)
                for name, line in self._tiers.items()
            }

    def knows(self, tier: str) -> bool:
        """Say whether a tier's speed is known."""
        with self._lock:
            return tier in self._tiers

    def reading(self, tier: str, nbytes: int) -> float | None:
        """Return the seconds that so many bytes of a tier take, behind what is queued there.

        None when that is not known yet.
        """
        with self._lock:
            line = self._tiers.get(tier)
            return None if line is None else line.seconds(self._queued.get(tier, 0) + nbytes)

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
        where: bytes,
        stack: Sequence[str],
        span: tuple[int, int],
        chunk: tuple[int, int],
        *,
        whole: bool,
        meet: bool,
    ) -> Advice:
        """Say what of a match to load.

        where: of each chunk that is matched its tier's place in `stack`, which names them, DRAM
        first. span: the tokens that the engine has, and those of the match. chunk: its tokens, and
        bytes. whole: any part of the match is usable too, as of a model of full attention.
        meet: the engine can compute while it loads.
        A tier, or a model, whose speed is not known yet is given a try.
        """
        (computed, tokens), size = span, chunk[0]
        first = computed // size
        behind = where[first:]
        with self._lock:
            speeds = self._speeds(behind, stack, chunk[1])
            prefill = self._prefill
            if not prefill.known or (not speeds and behind.count(0) == len(behind)):
                return Advice("load", tokens)
            a, b = prefill.per_token, prefill.per_pair
            best = recompute = prefill.seconds(computed, tokens)
        ahead = Ahead(behind, speeds, first, size, tokens, a, b)
        stop = first
        load, count = best_cut(ahead) if whole else (slowest(ahead)[0], len(behind))
        if load <= best:
            best, stop = load, first + count
        if meet and whole and len(speeds) == 1 and computed == first * size:
            begin, seconds = middle(ahead)
            if begin and seconds <= _MEET * best:
                return Advice("meet", tokens, begin * size, seconds, recompute)
        cut = stop * size if stop > first else computed
        if cut >= tokens:
            return Advice("load", tokens, 0, best, recompute)
        choice: Choice = "cut" if stop > first else "recompute"
        skipped = stack[where[stop] if whole else slowest(ahead)[1]]
        return Advice(choice, cut, 0, best, recompute, skipped)

    def _known(self, tier: str) -> Line:
        """Return what is known of a tier of which something is."""
        return self._tiers.setdefault(tier, Line())

    def _slowest(self, nbytes: Mapping[str, int]) -> str:
        return max(nbytes, key=lambda tier: self._line(tier).seconds(nbytes[tier]))

    def _line(self, tier: str) -> Line:
        """Return what is known of a tier; one that is not known yet takes no time."""
        return self._tiers.get(tier) or Line()

    def _speeds(self, where: bytes, stack: Sequence[str], nbytes: int) -> dict[int, Speed]:
        """Return the speeds of those tiers of which some is known, by their place."""
        speeds: dict[int, Speed] = {}
        tiers, queued = self._tiers, self._queued
        for number, tier in enumerate(stack):
            if number and number in where and (line := tiers.get(tier)) is not None:
                each = line.per_byte
                speeds[number] = line.latency + queued.get(tier, 0) * each, nbytes * each
        return speeds

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
    def losing(self) -> tuple[str, ...]:
        """The tiers that have lost, and are tried now and then."""
        return tuple(self._probes)

    def wins(self, tier: str) -> None:
        """Take note that a tier is worth loading from: when it loses next, try again soon."""
        with self._lock:
            self._probes.pop(tier, None)


def _pairs(start: int, stop: int) -> float:
    return (stop * stop - start * start) / 2
