"""A request: what the caller asks for, what it gets, and the engine's state of it in between."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier.connectors.base import Landing, Loaded
from kvtier.engine.blocks import chain_keys, root_key
from kvtier.engine.spans import Inputs
from kvtier.engine.tables import Table
from kvtier.errors import ConfigError, MisuseError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when to stop.

    temperature: 0 is greedy. seed: one seed gives one output, whatever else the engine runs.
    stop: token ids that end the output; the one that did is its last token.
    Raises ConfigError for values out of range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; ask for at least 1")
        # Written so that NaN fails too.
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 or more, finite")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed is {self.seed}; it must fit 64 bits unsigned")


@dataclass(frozen=True, slots=True)
class Stats:
    """What a request met with. Times are the engine's clock, in seconds; None: never came.

    hit_tokens: prompt tokens that were not computed, by the tier that had them; "hbm" is the
        engine's own prefix cache. recomputed_tokens: prompt tokens that were. After a preemption
        before the first token, both tell of the last admission: of what the first token cost.
    drafted_tokens, accepted_tokens: output tokens that were guessed, and guessed right.
    """

    prompt_tokens: int
    hit_tokens: Mapping[str, int]
    recomputed_tokens: int
    preemptions: int
    submitted: float
    first_token: float | None
    last_token: float | None
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a request. reason: "stop", "length" or "abort"."""

    reason: str
    stats: Stats


@dataclass(frozen=True, slots=True)
class Output:
    """One event of a request: a token, its end, or both."""

    request_id: str
    token: int | None
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. tokens: the output only, the prompt not included."""

    request_id: str
    tokens: tuple[int, ...]
    finish: Finish


def completion(outputs: Sequence[Output]) -> Completion:
    """Return the answer that a request's outputs make, the last of which is its end."""
    last = outputs[-1]
    if last.finish is None:
        raise MisuseError(f"{last.request_id} has not ended")
    tokens = tuple(output.token for output in outputs if output.token is not None)
    return Completion(last.request_id, tokens, last.finish)


def prompt_tokens(tokens: Sequence[int], vocab: int) -> NDArray[np.int32]:
    """Return a prompt as int32 [n]. Raises ConfigError for what is none of this vocabulary."""
    prompt = np.asarray(tokens)
    if prompt.ndim != 1:
        raise ConfigError(f"a prompt is one list of token ids, not {prompt.ndim}-dimensional")
    if not len(prompt):
        raise ConfigError("the prompt is empty; give at least one token")
    if prompt.dtype.kind not in "iu":
        raise ConfigError(f"the prompt holds {prompt.dtype} values; token ids are integers")
    if prompt.min() < 0 or prompt.max() >= vocab:
        raise ConfigError(f"a token id lies outside the vocabulary, 0 to {vocab - 1}")
    return prompt.astype(np.int32)


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """The engine's state of one request.

    computed: tokens whose KV lies in `table`, from the first, all accepted; scheduled: those and
    what steps under way compute. pending: output tokens that those steps will give. loading:
    tokens asked of the connector, beyond the computed ones; layers: their load, where it can be
    read layer by layer, so that the request may run before it has settled. meeting: later tokens
    are on their way, while it runs; barrier: then where they begin, and computing stops; landing:
    how many were asked for; landed: how many came, -1 until that is known. keys: of the whole
    blocks of all tokens so far; the first `published` are in the prefix cache. matched: the
    connector knows of the request. epoch: goes up when what was scheduled before is void.
    """

    request_id: str
    sampling: Sampling
    identity: object | None
    prompt_tokens: int
    block_tokens: int
    submitted: float
    inputs: Inputs | None = None
    phase: Phase = Phase.WAITING
    matched: bool = False
    count: int = 0
    computed: int = 0
    scheduled: int = 0
    pending: int = 0
    loading: int = 0
    layers: Landing | None = None
    meeting: bool = False
    barrier: int = 0
    landing: int = 0
    landed: int = -1
    published: int = 0
    preemptions: int = 0
    epoch: int = 0
    drafted: int = 0
    accepted: int = 0
    table: Table | None = None
    keys: list[bytes] = field(default_factory=list)
    hits: dict[str, int] = field(default_factory=dict)
    first_token: float | None = None
    last_token: float | None = None
    _tokens: NDArray[np.int32] = field(init=False)
    _root: bytes = field(init=False)

    def __post_init__(self) -> None:
        self._tokens = np.zeros(self.prompt_tokens + self.sampling.max_tokens, np.int32)
        self._root = root_key(self.identity)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and output so far, int32 [count]."""
        return self._tokens[: self.count]

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return self.count - self.prompt_tokens

    @property
    def complete(self) -> bool:
        """Whether steps under way will give the last output token that was asked for."""
        return self.generated + self.pending >= self.sampling.max_tokens

    def restart(self) -> None:
        """Begin anew: nothing is computed, and what steps under way will say does not count."""
        self.epoch += 1
        self.computed = self.scheduled = self.published = self.pending = self.loading = 0
        self.layers = None
        self.meet_no_more()

    def void(self) -> None:
        """Take back what steps under way will say; what is computed stays."""
        self.epoch += 1
        self.pending, self.scheduled, self.layers = 0, self.computed, None

    def join(self) -> None:
        """Run on behind the tokens of a load that has not settled yet."""
        self.phase = Phase.RUNNING
        self.scheduled = self.computed + self.loading

    @property
    def under(self) -> Landing | None:
        """The load that has not settled yet and behind which it runs."""
        return self.layers if self.loading and self.phase is Phase.RUNNING else None

    def meet_no_more(self) -> None:
        """Wait for no tokens from behind any more."""
        self.meeting, self.barrier, self.landing, self.landed = False, 0, 0, -1

    def wait_behind(self) -> None:
        """Once all before them is computed, wait for tokens from behind as for any load's."""
        if self.landing and self.landed < 0 and self.computed >= self.barrier:
            self.phase, self.loading = Phase.LOADING, self.landing
            self.meet_no_more()

    @property
    def met(self) -> bool:
        """Whether the tokens from behind are there, and all before them is computed."""
        return self.landed >= 0 and self.computed >= self.barrier

    @property
    def waits(self) -> bool:
        """Whether all before the tokens that come from behind is computed, or being computed."""
        return bool(self.barrier) and self.scheduled >= self.barrier

    def hit(self, loaded: Loaded, valid: int) -> None:
        """Count the tokens of a load by tier, of which there are never more than were valid."""
        if self.generated:
            return
        hits: dict[str, int] = {}
        for tier, tokens in loaded.tiers.items():
            hits[tier] = min(max(tokens, 0), valid - sum(hits.values()))
        if unnamed := valid - sum(hits.values()):
            hits["unknown"] = hits.get("unknown", 0) + unnamed
        self.hits |= hits

    def append(self, tokens: NDArray[np.int32]) -> None:
        """Add tokens at the end, and the keys of the blocks that they fill."""
        self._tokens[self.count : self.count + len(tokens)] = tokens
        self.count += len(tokens)
        parent = self.keys[-1] if self.keys else self._root
        fresh = self.tokens[len(self.keys) * self.block_tokens :]
        self.keys += chain_keys(parent, fresh, self.block_tokens)

    def accept(self, token: int, now: float) -> str | None:
        """Append an output token; return why it is the last one, if it is."""
        self.append(np.array([token], np.int32))
        self.last_token = now
        if self.first_token is None:
            self.first_token = now
        if token in self.sampling.stop:
            return "stop"
        return "length" if self.generated == self.sampling.max_tokens else None

    def stats(self) -> Stats:
        """Return what the request met with so far."""
        hits = {tier: tokens for tier, tokens in self.hits.items() if tokens}
        return Stats(
            prompt_tokens=self.prompt_tokens,
            hit_tokens=hits,
            recomputed_tokens=self.prompt_tokens - sum(hits.values()),
            preemptions=self.preemptions,
            submitted=self.submitted,
            first_token=self.first_token,
            last_token=self.last_token,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
        )
