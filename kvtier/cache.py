"""The Cache: the library's face. Match, lease or fetch, plan, commit.

Calls on an engine's threads touch memory only. ``fetch``, ``clear`` and ``flush`` start work on
the flow loop and return a handle, or wait for it where they say so.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self

from kvtier.catalog.catalog import Catalog, Part, Shelf
from kvtier.catalog.lease import Lease
from kvtier.clock import Clock, monotonic
from kvtier.config import Config
from kvtier.copier import Pages
from kvtier.copyplan import PLAN_VERSION, CopyPlan, PlanPart
from kvtier.device.base import Device
from kvtier.errors import ConfigError, MisuseError
from kvtier.flow import Moves, Saved
from kvtier.identity.keys import TokenIds
from kvtier.identity.namespace import Namespace, Request
from kvtier.identity.record import split_record_id
from kvtier.memory.arena import Arena, Slot
from kvtier.metrics import Metrics
from kvtier.opening import index_tiers, open_tiers
from kvtier.policies.lru import Lru
from kvtier.prefix import Namer, Prefix
from kvtier.seams import CancelledError, Flow, ThreadFlow
from kvtier.transfer import CopyResult, CopyStatus, FetchTransfer

__all__ = ["Cache", "Lease", "Match", "Prefix", "open_cache"]

_CLOSE_SECONDS: Final = 30.0

Issued = Lease | list[tuple[Part, Slot]]
"""What a plan still holds: a load its lease, a save the slots it fills."""


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt the tiers have. A value: it holds nothing and may go stale.

    tokens: usable, a multiple of the engine's block, below the prompt's length. chunks: those
    that cover them; tiers: for each chunk, the slowest tier that one of its parts needs.
    unknown: a shared tier may have more; ``fetch`` asks it.
    """

    prefix: Prefix
    tokens: int
    tiers: tuple[str, ...]
    unknown: bool = False

    @property
    def chunks(self) -> int:
        """Chunks that cover the usable tokens."""
        return len(self.tiers)


class Cache:
    """One namespace's KV in DRAM and the tiers below. Safe from any thread, not across fork."""

    def __init__(
        self,
        config: Config,
        namespace: Namespace,
        *,
        shards: int = 1,
        clock: Clock = monotonic,
        flow: Flow | None = None,
    ) -> None:
        self.namespace = namespace
        self.metrics = Metrics()
        self.geometry = namespace.geometry
        self._chunk = self.geometry.chunk_tokens
        self._block = self.geometry.block_tokens[0]
        self._shards = shards
        self._namer = Namer(namespace, shards)
        self._pid = os.getpid()
        self._flow: Flow = flow or ThreadFlow()
        self._plan_lock = threading.Lock()
        self._plans: dict[int, Issued] = {}
        self._plan_id = 0
        self._closing = False
        self._closed = False
        self._arena = Arena(config.dram, self._namer.nbytes)
        self._arena_id = os.fstat(self._arena.fd).st_ino
        with contextlib.ExitStack() as undo:
            undo.callback(self._arena.close)
            undo.callback(self._flow.close)
            self._tiers = open_tiers(config, self._flow, self.metrics, clock, self._namer.nbytes)
            for tier in self._tiers.values():
                undo.callback(tier.close)
            self._start(config, clock)
            undo.pop_all()

    def _start(self, config: Config, clock: Clock) -> None:
        """Index what the tiers have, and start what runs in the background. Blocks."""
        shelves = [Shelf("dram", Lru(), config.dram)] + [
            Shelf(tier.name, Lru(), setting.capacity)
            for tier, setting in zip(self._tiers.values(), config.tiers, strict=True)
        ]
        self._numbers = {shelf.name: number for number, shelf in enumerate(shelves)}
        self._catalog = Catalog(self._arena, shelves, clock, self.metrics)
        self._moves = Moves(
            self._catalog,
            self._arena,
            self._tiers,
            self.namespace.digest,
            self._flow,
            clock,
            self.metrics,
        )
        sizes = dict(zip(self._namer.names, self._namer.nbytes, strict=True))
        index_tiers(self._catalog, self._tiers, sizes)
        self._reaper = self._flow.spawn(self._moves.reap())

    # ---- match

    def prefix(
        self, tokens: TokenIds, request: Request | None = None, known: Prefix | None = None
    ) -> Prefix:
        """Name the complete chunks of a prompt. Memory only; 512 chunks take about 1 ms.

        known: the prefix of an earlier, shorter state of the same prompt; only what follows is
        hashed.
        """
        return self._namer.prefix(tokens, request, known)

    def match(self, tokens: TokenIds | Prefix, request: Request | None = None) -> Match:
        """Return how much of a prompt can be loaded, and from where. Memory only.

        The whole chain counts as used, whatever of it the engine has in HBM.
        """
        self._check()
        prefix = tokens if isinstance(tokens, Prefix) else self.prefix(tokens, request)
        found = self._catalog.match(prefix.names)
        self.metrics.add("match_tokens", len(prefix.tokens))
        limit = max(len(prefix.tokens) - 1, 0) // self._block * self._block
        usable = min(len(found) * self._chunk, limit)
        chunks = -(-usable // self._chunk)
        names = list(self._numbers)
        unknown = (
            len(found) < len(prefix.names)
            and len(found) * self._chunk < limit
            and self._moves.worth_asking(prefix.names[len(found)][0])
        )
        return Match(prefix, usable, tuple(names[tier] for tier in found[:chunks]), unknown)

    # ---- lease, fetch

    def lease(self, match: Match, *, deadline: float, first: int = 0) -> Lease | None:
        """Hold chunks [first, match.chunks), all in DRAM, for `deadline` seconds.

        None when there are none, or one is not in DRAM: ``fetch`` them. Memory only.
        """
        self._check()
        chunks = match.prefix.names[first : match.chunks]
        if not chunks:
            return None
        return self._catalog.lease(first, chunks, deadline)

    def fetch(
        self, match: Match, *, timeout: float, deadline: float, first: int = 0
    ) -> FetchTransfer:
        """Bring chunks from `first` up into DRAM and lease them. Returns at once.

        timeout: seconds until the result is what has arrived by then; deadline: of the lease,
        in seconds after that, whether anybody takes it or not.
        Where the match says that a shared tier may know more, it is asked.
        """
        self._check()
        limit = max(len(match.prefix.tokens) - 1, 0) // self._block * self._block
        most = min(-(-limit // self._chunk), len(match.prefix.names))  # complete chunks only
        last = most if match.unknown else match.chunks
        work = self._moves.fetch(
            match.prefix, range(first, last), match.chunks, within=timeout, hold=deadline
        )
        return FetchTransfer(self._flow.spawn(work))

    # ---- plans

    def plan_load(
        self, lease: Lease, into: Sequence[int], *, start: int | None = None
    ) -> CopyPlan | None:
        """Plan the copy of leased chunks into the engine's blocks, in token order.

        into: ids of the blocks of tokens [start, start + len(into) x block); start: of the
        lease's first chunk by default. None when the lease's deadline has passed. Memory only.
        Every plan must be settled, once its copies have ended, with ``settle``.
        Raises MisuseError when those are not whole blocks of the leased tokens.
        """
        self._check()
        begin = lease.first * self._chunk
        start = begin if start is None else start
        stop = start + len(into) * self._block
        if start < begin or start % self._block or stop > begin + lease.chunks * self._chunk:
            raise MisuseError(
                f"tokens {start}..{stop} are not blocks of the leased tokens "
                f"{begin}..{begin + lease.chunks * self._chunk}"
            )
        if not self._catalog.issue(lease):
            return None
        parts: list[PlanPart] = []
        for index, slots in enumerate(lease.slots):
            chunk = begin + index * self._chunk
            low, high = max(start, chunk), min(stop, chunk + self._chunk)
            if low < high:
                blocks = into[(low - start) // self._block : (high - start) // self._block]
                parts += self._plan_parts(slots, low - chunk, blocks)
        return self._new_plan("load", parts, lease)

    def plan_save(
        self, prefix: Prefix, block_ids: Sequence[int], *, first: int = 0
    ) -> CopyPlan | None:
        """Plan the copy of computed chunks into slots; None when there is nothing to save.

        prefix: of accepted, computed tokens; block_ids: the request's block table from token 0.
        first: chunks before it are known to be stored. Of a chunk that lost some of its parts
        the others are saved. Where no slot is free, the rest of the request stays unsaved, so
        that there are no holes. Memory only; every plan must be settled with ``settle``.
        Raises MisuseError when the block table is shorter than the chunks.
        """
        self._check()
        per_chunk, chunks = self._chunk // self._block, len(prefix.names)
        if len(block_ids) < chunks * per_chunk:
            raise MisuseError(f"{len(block_ids)} blocks do not hold {chunks} chunks of {per_chunk}")
        taken, refused = self._catalog.reserve(prefix.parts(first))
        if refused:
            self.metrics.add("dropped_saves", refused, reason="busy")
        if not taken:
            return None
        parts: list[PlanPart] = []
        for part, slot in taken:
            name = split_record_id(part.name)[1]
            at = part.depth * per_chunk
            blocks = tuple(block_ids[at : at + per_chunk])
            parts.append(PlanPart(*slot, *name, first_token=0, blocks=blocks))
        return self._new_plan("save", parts, taken)

    def settle(self, plan: CopyPlan, result: CopyResult) -> None:
        """Report that a plan's copies have ended everywhere. Memory only.

        A load's slots are let go; a save's parts are sealed, committed and written down, in the
        background, unless the cache was closed meanwhile. Raises MisuseError for a plan that is
        not this cache's or was settled before, and for a result that timed out, which does not
        settle anything.
        """
        self._check_process()
        if result.status is CopyStatus.TIMEOUT:
            raise MisuseError("a copy that has not ended cannot be settled")
        issued = self._plans.pop(plan.id, None)
        if issued is None:
            raise MisuseError(f"plan {plan.id} was not issued here, or was settled before")
        ok = result.status is CopyStatus.OK
        if isinstance(issued, Lease):
            self._catalog.settle(issued)
            return
        self._moves.saved([Saved(part, slot, ok) for part, slot in issued])

    def loaded(self, match: Match, tiers: Mapping[str, int], first: int) -> None:
        """Count the tokens that an engine took from chunks [first, ...), by tier.

        Chunks that were used again are offered to tiers that admit on second touch.
        """
        for tier, tokens in tiers.items():
            self.metrics.add("hit_tokens", tokens, tier=tier)
        if any(tier.admission == "second-touch" for tier in self._tiers.values()):
            names = [name for chunk in match.prefix.names[first:] for name in chunk]
            self._moves.used(names)

    # ---- the worker's side

    def bind(self, tensors: Any, device: Device, *, shard: int = 0) -> Pages:
        """Bind one rank's KV tensors, one for each component, to this cache's arena.

        shard: the rank's. Raises ConfigError for tensors that are not of the geometry.
        """
        many = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        return Pages(self.geometry, self._arena, self._arena_id, many, device, shard, self._shards)

    # ---- life

    def clear(self, tier: str, *, timeout: float = _CLOSE_SECONDS) -> None:
        """Take everything that nobody holds out of a tier. Blocks.

        Raises ConfigError for a tier that this cache has not, and TimeoutError after `timeout`
        seconds; it goes on then.
        """
        self._check()
        if tier not in self._numbers:
            raise ConfigError(f"no tier {tier!r}; this cache has {', '.join(self._numbers)}")
        self._flow.spawn(self._moves.clear(self._numbers[tier])).result(timeout)

    def flush(self, *, timeout: float) -> bool:
        """Wait until all saves are published and written down; False when time runs out."""
        self._check()
        try:
            self._flow.spawn(self._moves.drained()).result(timeout)
        except (TimeoutError, CancelledError):
            return False
        return True

    def figures(self) -> dict[str, float]:
        """Return all metrics, gauges brought up to date. Memory only; also once it is closed."""
        self._check_process()
        self._catalog.figures()
        return self.metrics.snapshot()

    def close(self) -> None:
        """Write down what waits, bounded, and end all threads. Idempotent. Blocks.

        Copies in flight may go on: their slots' memory stays mapped until the last has ended.
        """
        if os.getpid() != self._pid:
            return
        with self._plan_lock:
            if self._closing:
                return
            self._closing = True
        try:
            self.flush(timeout=_CLOSE_SECONDS)
        finally:
            self._closed = True
            self._reaper.cancel()
            self._moves.close()
            for tier in self._tiers.values():
                tier.close()
            self._flow.close()
            self._arena.close()

    def __enter__(self) -> Self:
        """Return the cache."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    # ---- inside

    def _check(self) -> None:
        if self._closed:
            raise MisuseError("this cache is closed")
        self._check_process()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise MisuseError("a cache does not cross fork; open one in the child")

    def _new_plan(
        self, kind: Literal["load", "save"], parts: list[PlanPart], issued: Issued
    ) -> CopyPlan:
        with self._plan_lock:
            self._plan_id += 1
            plan = CopyPlan(PLAN_VERSION, self._plan_id, kind, self._arena_id, tuple(parts))
            self._plans[plan.id] = issued
        return plan

    def _plan_parts(
        self, slots: Sequence[Slot], first_token: int, blocks: Sequence[int]
    ) -> list[PlanPart]:
        return [
            PlanPart(*slot, *name, first_token=first_token, blocks=tuple(blocks))
            for slot, name in zip(slots, self._namer.names, strict=True)
        ]


def _check_kinds(namespace: object, shards: object) -> None:
    if not isinstance(namespace, Namespace):
        raise ConfigError(f"namespace must be a kvtier.Namespace, not {namespace!r}")
    if not isinstance(shards, int) or shards < 1:
        raise ConfigError(f"shards must be a whole number from 1 on, not {shards!r}")


def open_cache(*tiers: str | Config, namespace: Namespace, shards: int = 1) -> Cache:
    """Open a cache from URLs, DRAM first, or one Config; `shards` is the number of ranks.

    Blocks while memory is taken and tiers are reopened.
    Raises ConfigError with cause and remedy.
    """
    _check_kinds(namespace, shards)
    if len(tiers) == 1 and isinstance(tiers[0], Config):
        return Cache(tiers[0], namespace, shards=shards)
    urls = [tier for tier in tiers if isinstance(tier, str)]
    if len(urls) < len(tiers):
        raise ConfigError("pass tiers as URLs, or one Config")
    return Cache(Config.from_urls(urls), namespace, shards=shards)
