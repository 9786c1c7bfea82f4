"""What an operator asks of a daemon, and what all of a desk's calls do."""

from __future__ import annotations

import contextlib
import functools
import os
import select
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvtier.catalog.explain import End, Explanation
from kvtier.catalog.sweep import Removed
from kvtier.clock import monotonic
from kvtier.daemon import answers, messages
from kvtier.daemon.frames import HEADER, decode, encode
from kvtier.daemon.link import Link
from kvtier.daemon.mapped import MappedArena
from kvtier.daemon.messages import Message, Prompt
from kvtier.daemon.remote import RemoteMetrics
from kvtier.daemon.up import Ask, Up
from kvtier.daemon.waits import Request
from kvtier.daemon.wire import failure
from kvtier.desk import Health
from kvtier.errors import ConfigError, MisuseError, ProtocolError
from kvtier.identity.namespace import Namespace
from kvtier.identity.shape import Shape
from kvtier.metrics import Metrics
from kvtier.prefix import Prefix
from kvtier.seams import Future

_JOIN_SECONDS: Final = 10.0
_OPERATOR_SECONDS: Final = 2.0  # that a call which is no engine's waits for the daemon
_LEAVE_SECONDS: Final = 30.0
_AGAIN_SECONDS: Final = 0.05
_GRACE: Final = 1.0  # seconds beyond its own time that an answer may take
_LONGEST: Final = 1e9  # see messages.Seconds
NO_PROMPT: Final = Prompt(0, 0, b"", b"")
"""Stands in a message until the prompt is named."""


class Orders:
    """One namespace's seat at a daemon, and the part of Desk that no engine's thread calls.

    within: seconds that the daemon may take to let it join.
    """

    def __init__(
        self,
        link: Link,
        namespace: Namespace,
        shape: Shape,
        ranks: tuple[int, int],
        within: float = _JOIN_SECONDS,
    ) -> None:
        self.link = link
        self._shape = shape
        self._pid = os.getpid()
        self.joining: Message = _joining(namespace, ranks)
        self.owner = link.owner(namespace.digest)
        self.metrics: Metrics = RemoteMetrics(self._figures)
        self._left = False
        self._bypass: bool | None = None  # what was set here
        self._bypass_known = True
        link.join(self, within)
        up = link.up
        self.tiers: tuple[str, ...] = up.tiers if up is not None else ("dram",)

    # ---- the link's side

    def returning(self) -> Iterator[Message]:
        """See Seat."""
        yield self.joining
        if self._bypass is not None:
            yield messages.Bypass(0, self._bypass)

    @property
    def arena(self) -> MappedArena:
        """See Desk."""
        return self.link.arena

    # ---- what an operator asks

    def invalidate(self, prefix: Prefix, first: int, timeout: float) -> Removed:
        """See Desk. Where no answer comes, no tier is known to have done it."""
        start = min(int(first), len(prefix.keys))

        def ask(left: float) -> messages.Invalidate:
            return messages.Invalidate(0, NO_PROMPT, start, left)

        reply, _ = self._ordered(ask, timeout, prefix=prefix)
        return _removed(reply) or Removed(0, 0, self.tiers)

    def purge(self, digest: bytes, timeout: float, progress: Callable[[int], None]) -> Removed:
        """See Desk."""

        def ask(left: float) -> messages.Purge:
            return messages.Purge(0, digest, left)

        reply, asked = self._ordered(ask, timeout, progress=progress)
        removed = _removed(reply)
        if removed is None:
            raise self._unanswered("purge", asked=asked)
        return removed

    def clear(self, tier: str, timeout: float) -> None:
        """See Desk."""
        reply, asked = self._ordered(lambda left: messages.Clear(0, tier, left), timeout)
        if not _is_told(reply):
            raise self._unanswered(f"clear {tier}", asked=asked)

    def flush(self, timeout: float) -> bool:
        """See Desk."""
        asked = messages.Flush(0, in_bounds(timeout))
        future: Future[bool] = self._begin(asked, timeout, _told)
        return future.result()

    def explain(self, prefix: Prefix) -> Explanation:
        """See Desk."""
        how = Ask(prefix, within=_OPERATOR_SECONDS)
        found = self._ask(messages.Explain(0, NO_PROMPT), how)
        reply = found[1] if found is not None else None
        if isinstance(reply, answers.Explained):
            return reply.explanation
        self._check_left()
        why = reply.text if isinstance(reply, answers.Failed) else "the daemon does not answer."
        return Explanation(len(prefix.tokens), 0, End(0, why), ())

    def figures(self) -> dict[str, float]:
        """See Desk."""
        return self.metrics.snapshot()

    def health(self) -> Health:
        """See Desk."""
        found = self._ask(messages.Health(), Ask(within=_OPERATOR_SECONDS))
        if found is not None and isinstance(found[1], answers.Healthy):
            return Health(found[1].troubles)
        return Health({"daemon": f"it does not answer at {self.link.path}"})

    def _figures(self) -> dict[str, float] | None:
        found = self._ask(messages.Figures(), Ask(within=_OPERATOR_SECONDS))
        return found[1].figures if found and isinstance(found[1], answers.Answer) else None

    @property
    def bypass(self) -> bool:
        """See Desk."""
        if not self._bypass_known:
            return True
        found = self._ask(messages.Bypass(0, None), Ask(within=_OPERATOR_SECONDS))
        if found is not None and isinstance(found[1], answers.Told):
            return found[1].value
        return bool(self._bypass)

    @bypass.setter
    def bypass(self, on: bool) -> None:
        self._bypass = on
        found = self._ask(messages.Bypass(0, on), Ask(within=_OPERATOR_SECONDS))
        told = found is not None and isinstance(found[1], answers.Told)
        self._bypass_known = told or not on  # till then it is bypassed here alone

    def here(self) -> bool:
        """See Desk."""
        return self.link.here()

    def unpin(self) -> None:
        """See Desk."""
        self._left = True
        self._ask(messages.Unpin(0), Ask(within=_OPERATOR_SECONDS))

    def leave(self) -> None:
        """See Desk."""
        up = self.link.up
        if up is not None and not up.owed:
            future: Future[bool] = self._begin(messages.Leave(0), _LEAVE_SECONDS, _told)
            with contextlib.suppress(MisuseError):  # a server that has started since knows it not
                future.result()
        if self.link.leave(self):
            self.link.close()

    # ---- what all of these do

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise MisuseError("a lease does not cross fork; its parent holds it")

    def _check_left(self) -> None:
        if self._left:
            raise MisuseError("this cache is closed")

    def _ask(self, message: Message, how: Ask) -> tuple[Up, Message] | None:
        """Ask. A refusal is an answer, Failed, and reported: it is no fault of an engine's."""
        if how.prefix is not None and len(how.prefix.keys) > messages.MOST_CHUNKS:
            return None
        found = self.link.ask(self, message, how)
        if found is not None and isinstance(found[1], answers.Failed):
            self.link.report(found[1].text)
        return found

    def _ordered(
        self, ask: Callable[[float], Message], timeout: float, **how: Any
    ) -> tuple[Message | None, bool]:
        """Ask for what an operator wants, of a daemon that may come only later. Blocks.

        ask: makes the message, which gets the time that is left; where the daemon goes it is asked
        anew. Returns the answer, if any came in time, and whether it was asked at all. Raises
        MisuseError once this desk is left.
        """
        until, asked = monotonic() + in_bounds(timeout), False
        while True:
            self._check_left()
            up, left = self.link.up, max(until - monotonic(), 0.0)
            if up is not None and self in up.desks:
                asked = True
                begun: Future[Message | None] = self._begin(ask(left), left, _replied, **how)
                reply = begun.result()
                if reply is not None or up is self.link.up:  # which is late, then, and not lost
                    return reply, asked
            if monotonic() >= until:
                return None, asked
            select.select([], [], [], _AGAIN_SECONDS)  # the link's thread connects anew

    def _unanswered(self, what: str, *, asked: bool) -> TimeoutError:
        if asked:
            return TimeoutError(f"the daemon was asked to {what}, and has not said that it is done")
        path = self.link.path
        return TimeoutError(f"the daemon at {path} was not there to be asked to {what}; try again")

    def _begin(
        self,
        message: Any,
        within: float,
        done: Callable[[Up, Message | None], Any],
        *,
        prefix: Prefix | None = None,
        progress: Callable[[int], None] | None = None,
        late: Callable[[Up, Message], None] | None = None,
    ) -> Future[Any]:
        """Ask for what takes its time. done: makes the future's result of the answer, or None."""
        up = self.link.up
        many = prefix is not None and len(prefix.keys) > messages.MOST_CHUNKS
        if up is None or many or not up.address(self, message):
            return _answered(done)
        if prefix is not None:
            up.name(message, prefix)

        def finish(reply: Message | None) -> Any:
            if isinstance(reply, answers.Failed):
                self._check_left()
                if late is None and prefix is None:  # an operator's
                    raise failure(reply)
                self.link.report(reply.text)
                reply = None
            return done(up, reply)

        request = Request(
            message,
            monotonic() + in_bounds(within) + _GRACE,
            finish,
            functools.partial(late, up) if late is not None else None,
            functools.partial(up.name, message, prefix, whole=True) if prefix else None,
            progress,
        )
        return up.waits.begin(request)


def _joining(namespace: Namespace, ranks: tuple[int, int]) -> messages.Join:
    """Return what asks for a namespace. Raises ConfigError for one that no message holds."""
    join = messages.Join(
        namespace.model,
        namespace.geometry,
        namespace.revision,
        namespace.config_digest,
        namespace.quantisation,
        namespace.kv_scales,
        namespace.draft,
        namespace.tenant,
        *ranks,
    )
    try:
        decode(join.KIND, encode(join)[HEADER.size :])
    except ProtocolError as error:
        raise ConfigError(f"a daemon cannot be told this namespace: {error}") from error
    return join


def in_bounds(value: float) -> float:
    """Return a time as messages carry it."""
    return min(max(float(value), 0.0), _LONGEST)


def _told(_up: Up, reply: Message | None) -> bool:
    return _is_told(reply)


def _is_told(reply: Message | None) -> bool:
    return isinstance(reply, answers.Told) and reply.value


def _replied(_up: Up, reply: Message | None) -> Message | None:
    return reply


def _removed(reply: Message | None) -> Removed | None:
    if not isinstance(reply, answers.Removed):
        return None
    return Removed(reply.parts, reply.unconfirmed, reply.unlisted)


def _answered(done: Callable[[Any, Message | None], Any]) -> Future[Any]:
    """Return the future of a request that could not be sent."""
    future: Future[Any] = Future()
    try:
        future.set_result(done(None, None))
    except TimeoutError as error:
        future.set_exception(error)
    return future
