"""Calls: what each message of a client asks of its desk, and the answer. Under Sessions' lock."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np

from kvtier.catalog.owners import NOBODY
from kvtier.checks import check_wait
from kvtier.daemon import answers, messages
from kvtier.daemon.errands import LATE, Errands, Reply, outcome
from kvtier.daemon.holds import Holds
from kvtier.daemon.messages import Message, Prompt
from kvtier.daemon.out import Outs
from kvtier.daemon.prompts import weight
from kvtier.daemon.session import Session
from kvtier.depot import Depot
from kvtier.desk import Match
from kvtier.errors import ConfigError, MisuseError, ProtocolError
from kvtier.identity.geometry import Geometry, component_shards
from kvtier.identity.namespace import Namespace
from kvtier.identity.shape import Shape, chunk_shape
from kvtier.local import LocalDesk
from kvtier.prefix import Prefix
from kvtier.recorder import Recorder
from kvtier.seams import Future, IoPool

MOST_PARTS: Final = 4096
"""Parts that one chunk may have: components by ranks."""

_DESKS: Final = 64  # of one session
_DRAIN_SECONDS: Final = 30.0
_WORKER: Final = (messages.Ended, messages.Bye, messages.Figures, messages.Resume)
_NEVER: Final = 1e9  # seconds; the errand looks at the time itself


class Calls:
    """The requests of all sessions. Nothing here waits."""

    def __init__(
        self,
        depot: Depot,
        outs: Outs,
        sessions: Mapping[bytes, Session],
        lock: AbstractContextManager[Any],
        holds: Holds,
        recorder: Recorder | None = None,
    ) -> None:
        self._depot = depot
        self._recorder = recorder
        self._outs = outs
        self._sessions = sessions
        self._lock = lock
        self._holds = holds
        self._errands = Errands(depot)
        self._explaining = IoPool("explain", 1)
        self._handlers: dict[type[Message], Callable[[Session, Any, Reply], None]] = {
            messages.Join: self._join,
            messages.Leave: self._left,
            messages.Resume: self._resume,
            messages.Bye: self._bye,
            messages.Match: self._match,
            messages.Lease: self._lease,
            messages.Fetch: self._fetch,
            messages.Prefetch: self._prefetch,
            messages.Release: self._release,
            messages.Renew: holds.renew,
            messages.Issue: self._issue,
            messages.Reserve: self._reserve,
            messages.Settle: self._settle,
            messages.Ended: self._ended,
            messages.Loaded: self._loaded,
            messages.Invalidate: self._invalidate,
            messages.Purge: self._purge,
            messages.Clear: self._clear,
            messages.Flush: self._flush,
            messages.Explain: self._explain,
            messages.Figures: self._figures,
            messages.Bypass: self._bypass,
            messages.Unpin: self._unpin,
            messages.Health: self._health,
        }

    def take(self, session: Session, message: Message, reply: Reply) -> None:
        """Do what a message asks. See ``Sessions.handle``."""
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"a client says no {type(message).__name__}, or not here")
        if session.role == "worker" and not isinstance(message, _WORKER):
            raise ProtocolError(f"a worker says no {type(message).__name__}; its scheduler does")
        handler(session, message, reply)

    def let_go(self, session: Session) -> None:
        """End what a session holds: leases, pins, desks. Its plans stay out."""
        for number in list(session.desks):
            self._leave(session, number)

    def close(self) -> None:
        """End what runs besides the depot's own."""
        self._explaining.close()

    def figures(self) -> dict[str, float]:
        """Bring the gauges up to date and return all metrics."""
        metrics = self._depot.metrics
        metrics.set("sessions", len(self._sessions))
        metrics.set("plans_out", len(self._outs))
        metrics.set("quarantined_bytes", self._outs.nbytes(self._sessions))
        self._depot.catalog.figures()
        for tier in self._depot.tiers.values():
            tier.figures()
        return metrics.snapshot()

    # ---- desks

    def _join(self, session: Session, message: messages.Join, reply: Reply) -> None:
        if len(session.desks) >= _DESKS:
            raise ConfigError(f"a session has {_DESKS} caches at most; close some")
        _check_parts(message.geometry, message.shards, message.stages)
        namespace = Namespace(
            model=message.model,
            geometry=message.geometry,
            revision=message.revision,
            config_digest=message.config_digest,
            quantisation=message.quantisation,
            kv_scales=message.kv_scales,
            draft=message.draft,
            tenant=message.tenant,
        )
        shape = chunk_shape(namespace.geometry, message.shards, message.stages)
        owner = self._depot.join(namespace, shape)
        if owner == NOBODY:
            self._depot.leave(flush=False)
            raise ConfigError("this daemon has served too many namespaces; start it anew")
        try:
            self._check_ranks(session, owner, shape)
        except ConfigError:
            self._depot.leave(flush=False)
            raise
        desk = LocalDesk(self._depot, namespace, shape, owner)
        session.desks[desk.number] = desk
        reply(answers.Joined(desk.number, owner))

    def _check_ranks(self, joining: Session, owner: int, shape: Shape) -> None:
        """Refuse ranks that would share nothing with those that another client's namespace has.

        Each would fill the memory with parts that the other cannot use, and wonder about misses.
        """
        for session in self._sessions.values():
            for desk in session.desks.values() if session is not joining else ():
                if desk.owner == owner and not set(desk.shape.names) & set(shape.names):
                    raise ConfigError(
                        f"this daemon serves the KV of this model in {_split(desk.shape)}; an "
                        f"engine with {_split(shape)} would share nothing with that: give it a "
                        f"tenant of its own, or the same ranks"
                    )

    def _leave(self, session: Session, number: int) -> None:
        """End a desk, with its leases and pins."""
        desk = session.desks.pop(number)
        for holding in [one for one in session.holdings.values() if one.desk is desk]:
            self._holds.release(session, holding)
        desk.unpin()
        self._depot.leave(flush=False)

    def _left(self, session: Session, message: messages.Leave, reply: Reply) -> None:
        self._desk(session, message.desk)
        self._leave(session, message.desk)
        late = answers.Told(value=False)
        try:
            self._errand(session, self._errands.drain, _DRAIN_SECONDS, reply, late)
        except MisuseError:  # too much is under way: it has left, and waits for nothing
            reply(late)

    def _resume(self, session: Session, message: messages.Resume, reply: Reply) -> None:
        del reply
        if len(message.plans) % 8:
            raise ProtocolError(f"{len(message.plans)} bytes are no plans")
        plans = np.frombuffer(message.plans, "<u8")
        self.let_go(session)
        self._outs.resume(session.token, frozenset(plans.tolist()))

    def _bye(self, session: Session, message: messages.Bye, reply: Reply) -> None:
        """Do nothing: what the session holds ends as its connections close."""

    @staticmethod
    def _desk(session: Session, number: int) -> LocalDesk:
        desk = session.desks.get(number)
        if desk is None:
            raise MisuseError(f"this session has no desk {number} at this server; say Join")
        return desk

    def _prefix(
        self, session: Session, number: int, prompt: Prompt, reply: Reply
    ) -> tuple[LocalDesk, Prefix | None]:
        """Return a desk, and the prompt of which a message is; None once Resend is said."""
        desk = self._desk(session, number)
        prefix = session.prompts.prefix(number, desk.shape, desk.owner, prompt)
        if prefix is None:
            reply(answers.Resend())
        return desk, prefix

    # ---- match, lease, fetch

    def _match(self, session: Session, message: messages.Match, reply: Reply) -> None:
        desk, prefix = self._prefix(session, message.desk, message.prompt, reply)
        if prefix is not None:
            if message.counted and self._recorder is not None:
                self._recorder.note(prefix)
            match = desk.match(prefix, counted=message.counted)
            reply(answers.Matched(match.tokens, match.where, match.known, match.unknown))

    def _lease(self, session: Session, message: messages.Lease, reply: Reply) -> None:
        desk, prefix = self._prefix(session, message.desk, message.prompt, reply)
        if prefix is not None:
            match = _matched(prefix, message.tokens)
            self._holds.lease(session, desk, match, message, reply)

    def _fetch(self, session: Session, message: messages.Fetch, reply: Reply) -> None:
        desk, prefix = self._prefix(session, message.desk, message.prompt, reply)
        if prefix is not None:
            match = _matched(prefix, message.tokens, message.known, unknown=message.unknown)
            self._holds.fetch(session, desk, match, message, reply)

    def _prefetch(self, session: Session, message: messages.Prefetch, reply: Reply) -> None:
        desk, prefix = self._prefix(session, message.desk, message.prompt, reply)
        if prefix is not None:
            match = _matched(prefix, message.tokens, message.known, unknown=message.unknown)
            self._holds.prefetch(session, desk, match, message.within, reply)

    def _loaded(self, session: Session, message: messages.Loaded, reply: Reply) -> None:
        del reply  # Resend would answer nobody: what is not known here is not counted
        desk, prefix = self._prefix(session, message.desk, message.prompt, _unheard)
        if prefix is None:
            return
        for tier, tokens in message.tiers.items():
            if tier not in desk.tiers or tokens > len(prefix.tokens):
                raise ProtocolError(f"{tokens} tokens of {tier!r} are not of this prompt")
        desk.loaded(_matched(prefix, 0), message.tiers, message.first)

    # ---- plans

    def _release(self, session: Session, message: messages.Release, reply: Reply) -> None:
        del reply
        holding = session.holdings.get(message.lease)
        if holding is not None:  # else its deadline has passed
            self._holds.release(session, holding)

    def _issue(self, session: Session, message: messages.Issue, reply: Reply) -> None:
        desk = self._desk(session, message.desk)
        reply(answers.Count(self._holds.issue(session, desk, message.lease)))

    def _settle(self, session: Session, message: messages.Settle, reply: Reply) -> None:
        del reply
        self._outs.settle(message.plan, session.token, ok=message.ok)

    def _ended(self, session: Session, message: messages.Ended, reply: Reply) -> None:
        del reply
        self._outs.ended(message.plan, session.engine, session.who)

    def _reserve(self, session: Session, message: messages.Reserve, reply: Reply) -> None:
        desk, prefix = self._prefix(session, message.desk, message.prompt, reply)
        if prefix is not None:
            self._holds.reserve(session, desk, prefix, message, reply)

    # ---- what an operator asks

    def _errand(
        self,
        session: Session,
        work: Callable[[], Coroutine[Any, Any, Message]],
        timeout: float,
        reply: Reply,
        late: Message = LATE,
        size: int = 1,
    ) -> None:
        """Start what takes longer, unless there is too much of it under way."""
        check_wait("a timeout", timeout)
        self._errands.start(session.who, work, timeout, reply, late=late, weight=size)

    def _invalidate(self, session: Session, message: messages.Invalidate, reply: Reply) -> None:
        check_wait("a timeout", message.timeout)
        _, prefix = self._prefix(session, message.desk, message.prompt, reply)
        if prefix is not None:
            names = [name for chunk in prefix.names[message.first :] for name in chunk]
            work = functools.partial(self._errands.invalidate, names, message.timeout)
            self._errand(session, work, _NEVER, reply, size=weight(prefix))

    def _purge(self, session: Session, message: messages.Purge, reply: Reply) -> None:
        self._desk(session, message.desk)

        def tell(parts: int) -> None:
            reply(answers.Progress(parts))

        work = functools.partial(self._errands.purge, message.digest, tell)
        self._errand(session, work, message.timeout, reply)

    def _clear(self, session: Session, message: messages.Clear, reply: Reply) -> None:
        desk = self._desk(session, message.desk)
        if message.tier not in desk.tiers:
            raise ConfigError(f"no tier {message.tier!r}; this cache has {', '.join(desk.tiers)}")
        work = functools.partial(self._errands.clear, self._depot.numbers[message.tier])
        self._errand(session, work, message.timeout, reply, answers.Told(value=False))

    def _flush(self, session: Session, message: messages.Flush, reply: Reply) -> None:
        self._desk(session, message.desk)
        late = answers.Told(value=False)
        self._errand(session, self._errands.drain, message.timeout, reply, late)

    def _explain(self, session: Session, message: messages.Explain, reply: Reply) -> None:
        desk, prefix = self._prefix(session, message.desk, message.prompt, reply)
        if prefix is None:
            return
        size = weight(prefix)
        self._errands.begin(session.who, size)

        def explained(done: Future[Message]) -> None:
            self._errands.busy.end(session.who, size)
            reply(outcome(done))

        def explain() -> Message:
            return answers.Explained(desk.explain(prefix))

        self._explaining.submit(explain).add_done_callback(explained)

    def _figures(self, session: Session, message: messages.Figures, reply: Reply) -> None:
        del session, message
        reply(answers.Answer(self.figures()))

    def _health(self, session: Session, message: messages.Health, reply: Reply) -> None:
        del session, message
        reply(answers.Healthy(self._depot.troubles()))

    def _bypass(self, session: Session, message: messages.Bypass, reply: Reply) -> None:
        desk = self._desk(session, message.desk)
        if message.on is not None:
            desk.bypass = message.on
        reply(answers.Told(desk.bypass))

    def _unpin(self, session: Session, message: messages.Unpin, reply: Reply) -> None:
        self._desk(session, message.desk).unpin()
        reply(answers.Told(value=True))


def _unheard(message: Message) -> None:
    del message


def _matched(prefix: Prefix, tokens: int, known: int = 0, *, unknown: bool = False) -> Match:
    """Return a client's match. Raises ProtocolError for one that cannot be of this prompt."""
    if tokens > prefix.limit or known > len(prefix.names):
        raise ProtocolError(f"no match of this prompt has {tokens} tokens, {known} chunks known")
    ask = unknown and known * prefix.shape.chunk_tokens < prefix.limit
    return Match(prefix, tokens, known=known, unknown=ask and known < len(prefix.names))


def _split(shape: Shape) -> str:
    """Say into how many shards and stages a shape cuts KV."""
    shards = max(name.shards for name in shape.names)
    return f"{shards} shards and {shape.names[0].stages} stages"


def _check_parts(geometry: Geometry, shards: int, stages: int) -> None:
    """Refuse a chunk of so many parts that to name them would keep the daemon from all others."""
    parts = stages * sum(component_shards(one, shards) for one in geometry.components)
    if parts > MOST_PARTS:
        raise ConfigError(
            f"a chunk of {parts} parts ({len(geometry.components)} components on {shards} shards "
            f"and {stages} stages); the daemon takes {MOST_PARTS} at most"
        )
