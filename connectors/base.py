"""The contract between a serving engine and a cache: all that an engine knows of kvtier.

The engine's life of a request, with the calls in order:

1. ``match`` when the request may be admitted. PENDING means: ask again at a later step, hold
   nothing meanwhile. Otherwise the answer says how many tokens beyond those already in HBM
   can be loaded; their bytes then lie in leased DRAM.
2. ``load`` once blocks are allocated for them. The request waits until ``poll`` reports it.
3. ``save`` after every step that computed prompt or output tokens of the request.
4. ``computed`` after every step, for all requests together.
5. ``finish`` when it ends, is aborted or is preempted. True means: its blocks are still being
   read or written; keep them until ``poll`` names the request in ``released``.

Where tiers are slow, ``match`` may offer nothing to load yet, but tokens from `begin` on that come
while the engine computes those before them: it asks ``arrived`` at every step, and calls ``load``
for what is still to be computed when they are there.

Where ``landing`` gives a load's layers, the engine may compute the tokens behind it before it has
settled: before each layer's attention it calls ``hold``. What is loaded was verified when it was
leased, so only the copy itself can still fail, by an error of the device, by cancellation, or
with the daemon whose memory it is: also after layers have been read. Then the step's output for
that request is void. The engine takes no token of it, shows none and keeps none of its blocks:
after the forward pass it calls ``poll``, and only if that reports the load whole does the step
count. Otherwise it computes again what lies behind the tokens that are valid. A load that ``poll``
does not report then has not settled, and the request waits for it as if it had computed nothing.

Likewise ``leaving`` lets a step's KV go while later layers are computed: each layer once
``written``, and all of it stored only after ``end`` has said that the step counts. A request that
ends before that stores nothing of it; its blocks are held until what had left has settled.

No call but ``wait`` and ``hold`` waits, none raises for a fault of a tier, and all are made on one
thread. From its first call to ``finish`` a request keeps its tokens, to which others are added, and
its identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt the cache can load beyond what the engine has.

    tokens: loadable tokens, a multiple of the engine's block size; 0 is a miss.
    pending: the bytes are on their way up from a slower tier; ask again.
    begin: the first of the tokens, where those are not the next to be computed. Of ``match``, with
        no tokens: those from `begin` on are on their way; compute, and ask ``arrived``.
    """

    tokens: int
    pending: bool = False
    begin: int = 0


Places = Sequence[int] | Sequence[Sequence[int]]
"""Block ids of all components together, or of each."""

MISS: Final = Match(0)
PENDING: Final = Match(0, pending=True)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that has settled.

    tokens: how many of the tokens asked for are valid, counted from the first; the engine
        computes the others. 0 when the load failed at its first part.
    tiers: the tier that each of those tokens' bytes came from, as tokens by tier name.
    """

    request_id: str
    tokens: int
    tiers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Update:
    """What has settled since the last ``poll``.

    released: requests whose blocks the engine kept at ``finish``'s word and may free now.
    """

    loaded: tuple[Loaded, ...] = ()
    released: tuple[str, ...] = ()


class Landing(Protocol):
    """A load under way, whose layers may be read one by one. For the engine's thread."""

    def begun(self) -> bool:
        """Say whether the first layers are there. Never blocks."""
        ...

    def hold(self, component: int, layer: int) -> None:
        """Let what the engine computes from now on come after this layer's bytes.

        Where the engine computes on a GPU, that waits. Where it computes on this thread, the call
        blocks, but not for long: a load that stands still is given up waiting for. It never
        raises, and says nothing of how the load ends.
        """
        ...

    def settle(self) -> None:
        """Block until the load has settled, but not for long. Called before ``poll``, after a step.

        A GPU may be computing what it has only begun to load.
        """
        ...


class Leaving(Protocol):
    """What a step saves while it computes. For the engine's thread."""

    def written(self, component: int, layer: int) -> None:
        """Say that the layer's KV is written, or that work is enqueued which writes it.

        layer: of the component's, each in turn, from 0. Does not block.
        """
        ...

    def end(self, *, good: bool) -> None:
        """Say that the step is over. good: it counts, so that what has left may be stored."""
        ...


class Connector(Protocol):
    """What an engine calls. See the module's text for the order of calls."""

    def match(
        self,
        request_id: str,
        tokens: NDArray[np.int32],
        computed: int,
        identity: object | None = None,
    ) -> Match:
        """Say what can be loaded beyond the first `computed` tokens, a multiple of the block.

        tokens: the whole prompt, int32 [n]. Idempotent while the answer is PENDING.
        The answer never covers the last token of the prompt: the engine computes it.
        identity: a ``kvtier.Request`` (adapter, salt, spans), or None.
        """
        ...

    def arrived(self, request_id: str, computed: int) -> Match | None:
        """Say what has come meanwhile of what ``match`` said was on its way; None: not yet.

        computed: tokens computed and being computed, a multiple of the block. The answer's tokens
        are from its `begin` on, which is not below that; 0 of them when nothing is to be loaded.
        """
        ...

    def load(self, request_id: str, block_ids: Places) -> None:
        """Start to fill `block_ids`, in order: the blocks of the tokens that were offered.

        Those of ``match``'s answer or, where some were on their way, of ``arrived``'s.

        Of a model of several components: for each its blocks, -1 for those that a window does
        not reach; for a recurrent one the slot of its state, alone.
        """
        ...

    def landing(self, request_id: str) -> Landing | None:
        """Return the load that was just begun, layer by layer; None: it ends as a whole only."""
        ...

    def poll(self) -> Update:
        """Return what has settled since the last call."""
        ...

    def wait(self, seconds: float) -> None:
        """Sleep until something may have settled or become loadable, at most `seconds`.

        The one call that blocks. An engine makes it when it has nothing else to compute.
        """
        ...

    def save(
        self,
        request_id: str,
        tokens: NDArray[np.int32],
        block_ids: Places,
        identity: object | None = None,
    ) -> None:
        """Offer the KV of `tokens`, all accepted and computed, that lies in `block_ids`.

        tokens: prompt and output so far, int32 [n]; block_ids: the request's block table, or one
        for each component of the model, with -1 for what the engine has not got; of a recurrent
        component the slot of the state after each whole chunk.
        Chunks that are already stored, and the incomplete tail, cost nothing.
        """
        ...

    def leaving(
        self,
        request_id: str,
        tokens: NDArray[np.int32],
        block_ids: Places,
        identity: object | None = None,
    ) -> Leaving | None:
        """Offer, before a step, KV of accepted tokens that the step computes; see ``save``.

        None: nothing leaves early; ``save`` is called in any case, once the step counts.
        """
        ...

    def computed(self, spans: Sequence[tuple[int, int]], seconds: float) -> None:
        """Tell how long a step took that computed tokens [start, stop) of each request in it."""
        ...

    def saving(self, request_id: str) -> bool:
        """Say whether copies of this request are in flight: its blocks must stay as they are."""
        ...

    def finish(self, request_id: str) -> bool:
        """End the request. True: keep its blocks until ``poll`` names it in ``released``."""
        ...

    def close(self) -> None:
        """Wait for copies in flight, bounded; then let go of the engine's memory."""
        ...
