"""Decode steps that are recorded once and replayed: the host then enqueues one thing, not hundreds.

A recorded step reads and writes the memory that it was recorded with, whatever has happened to the
Python objects since. So for each shape there is one tensor of numbers that each step is copied to,
and one of logits that it leaves; nothing else of a step reaches the recording.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from kvtier.engine.attention import KEY_TILE
from kvtier.engine.compute import Compute, Graph
from kvtier.engine.decode import DecodeShape, shape_for, slots_in
from kvtier.engine.model import Model
from kvtier.engine.spans import Span
from kvtier.identity.geometry import Needs

_MOST_GRAPHS: Final = 32


class DecodeGraphs:
    """The recorded steps of one model over one pool. For the engine's thread.

    kv: a pool for each component, whose memory has to stay where it is. The least recently used
    recording goes where there are more than 32. captured, replayed: how often that happened.
    """

    def __init__(self, model: Model, kv: Sequence[torch.Tensor], compute: Compute) -> None:
        self._model = model
        self._kv = kv
        self._compute = compute
        self._states = tuple(one.needs is Needs.LAST for one in model.components)
        tokens = (pool.shape[3] for pool, one in zip(kv, self._states, strict=True) if not one)
        self._block_tokens = next(tokens, KEY_TILE)
        self._steps: OrderedDict[DecodeShape, _Step] = OrderedDict()
        self.captured = 0
        self.replayed = 0

    @torch.inference_mode()
    def logits(self, spans: Sequence[Span]) -> torch.Tensor | None:
        """Return the logits of a decode step, float32 [spans, vocab]; None: compute it otherwise.

        As ``Model.forward`` does. They are good until the next call. A shape that is new is
        recorded first, which takes as long as some steps.
        """
        shape = shape_for(spans)
        if shape is None:
            return None
        numbers = shape.numbers(spans, self._block_tokens, self._states)
        step = self._steps.pop(shape, None)
        if step is None:
            step = _Step(self._model, self._kv, self._compute, shape, numbers, self._states)
            self.captured += 1
            if len(self._steps) >= _MOST_GRAPHS:
                self._steps.popitem(last=False)
        self._steps[shape] = step
        self.replayed += 1
        return step.run(numbers)[: len(spans)]


class _Step:
    """One recording, and the memory that it reads and leaves. numbers: of its first run.

    To record a step is to run it: it writes the same KV each time, but moves states on. So these
    are put back as they were. states: of each component, whether it has them.
    """

    def __init__(
        self,
        model: Model,
        kv: Sequence[torch.Tensor],
        compute: Compute,
        shape: DecodeShape,
        numbers: torch.Tensor,
        states: Sequence[bool],
    ) -> None:
        self._compute = compute
        self._numbers = torch.zeros(numbers.shape, dtype=numbers.dtype, device=model.device)
        logits = (shape.requests, model.config.vocab_size)
        self._logits = torch.zeros(logits, dtype=torch.float32, device=model.device)

        def step() -> None:
            self._logits.copy_(model.decode(self._numbers, shape.keys, kv))

        compute.upload(numbers, self._numbers)  # what it runs on while it is recorded
        moved = [
            (pool, slots_in(self._numbers, component, len(kv)))
            for component, (pool, one) in enumerate(zip(kv, states, strict=True))
            if one
        ]
        with _kept(moved):
            self._graph: Graph = compute.capture(step)

    def run(self, numbers: torch.Tensor) -> torch.Tensor:
        """Replay it on other numbers; return its logits."""
        self._compute.upload(numbers, self._numbers)
        self._graph.replay()
        return self._logits


@contextlib.contextmanager
def _kept(states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Leave states as they were, whatever happens.

    states: pools, and which slots of each, int64 [requests].
    """
    before = [pool.index_select(2, slots) for pool, slots in states]
    try:
        yield
    finally:  # of memory that is short, say, a recording fails, and the step may be tried again
        for (pool, slots), one in zip(states, before, strict=True):
            pool.index_copy_(2, slots, one)
