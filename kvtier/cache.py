"""The Cache: the library's face. Match, lease or fetch, plan, commit.

Calls on an engine's threads touch memory only. ``fetch`` starts work on the flow loop and returns
a handle. What an operator does to a cache, closing it included, is in ``upkeep``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvtier.adviser import Adviser
from kvtier.catalog.lease import Lease
from kvtier.checks import check_ahead, check_first, check_kind, check_wait, check_whole
from kvtier.clock import Clock, monotonic
from kvtier.config import Config
from kvtier.copier import Pages
from kvtier.copyplan import CopyPlan
from kvtier.cost import Advice
from kvtier.depot import Depot
from kvtier.desk import Desk, Match
from kvtier.device.base import Device
from kvtier.errors import ConfigError, MisuseError
from kvtier.identity.keys import TokenIds
from kvtier.identity.namespace import Namespace, Request
from kvtier.identity.shape import chunk_shape
from kvtier.local import LocalDesk
from kvtier.plans import BlockTable, Plans
from kvtier.prefix import Namer, Prefix
from kvtier.retention import Retention
from kvtier.seams import Flow, ThreadFlow
from kvtier.transfer import CopyResult, CopyStatus, FetchTransfer, PrefetchTransfer
from kvtier.upkeep import Upkeep

__all__ = ["Cache", "Lease", "Match", "Prefix", "open_cache"]


_SPAN: Final = 2
_MOST_RANKS: Final = 0xFFFF  # the name of a part has two bytes for each


class Cache(Upkeep):
    """One namespace's KV in DRAM and the tiers below. Safe from any thread, not across fork."""

    def __init__(
        self,
        config: Config | Desk,
        namespace: Namespace,
        *,
        shards: int = 1,
        stages: int = 1,
        clock: Clock = monotonic,
        flow: Flow | None = None,
    ) -> None:
        self.geometry = namespace.geometry
        self.ranks = (shards, stages)
        self.shape = shape = chunk_shape(self.geometry, shards, stages)
        if isinstance(config, Config):
            depot = Depot(config, namespace, shape, clock, flow or ThreadFlow())
            owner = depot.catalog.owner(namespace.digest)
            desk: Desk = LocalDesk(depot, namespace, shape, owner)
        else:
            desk = config
        super().__init__(desk, namespace, Namer(namespace, shape, desk.owner))
        self._clock = clock
        self._plans = Plans(desk, self.geometry, self._namer)
        self._adviser = Adviser(desk, self.geometry, shape, clock)

    def share(self, namespace: Namespace, *, shards: int = 1, stages: int = 1) -> Cache:
        """Return a cache of another namespace on the same memory and tiers. Blocks briefly.

        Each is closed by itself; the last one ends what they share. Raises ConfigError when its
        parts are larger than those for which the memory was cut.
        """
        self._check()
        _check_kinds(namespace, shards, stages)
        shape = chunk_shape(namespace.geometry, shards, stages)
        desk = self._desk.join(namespace, shape, (shards, stages))
        return Cache(desk, namespace, shards=shards, stages=stages, clock=self._clock)

    # ---- match

    def prefix(
        self, tokens: TokenIds, request: Request | None = None, known: Prefix | None = None
    ) -> Prefix:
        """Name the complete chunks of a prompt. Memory only; 512 chunks take about 1 ms.

        known: the prefix of an earlier, shorter state of the same prompt; only what follows is
        hashed. Raises MisuseError when it is of other tokens, or of another cache.
        """
        return self._namer.prefix(tokens, request, known)

    def match(
        self, tokens: TokenIds | Prefix, request: Request | None = None, *, counted: bool = True
    ) -> Match:
        """Return how much of a prompt can be loaded, and from where. Memory only.

        The whole chain counts as used, whatever of it the engine has in HBM. counted: in figures
        and recordings, as a request; not where one that was counted looks again.
        """
        self._check()
        prefix = self._mine(tokens, request)
        recorder = self._recorder  # which another thread may end
        if recorder is not None and counted:
            recorder.note(prefix)
        return self._desk.match(prefix, counted=counted)

    # ---- load or recompute

    def computed(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """Tell how long a step of the engine took, from which ``advise`` learns its speed.

        spans: tokens [start, stop) of prompts and outputs that it computed, of each request in
        it. Memory only. Raises MisuseError for times and spans that are none.
        """
        check_wait("a step's seconds", seconds)
        check_kind("the spans of a step", spans, Sequence)
        for span in spans:
            _check_span(span)
        self._adviser.costs.computed(spans, seconds)

    def seed(self, path: str | Path) -> None:
        """Believe what ``kvtier doctor --measure URL --keep FILE`` found, until a tier is read.

        Tiers that this cache has not are passed over. Raises ConfigError for any other file.
        """
        self._check()
        self._adviser.seed(path)

    def advise(
        self, match: Match, computed: int = 0, *, meet: bool = False
    ) -> tuple[Match, Advice]:
        """Return what of a match is worth loading, and why; DRAM always is. Memory only.

        computed: tokens that the engine has. meet: it can compute tokens while later ones load;
        see ``Advice.begin``. By what fetches and steps took so far: before there was one of each,
        all is worth it. A tier that loses is read a little now and then, in the background, and
        used again when it wins.
        Raises MisuseError for what is no match of this cache's.
        """
        self._check()
        self._matched(match)
        check_whole("the computed tokens", computed)
        return self._adviser.advise(match, computed, meet=meet)

    # ---- lease, fetch, pin, prefetch

    def lease(self, match: Match, *, deadline: float, first: int = 0) -> Lease | None:
        """Hold what the match needs of chunks from `first` on, all in DRAM, for `deadline` seconds.

        None when there is none, or a part is not in DRAM: ``fetch`` it. Memory only.
        Raises MisuseError for a deadline that is not ahead.
        """
        self._check()
        check_ahead("a lease's deadline", deadline)
        self._matched(match)
        check_first(first)
        return self._desk.lease(match, first, deadline)

    def fetch(
        self, match: Match, *, timeout: float, deadline: float, first: int = 0
    ) -> FetchTransfer:
        """Bring chunks from `first` up into DRAM and lease them. Returns at once.

        timeout: seconds until the result is what has arrived by then; deadline: of the lease,
        in seconds after that, whether anybody takes it or not.
        Where the match says that a shared tier may know more, it is asked.
        Raises MisuseError for a deadline that is not ahead.
        """
        self._check()
        check_ahead("a lease's deadline", deadline)
        check_first(first)
        return self._fetch(match, first, timeout, deadline)

    def pin(self, match: Match, *, seconds: float, timeout: float) -> FetchTransfer:
        """Bring a prompt up into DRAM, as ``fetch`` does, and keep it there. Returns at once.

        The result is a Lease: it ends after `seconds`, by ``release`` or with this cache, and is
        prolonged by ``renew``. Pins hold half of DRAM at most, a part that several pin counted
        once; one that would go beyond is refused: the result is None, and counted.
        Raises MisuseError for seconds that are not ahead.
        """
        self._check()
        check_ahead("the end of a pin", seconds)
        return self._fetch(match, 0, timeout, seconds, pin=True)

    def _fetch(
        self, match: Match, first: int, timeout: float, hold: float, *, pin: bool = False
    ) -> FetchTransfer:
        check_wait("a timeout", timeout)
        self._matched(match)
        running = self._desk.fetch(match, first, within=timeout, hold=hold, pin=pin)
        self._adviser.timed(match, first, timeout, running)
        return FetchTransfer(running)

    def prefetch(
        self, prompt: Match | Prefix | TokenIds, *, base: float, per_1024_tokens: float
    ) -> PrefetchTransfer:
        """Bring a prompt up into DRAM before it is asked for, and hold nothing. Returns at once.

        prompt: its match, or what is to be matched.
        It takes `base` seconds and `per_1024_tokens` more for every 1024 tokens of the match, at
        most. The result is how many tokens DRAM has at its end.
        Prefetches begin nothing while reads in flight fill a quarter of DRAM, and what they read
        does not count against what fetches may: no fetch is refused on their account.
        Raises MisuseError for a budget that is negative or no number.
        """
        self._check()
        match = prompt if isinstance(prompt, Match) else self.match(prompt, counted=False)
        self._matched(match)
        for budget in (base, per_1024_tokens):
            check_wait("a prefetch's budget", budget)
        within = base + match.tokens / 1024 * per_1024_tokens
        return PrefetchTransfer(self._desk.prefetch(match, within))

    def _matched(self, match: Match) -> Prefix:
        """Return a match's prompt. Raises MisuseError for what is no match of this cache's."""
        check_kind("a match", match, Match)
        check_kind("the prompt of a match", match.prefix, Prefix)
        prefix = self._mine(match.prefix)
        check_whole("a match's tokens", match.tokens, 0, prefix.limit)
        check_whole("a match's known chunks", match.known, 0, len(prefix.names))
        return prefix

    # ---- plans

    def plan_load(
        self, lease: Lease, into: BlockTable, *, start: int | None = None
    ) -> CopyPlan | None:
        """Plan the copy of leased chunks into the engine's blocks, in token order.

        into: ids of the blocks of tokens from `start` on, one sequence for all components or one
        for each, with ABSENT for blocks that the engine does not need; for states, the one place
        that the state goes to. start: of the lease's first chunk by default. None when the
        lease's deadline has passed. Memory only.
        Every plan must be settled, once its copies have ended, with ``settle``.
        Raises MisuseError when those are not whole blocks of the leased tokens.
        """
        self._check()
        check_kind("what is loaded", lease, Lease)
        return self._plans.load(lease, into, start)

    def plan_save(
        self,
        prefix: Prefix,
        block_ids: BlockTable,
        *,
        first: int = 0,
        retention: Sequence[Retention] = (),
    ) -> CopyPlan | None:
        """Plan the copy of computed chunks into slots; None when there is nothing to save.

        prefix: of accepted, computed tokens; block_ids: the request's block table from token 0,
        one for all components or one for each, with ABSENT for blocks that are gone; for states,
        the place of the state after each chunk, or ABSENT. What has an absent block is not saved.
        first: chunks before it are known to be stored. Of a chunk that lost some of its parts
        the others are saved. Where no slot is free, the rest of the request stays unsaved, so
        that there are no holes. Memory only; every plan must be settled with ``settle``.
        retention: priorities and times by ranges of tokens, which may overlap; what none covers
        has priority 0 and no end. Of chunks that exist already nothing is copied, but they get
        the higher priority and the later end of both.
        Raises MisuseError when a block table is shorter than the chunks.
        """
        self._check()
        check_first(first)
        check_kind("what is saved", prefix, Prefix)
        self._mine(prefix)
        return self._plans.save(prefix, block_ids, first, retention)

    def settle(self, plan: CopyPlan, result: CopyResult) -> None:
        """Report that a plan's copies have ended everywhere. Memory only.

        A load's slots are let go; a save's parts are sealed, committed and written down, in the
        background, unless the cache was closed meanwhile. Raises MisuseError for a plan that is
        not this cache's or was settled before, and for a result that timed out, which does not
        settle anything.
        """
        self._check_process()
        check_kind("a plan", plan, CopyPlan)
        check_kind("a plan's result", result, CopyResult)
        issued = self._plans.settled(plan, result)
        self._desk.settle(plan.id, issued, ok=result.status is CopyStatus.OK)

    def loaded(self, match: Match, tiers: Mapping[str, int], first: int) -> None:
        """Count the tokens that an engine took from chunks [first, ...), by tier.

        Chunks that were used again are offered to tiers that look for that.
        Raises MisuseError for what are no tokens of tiers, and no chunk.
        """
        self._check_process()
        self._matched(match)
        check_first(first)
        check_kind("tokens by tier", tiers, Mapping)
        for tier, tokens in tiers.items():
            check_kind("a tier's name", tier, str)
            check_whole("a tier's tokens", tokens, 0, len(match.prefix.tokens))
        self._desk.loaded(match, tiers, first)

    # ---- the worker's side

    def bind(
        self,
        tensors: Any,
        device: Device,
        *,
        shard: int = 0,
        stage: int = 0,
        groups: int | None = None,
    ) -> Pages:
        """Bind one rank's KV tensors, one for each component, to this cache's arena.

        Of a component whose layers have a tensor each, the list of them. shard, stage: the rank's.
        groups: of layers, that copies are cut into; None: as many as their bytes are worth.
        Raises ConfigError for tensors that are not of the geometry.
        """
        self._check()  # a forked child has no such memory: touching it would end the process
        many = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        desk = self._desk
        shards, stages = self.ranks
        return Pages(
            self.geometry,
            desk.arena,
            many,
            device,
            (shard, shards, stage, stages),
            groups,
        )


def _check_kinds(namespace: object, shards: object, stages: object) -> None:
    check_kind("namespace", namespace, Namespace, ConfigError)
    check_whole("shards", shards, 1, _MOST_RANKS, ConfigError)
    check_whole("stages", stages, 1, _MOST_RANKS, ConfigError)


def open_cache(
    *tiers: str | Config,
    namespace: Namespace,
    shards: int = 1,
    stages: int = 1,
    own_process: bool = False,
    engine: str = "",
) -> Cache:
    """Open a cache from URLs, DRAM first, or one Config; or a daemon's, ``unix:PATH``.

    A daemon has its own tiers. Options of its URL: engine, that is served and whose ranks name the
    same; patience, that a call waits for the daemon at most; timeout, to wait until it is there.
    shards and stages: ranks of tensor and of pipeline parallelism.
    own_process: start a daemon for these URLs that ends with this cache, so that what moves between
    tiers takes nothing from this interpreter; ranks in processes of their own find it by `engine`.
    Blocks while memory is taken and tiers are reopened.
    Raises ConfigError with cause and remedy.
    """
    _check_kinds(namespace, shards, stages)
    check_kind("own_process", own_process, bool, ConfigError)
    check_kind("engine", engine, str, ConfigError)
    urls = [tier for tier in tiers if isinstance(tier, str)]
    remote = any(url.startswith("unix:") for url in urls)
    if remote or own_process:
        if len(urls) < len(tiers):
            raise ConfigError("a daemon takes its tiers as URLs")
        return _open_remote(urls, namespace, (shards, stages), own=own_process, engine=engine)
    if engine:
        raise ConfigError("an engine's id goes with own_process, or with unix:PATH?engine=ID")
    if len(tiers) == 1 and isinstance(tiers[0], Config):
        return Cache(tiers[0], namespace, shards=shards, stages=stages)
    if len(urls) < len(tiers):
        raise ConfigError("pass tiers as URLs, or one Config")
    return Cache(Config.from_urls(urls), namespace, shards=shards, stages=stages)


def _open_remote(
    urls: list[str], namespace: Namespace, ranks: tuple[int, int], *, own: bool, engine: str
) -> Cache:
    """Open a daemon's cache; what that needs is imported when it is asked for."""
    from kvtier.daemon.client import open_desk, open_private

    shards, stages = ranks
    shape = chunk_shape(namespace.geometry, shards, stages)
    if own:
        Config.from_urls(urls)
        desk = open_private(urls, engine, namespace, shape, ranks)
    elif len(urls) > 1 or engine:
        raise ConfigError("a daemon has its own tiers: name unix:PATH?engine=ID alone")
    else:
        desk = open_desk(urls[0], namespace, shape, ranks)
    return Cache(desk, namespace, shards=shards, stages=stages)


def _check_span(span: object) -> None:
    if not isinstance(span, Sequence) or len(span) != _SPAN:
        raise MisuseError(f"a span is its first token and its end, not {span!r}")
    check_whole("a span's first token", span[0])
    check_whole("a span's end", span[1], span[0])
