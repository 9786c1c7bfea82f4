"""The Desk of a daemon: a cache's calls over a Unix socket, its bytes in the mapped arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from kvtier.catalog.lease import Lease, LeaseState
from kvtier.clock import monotonic
from kvtier.daemon import answers, messages
from kvtier.daemon.address import PATIENCE, TIMEOUT, parse_address
from kvtier.daemon.link import Link
from kvtier.daemon.messages import Message
from kvtier.daemon.orders import NO_PROMPT, Orders, in_bounds
from kvtier.daemon.remote import RemoteLease, Taken
from kvtier.daemon.up import Ask, Era, Up
from kvtier.desk import Desk, Issued, Match, Reserved
from kvtier.errors import MisuseError
from kvtier.identity.namespace import Namespace
from kvtier.identity.shape import Shape
from kvtier.memory.packed import SLOT_BYTES, unpack_slots
from kvtier.prefix import Prefix
from kvtier.retention import Term
from kvtier.seams import Future

_LATE_SECONDS: Final = 1.0  # that a late answer to a match is good for
_MOST_LATE: Final = 256
_LEAST_SECONDS: Final = 0.1  # in which a daemon that is there can answer


class RemoteDesk(Orders):
    """See Desk. Calls that an engine makes wait for the daemon's patience at most."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._late: dict[tuple[bytes, int], tuple[float, answers.Matched, Up]] = {}
        super().__init__(*args, **kwargs)

    def join(self, namespace: Namespace, shape: Shape, ranks: tuple[int, int]) -> Desk:
        """See Desk."""
        return RemoteDesk(self.link, namespace, shape, ranks)

    # ---- match, lease, fetch

    def match(self, prefix: Prefix, *, counted: bool = True) -> Match:
        """See Desk. Pending when the daemon takes longer than its patience."""
        if not self._bypass_known or len(prefix.keys) > messages.MOST_CHUNKS:
            return Match(prefix, 0)
        key = (prefix.keys[-1] if prefix.keys else b"", len(prefix.tokens))

        def late(up: Up, reply: Message) -> None:
            if isinstance(reply, answers.Matched):
                if len(self._late) >= _MOST_LATE:
                    self._late.clear()
                self._late[key] = (monotonic(), reply, up)

        found = self._ask(messages.Match(0, NO_PROMPT, counted), Ask(prefix, late=late))
        before = self._late.pop(key, None) if self._late else None
        if found is None:
            if before is None or before[2] is not self.link.up:
                return Match(prefix, 0, pending=self._waiting())
            if monotonic() - before[0] > _LATE_SECONDS:
                return Match(prefix, 0, pending=True)
            found = before[2], before[1]
        up, reply = found
        if not isinstance(reply, answers.Matched):
            return Match(prefix, 0)
        if reply.tiers.translate(None, bytes(range(len(up.tiers)))):  # of a tier that is not there
            return Match(prefix, 0)
        where, stack = reply.tiers, tuple(up.tiers)
        return Match(prefix, reply.tokens, where, stack, reply.known, reply.unknown)

    def _waiting(self) -> bool:
        """Say whether the daemon is there, and may answer yet."""
        up = self.link.up
        return up is not None and self in up.desks

    def lease(self, match: Match, first: int, seconds: float) -> Lease | None:
        """See Desk."""
        if first >= match.chunks or not self._bypass_known:
            return None
        begin = monotonic()
        asked = messages.Lease(0, NO_PROMPT, int(match.tokens), int(first), in_bounds(seconds))
        found = self._ask(asked, Ask(match.prefix, late=_unlease))
        return self._lease_of(match.prefix, *found, begin) if found is not None else None

    def _lease_of(self, prefix: Prefix, up: Up, reply: Message, begin: float) -> RemoteLease | None:
        """Return what an answer gives: slots, and until when, counted from when it was asked."""
        if not isinstance(reply, answers.Leased) or not reply.lease:
            return None
        names = self._shape.select(prefix.names, reply.first, reply.tokens)
        shape = self._shape
        parts = len(names) * len(shape.names) if shape.plain else sum(map(len, names))
        odd = max(reply.sources, default=0) >= len(up.tiers)
        if odd or parts * SLOT_BYTES != len(reply.slots) or len(names) != len(reply.sources):
            self.link.post(up, self, messages.Release(reply.lease))
            return None
        span, deadline = (reply.first, reply.tokens), begin + reply.seconds
        lease = RemoteLease(span, names, reply.slots, deadline, self, (up, reply.lease))
        if any(reply.sources):
            lease.sources = _named(reply.sources, up.tiers)
        return lease

    def fetch(
        self, match: Match, first: int, *, within: float, hold: float, pin: bool
    ) -> Future[Lease | None]:
        """See Desk."""
        prefix = match.prefix
        asked = messages.Fetch(
            0,
            NO_PROMPT,
            int(match.tokens),
            int(match.known),
            match.unknown,
            min(int(first), len(prefix.keys)),
            in_bounds(within),
            in_bounds(hold),
            pin,
        )

        def done(up: Up, reply: Message | None) -> Lease | None:
            # Held since it was answered, at the latest now; how long ago that was nobody knows.
            if reply is None:
                return None
            lease = self._lease_of(prefix, up, reply, monotonic())
            if lease is not None and pin:
                lease.pinned = 1
            return lease

        def late(up: Up, reply: Message) -> None:
            if isinstance(reply, answers.Leased) and reply.lease:
                self.link.post(up, self, messages.Release(reply.lease))

        return self._begin(asked, within, done, prefix=prefix, late=late)

    def prefetch(self, match: Match, within: float) -> Future[int | None]:
        """See Desk."""
        asked = messages.Prefetch(
            0,
            NO_PROMPT,
            int(match.tokens),
            int(match.known),
            match.unknown,
            in_bounds(within),
        )
        return self._begin(asked, within, _count, prefix=match.prefix)

    # ---- leases

    def stands(self, lease: RemoteLease) -> bool:
        """Say whether the daemon may still hold a lease of this desk."""
        return lease.up is self.link.up and not (lease.pinned and self._left)

    def end_lease(self, lease: Lease) -> None:
        """See Keeper."""
        self._check_process()
        if isinstance(lease, RemoteLease) and lease.state is LeaseState.HELD:
            lease.state = LeaseState.RELEASED
            self.link.post(lease.up, self, messages.Release(lease.number))

    def renew_lease(self, lease: Lease, seconds: float) -> bool:
        """See Keeper. A daemon that does not answer in time has not renewed it: it has ended."""
        self._check_process()
        if not isinstance(lease, RemoteLease) or lease.state is not LeaseState.HELD:
            return False
        begin = monotonic()
        found = self._ask(messages.Renew(lease.number, in_bounds(seconds)), Ask(only=lease.up))
        if found is not None and isinstance(found[1], answers.Told) and found[1].value:
            lease.deadline = begin + seconds
            return True
        if lease.state is LeaseState.HELD:
            lease.state = LeaseState.EXPIRED
            self.link.post(lease.up, self, messages.Release(lease.number))
        return False

    # ---- plans

    def issue(self, lease: Lease) -> int:
        """See Desk."""
        if not isinstance(lease, RemoteLease):
            if lease.state is LeaseState.HELD:
                raise MisuseError("this lease is of another cache; each plans its own")
            return 0
        if lease.state is not LeaseState.HELD:
            return 0
        if lease.origin.owner != self.owner or lease.origin.link is not self.link:
            raise MisuseError("this lease is of another cache; each plans its own")
        found = self._ask(
            messages.Issue(0, lease.number),
            Ask(only=lease.up, note=self._note, late=_unissue),
        )
        plan = found[1].value if found and isinstance(found[1], answers.Count) else 0
        if not plan and found is not None:
            lease.state = LeaseState.EXPIRED
            self.link.post(lease.up, self, messages.Release(lease.number))  # refused, it is held
        return plan

    def reserve(
        self,
        prefix: Prefix,
        first: int,
        places: Sequence[Sequence[int]],
        kept: Sequence[Term],
    ) -> Reserved:
        """See Desk. A daemon that does not answer in time refuses all chunks."""
        nothing = Reserved(0, [], len(places))
        if not self._bypass_known:
            return Reserved(0, [], 0)
        parts = len(self._shape.names)
        some = None if all(len(each) == parts for each in places) else [list(p) for p in places]
        terms = [(term.priority, term.seconds) for term in kept]
        asked = messages.Reserve(0, NO_PROMPT, min(int(first), len(prefix.keys)), some, terms)
        found = self._ask(asked, Ask(prefix, note=self._note, late=_unissue))
        up, reply = found or (None, None)
        if up is None or not isinstance(reply, answers.Reserved):
            return nothing
        if not reply.plan:
            return Reserved(0, [], reply.refused)
        chunks = np.frombuffer(reply.chunks, "<u4").tolist()
        at = np.frombuffer(reply.places, "<u4").tolist()
        slots = unpack_slots(reply.slots)
        try:
            named = [
                prefix.part(chunk, place, *kept[chunk : chunk + 1])
                for chunk, place in zip(chunks, at, strict=True)
            ]
            taken = Taken(list(zip(named, slots, strict=True)), up.era)
        except (IndexError, ValueError):  # not what was asked for: nobody will fill it
            self.link.settle(self, up.era, reply.plan, ok=False)
            return nothing
        return Reserved(reply.plan, taken, reply.refused)

    def _note(self, up: Up, reply: Any) -> None:
        plan = reply.value if isinstance(reply, answers.Count) else getattr(reply, "plan", 0)
        if plan:
            self.link.out[up.era, plan] = self

    def arena_of(self, issued: Issued) -> int:
        """See Desk."""
        return _era(issued).arena

    def settle(self, plan: int, issued: Issued, *, ok: bool) -> None:
        """See Desk."""
        self.link.settle(self, _era(issued), plan, ok=ok)

    def loaded(self, match: Match, tiers: Mapping[str, int], first: int) -> None:
        """See Desk."""
        up = self.link.up
        if up is not None and len(match.prefix.keys) <= messages.MOST_CHUNKS:
            counts = {tier: int(tokens) for tier, tokens in tiers.items()}
            message = messages.Loaded(0, NO_PROMPT, counts, min(int(first), len(match.prefix.keys)))
            up.name(message, match.prefix)
            self.link.post(up, self, message)


def _era(issued: Issued) -> Era:
    """Return of which daemon's life a plan is."""
    if isinstance(issued, RemoteLease):
        return issued.up.era
    if isinstance(issued, Taken):
        return issued.era
    raise MisuseError("this plan is of another cache")


def _named(numbers: bytes, tiers: Sequence[str]) -> tuple[str, ...]:
    """Return the tiers of these numbers. Raises IndexError."""
    first = numbers[:1]
    if numbers == first * len(numbers):  # as a rule
        return tuple([tiers[number] for number in first]) * len(numbers)
    return tuple(map(tiers.__getitem__, numbers))


def _unlease(_up: Up, reply: Any) -> Message | None:
    if isinstance(reply, answers.Leased) and reply.lease:
        return messages.Release(reply.lease)
    return None


def _unissue(_up: Up, reply: Any) -> Message | None:
    plan = reply.value if isinstance(reply, answers.Count) else getattr(reply, "plan", 0)
    return messages.Settle(plan, ok=False) if plan else None


def _count(_up: Up, reply: Message | None) -> int | None:
    return reply.value if isinstance(reply, answers.Count) else None


def open_desk(url: str, namespace: Namespace, shape: Shape, ranks: tuple[int, int]) -> RemoteDesk:
    """Open the daemon's desk that ``unix:PATH?option=value`` names. Blocks.

    Raises ConfigError with cause and remedy, and ProtocolError for a daemon of another release.
    """
    place = parse_address(url)
    link = Link(place.path, place.engine, place.patience)
    return _opened(link, place.timeout, namespace, shape, ranks)


def open_private(
    tiers: Sequence[str],
    engine: str,
    namespace: Namespace,
    shape: Shape,
    ranks: tuple[int, int],
) -> RemoteDesk:
    """Start a daemon of this process's own, and open its desk; it ends with that. Blocks.

    engine: the id by which its ranks find it, made up unless given. Raises ConfigError with cause
    and remedy.
    """
    from kvtier.daemon.private import PrivateDaemon

    daemon = PrivateDaemon(*tiers, engine=engine)
    link = Link(str(daemon.path), daemon.engine, PATIENCE, daemon.close)
    return _opened(link, TIMEOUT, namespace, shape, ranks)


def _opened(
    link: Link, timeout: float, namespace: Namespace, shape: Shape, ranks: tuple[int, int]
) -> RemoteDesk:
    until = monotonic() + timeout
    link.open(timeout)
    try:
        return RemoteDesk(link, namespace, shape, ranks, max(until - monotonic(), _LEAST_SECONDS))
    except BaseException:
        link.close()
        raise
