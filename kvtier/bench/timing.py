"""An engine that is a clock: a model that computes next to nothing and takes the time it is told.

Its KV says which token stands where, and its answers are made of all KV before them: whoever
loads another prompt's KV, or none, answers differently.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch

from kvtier.engine.layers import LayerHook
from kvtier.engine.spans import Span, StateCopy
from kvtier.engine.weights import ModelConfig
from kvtier.identity.geometry import Component

_HEAD: Final = 64
_VOCABULARY: Final = 4096
_CONTEXT: Final = 1 << 20
_EXACT: Final = 251  # a prime; whole numbers below 256 are exact in bfloat16
_PRIMES: Final = (31, 17, 65_521)


class TimingClock:
    """Seconds: the machine's, and those that were skipped. For one thread."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def __call__(self) -> float:
        """Return the time now."""
        return time.perf_counter() + self._skipped

    def skip(self, seconds: float) -> None:
        """Let time pass at once."""
        self._skipped += max(seconds, 0.0)


class TimingModel:
    """See ``AnyModel``. seconds_per_token: of each token of a step, which `clock` skips."""

    def __init__(self, seconds_per_token: float, clock: TimingClock) -> None:
        self.config = ModelConfig(
            vocab_size=_VOCABULARY,
            layers=1,
            hidden_size=_HEAD,
            heads=1,
            kv_heads=1,
            head_size=_HEAD,
            intermediate_size=_HEAD,
            context_tokens=_CONTEXT,
        )
        self._seconds = seconds_per_token
        self._clock = clock
        self._ramp = torch.arange(_HEAD)

    @property
    def components(self) -> tuple[Component, ...]:
        """One layer of full attention, 256 bytes a token."""
        return (Component(1, 1, _HEAD),)

    @torch.inference_mode()
    def forward(
        self, spans: Sequence[Span], kv: Sequence[torch.Tensor], hook: LayerHook | None = None
    ) -> torch.Tensor:
        """Write the spans' KV, skip the time that computing takes, and return logits."""
        pool = kv[0][0].flatten(1, 2).flatten(2)  # [planes, slots, head]
        size = kv[0].shape[3]
        logits = torch.zeros(sum(span.logits for span in spans), _VOCABULARY)
        if hook is not None:
            hook.before(0, 0)
        row = 0
        for span in spans:
            at = torch.arange(span.end)
            table = torch.as_tensor(span.tables[0][: -(-span.end // size)])
            slots = table[at // size] * size + at % size
            self._write(pool, slots[span.start :], span)
            for end in range(span.end - span.logits + 1, span.end + 1):
                logits[row, self._answer(pool, slots[:end])] = 1.0
                row += 1
        if hook is not None:
            hook.after(0, 0)
        self._clock.skip(sum(len(span.tokens) for span in spans) * self._seconds)
        return logits

    def copy_states(self, copies: Sequence[StateCopy], kv: Sequence[torch.Tensor]) -> None:
        """Copy nothing: there are no states."""

    def _write(self, pool: torch.Tensor, slots: torch.Tensor, span: Span) -> None:
        by_token, by_place, _ = _PRIMES
        tokens = torch.as_tensor(span.tokens)[:, None].long()
        places = torch.arange(span.start, span.end)[:, None]
        for plane in range(2):
            values = tokens * (by_token + plane) + places * by_place + self._ramp
            pool[plane, slots] = (values % _EXACT).to(pool.dtype)

    @staticmethod
    def _answer(pool: torch.Tensor, slots: torch.Tensor) -> int:
        """Return a token that every byte of KV before it has a say in."""
        weights = torch.arange(1, len(slots) + 1) % _PRIMES[2]
        sums = pool[0, slots].long().sum(1) + 2 * pool[1, slots].long().sum(1)
        return int((sums * weights).sum() % _VOCABULARY)
