"""Which of a match is worth loading: a cache's Costs, fed by its fetches and its engine's steps."""

from __future__ import annotations

import math
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from kvtier.catalog.lease import Lease
from kvtier.checks import read_settings
from kvtier.clock import Clock
from kvtier.cost import CHOICES, Advice, Costs, Reading
from kvtier.desk import Desk, Match
from kvtier.errors import ConfigError
from kvtier.identity.geometry import Geometry, Needs
from kvtier.identity.shape import Shape
from kvtier.prefix import Prefix
from kvtier.seams import Future

_ASK_SECONDS: Final = 1.0  # until what is asked in the background has been answered
_PROBE_CHUNKS: Final = 4
_PROBE_SECONDS: Final = 10.0
_ELSEWHERE: Final = b"\xff"  # where chunks may lie of which a shared tier is asked
_LATE: Final = 0.9  # of a fetch's time: it was begun a little before it is timed


class _Rung(msgspec.Struct, frozen=True):
    """What of a measured tier is of use here."""

    tier: str
    latency_s: float
    read_bytes_per_s: float


class Adviser:
    """One cache's. Memory only, and safe from any thread."""

    def __init__(self, desk: Desk, geometry: Geometry, shape: Shape, clock: Clock) -> None:
        self.costs = Costs(clock)
        self._desk = desk
        self._clock = clock
        self._chunk = (shape.chunk_tokens, sum(shape.nbytes))
        self._whole = all(one.needs is Needs.ALL for one in geometry.components)
        self._asked: tuple[float, Prefix] | None = None  # when it is answered, and the prompt
        self._trying = False  # from then until what it has was tried
        self._lock = threading.Lock()
        metrics = desk.metrics
        self._chose = {one: metrics.counter("load_decisions", choice=one) for one in CHOICES}
        self._reading: dict[bytes, int] = {}  # chunks that fetches bring up, and from where

    def seed(self, path: str | Path) -> None:
        """See ``Cache.seed``."""
        try:
            rungs = msgspec.json.decode(read_settings(Path(path)), type=list[_Rung])
        except (OSError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path!r} is not what `kvtier doctor --measure URL --keep FILE` writes: {error}"
            ) from error
        for rung in rungs:
            if not (0 <= rung.latency_s < math.inf and 0 < rung.read_bytes_per_s < math.inf):
                raise ConfigError(f"{path}: {rung.tier} has a speed that cannot be")
            if rung.tier in self._desk.tiers[1:]:
                self.costs.believe_tier(rung.tier, rung.latency_s, 1 / rung.read_bytes_per_s)

    def advise(self, match: Match, computed: int, *, meet: bool) -> tuple[Match, Advice]:
        """See ``Cache.advise``."""
        if match.pending:
            return match, Advice("load", match.tokens)
        self._follow()
        if self._trying:
            match = self._without_shared(match)
        where, stack = match.where, match.stack
        span = computed, match.tokens
        found = self.costs.advise(where, stack, span, self._chunk, whole=self._whole, meet=meet)
        if found.seconds:
            self._chose[found.choice]()
        if found.skipped or found.seconds:
            self._try_again(match, found.skipped)
        unknown = match.unknown and self._worth_asking(match)
        if found.tokens == match.tokens and unknown == match.unknown:
            return match, found
        where = where[: -(-found.tokens // self._chunk[0])]
        return Match(match.prefix, found.tokens, where, stack, match.known, unknown), found

    def _try_again(self, match: Match, skipped: str) -> None:
        """Read a little of a tier that was skipped, now and then; forget which others ever were."""
        if skipped:
            if self.costs.probe_due(skipped):
                self._probe(match, skipped)
            return
        for tier in self.costs.losing:
            if tier in match.stack and match.stack.index(tier) in match.where:
                self.costs.wins(tier)

    def _worth_asking(self, match: Match) -> bool:
        """Say whether a shared tier, of which nobody knows what it has, is worth waiting for.

        It is the slowest, and taken to have all that follows. While its speed is not known either,
        or it loses, it is asked in the background, and a little read of what it has.
        """
        size, nbytes = self._chunk
        limit = match.prefix.limit // size
        missing = limit - match.chunks
        if missing <= 0:
            return True
        last = self._desk.tiers[-1]
        recompute = self.costs.recompute(match.tokens, limit * size)
        if not recompute:  # the model's speed is not known: any try is as good as none
            return True
        seconds = self.costs.reading(last, missing * nbytes)
        if seconds is not None and seconds <= recompute:
            return True
        if self._asked is None and (seconds is None or self.costs.probe_due(last)):
            self._ask(match)
        return False

    def _ask(self, match: Match) -> None:
        """Have a shared tier asked in the background; see ``_follow``."""
        self._asked, self._trying = (self._clock() + _ASK_SECONDS, match.prefix), True
        self._desk.prefetch(match, 0.0)

    def _without_shared(self, match: Match) -> Match:
        """Cut a match before the shared tier that is tried, while its speed is not known."""
        last = len(match.stack) - 1
        at = match.where.find(last) if last > 0 else -1
        if at < 0 or self.costs.knows(match.stack[last]) or not self.costs.recompute(0, 1):
            return match
        at = at if self._whole else 0
        return replace(match, tokens=at * self._chunk[0], where=match.where[:at], unknown=False)

    def _follow(self) -> None:
        """Read a little of what the shared tier has of the prompt of which it was asked."""
        asked = self._asked
        if asked is None or self._clock() < asked[0]:
            return
        with self._lock:
            if self._asked is not asked:
                return
            self._asked = None
        match, last = self._desk.match(asked[1], counted=False), self._desk.tiers[-1]
        if len(self._desk.tiers) - 1 in match.where:
            self._probe(match, last)
        else:
            self._trying = False

    def _probe(self, match: Match, tier: str) -> None:
        """Read a little of a tier that loses, in the background, to see whether it still does."""
        where, number = match.where, match.stack.index(tier)
        first = where.index(number)
        chunks = len(where)
        if self._whole:
            run = len(where) - first - len(where[first:].lstrip(bytes([number])))
            chunks = first + min(run, _PROBE_CHUNKS)
        tokens = min(chunks * self._chunk[0], match.tokens)
        some = replace(match, tokens=tokens, where=where[:chunks], unknown=False)
        nbytes = where.count(number, first, chunks) * self._chunk[1]
        reading = self.costs.begin(tier, nbytes, 0.0)
        work = self._desk.prefetch(some, _PROBE_SECONDS)

        def ended(done: Future[int | None]) -> None:
            there = (not done.cancelled() and done.exception() is None and done.result()) or 0
            self.costs.end(reading, tier, nbytes if there >= tokens else 0)
            self._trying = False

        work.add_done_callback(ended)

    def timed(self, match: Match, first: int, within: float, running: Future[Lease | None]) -> None:
        """Learn from a fetch of chunks [first, ...) of a match, of `within` seconds, at its end."""
        size, nbytes = self._chunk
        where, keys = match.where[first:], match.prefix.keys[first:]
        keys = keys if match.unknown else keys[: len(where)]
        places = where.ljust(len(keys), _ELSEWHERE)
        with self._lock:
            joined = self._reading.keys() & keys
            mine = {k: at for k, at in zip(keys, places, strict=True) if at and k not in joined}
            self._reading |= mine
        counts = Counter(mine.values())
        below = Counter({tier: counts[at] for at, tier in enumerate(match.stack) if counts[at]})
        waited = match.stack[max(where)] if any(where) else ""
        tier, count = below.most_common(1)[0] if below else (waited, 0)
        recompute = self.costs.recompute(first * size, match.tokens) if tier else 0.0
        reading = self.costs.begin(tier, count * nbytes, recompute)

        def ended(done: Future[Lease | None]) -> None:
            with self._lock:
                for key in mine:
                    self._reading.pop(key, None)
            lease = None if done.cancelled() or done.exception() else done.result()
            sources = () if lease is None else lease.sources
            came = Counter(one for k, one in zip(keys, sources, strict=False) if k not in joined)
            # Who was asked first may be what took all the time.
            until = math.inf if match.unknown else within
            self._learn(reading, below, came, until, 0.0 if lease is None else lease.asked)

        running.add_done_callback(ended)

    def _learn(
        self,
        reading: Reading,
        below: Counter[str],
        came: Counter[str],
        within: float,
        asked: float,
    ) -> None:
        """Learn from a fetch that has ended, of one tier: the one that its time went by for.

        That is the slowest of which something came or, where the time ran out, did not. What
        another fetch has begun to read is that one's, and neither in `below` nor in `came`.
        """
        late = self._clock() - reading.began >= _LATE * within
        some = ((below - came) if late else None) or came
        nbytes = {
            tier: (came[tier] or below[tier]) * self._chunk[1]
            for tier in reversed(self._desk.tiers[1:])
            if some[tier]
        }
        tier = self.costs.slowest(nbytes) if nbytes else reading.tier
        arrived = nbytes[tier] if came[tier] else 0
        seconds = self.costs.end(reading, tier, arrived, asked)
        if nbytes and not arrived:
            self.costs.overdue(reading, tier, nbytes[tier])
        metrics = self._desk.metrics
        if nbytes:
            metrics.add("load_seconds", seconds, tier=tier)
            metrics.add("load_estimated_seconds", reading.estimate, tier=tier)
            metrics.set("prefill_seconds_per_token", self.costs.recompute(0, 1))
            latency, rate = self.costs.figures()[tier]
            metrics.set("tier_latency_seconds", latency, tier=tier)
            metrics.set("tier_read_bytes_per_second", rate, tier=tier)
        if reading.recompute and seconds > reading.recompute:
            regret = seconds - reading.recompute
            metrics.add("load_regret_seconds", regret, tier=reading.tier)
