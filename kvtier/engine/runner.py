"""The runner: the pools' bytes, the forward pass over them, and the choice of tokens.

It knows what it sampled last, so that a step can be scheduled before the scheduler does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from kvtier.engine.compute import Compute
from kvtier.engine.graphs import DecodeGraphs
from kvtier.engine.layers import LayerHook
from kvtier.engine.model import Model
from kvtier.engine.sampler import Chosen
from kvtier.engine.scheduler import PENDING_TOKEN, Work
from kvtier.engine.spans import Span, StateCopy
from kvtier.engine.weights import ModelConfig
from kvtier.errors import ConfigError
from kvtier.identity.geometry import Component, Needs


class AnyModel(Protocol):
    """What an engine needs of a model: its sizes, what KV it keeps, and its forward pass."""

    @property
    def config(self) -> ModelConfig:
        """Sizes: vocabulary and context."""
        ...

    @property
    def components(self) -> tuple[Component, ...]:
        """What KV it keeps, one for each kind of layer."""
        ...

    def forward(
        self, spans: Sequence[Span], kv: Sequence[torch.Tensor], hook: LayerHook | None = None
    ) -> torch.Tensor:
        """Compute spans of distinct requests; see ``Model.forward``."""
        ...

    def copy_states(self, copies: Sequence[StateCopy], kv: Sequence[torch.Tensor]) -> None:
        """Copy recurrent states from slot to slot."""
        ...


class Runner:
    """Runs steps over one pool for each component of the model. Blocks; holds no policy.

    compute: where the pools and the model go, and all that steps compute. graphs: record decode
    steps and replay them; None: where that can be had.
    Raises ConfigError for what does not go together.
    """

    def __init__(
        self,
        model: AnyModel,
        *,
        num_blocks: int,
        num_states: int,
        block_tokens: int,
        kv_dtype: torch.dtype,
        compute: Compute,
        graphs: bool | None = None,
    ) -> None:
        if kv_dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ConfigError(f"kv_dtype {kv_dtype} is not one of bfloat16, float16, float32")
        self.num_blocks = num_blocks
        self.kv = tuple(
            torch.zeros(
                (
                    one.layers,
                    one.planes,
                    *((num_states,) if one.needs is Needs.LAST else (num_blocks, block_tokens)),
                    one.heads,
                    one.head_size,
                ),
                dtype=kv_dtype,
                device=compute.device,
            )
            for one in model.components
        )
        self._compute = compute
        self._model = _moved(model, compute.device)
        self.graphs = _graphs(self._model, self.kv, compute, wanted=graphs)
        self._last: dict[str, int] = {}

    def run(self, work: Sequence[Work], hook: LayerHook | None = None) -> list[list[int]]:
        """Compute a step; return for each span the output tokens that it gives, none or more.

        A span without drafts gives one, or none if it ends before the prompt does. With drafts
        it gives those that are right, and one more.
        """
        if not work:
            return []
        spans = [self._known(item) for item in work]
        logits = self._logits(spans, hook)
        asked = [(item.request.sampling, item.span.logits) for item in work]
        chosen = Chosen(logits, asked, self._compute)
        tokens, row = [], 0
        for item in work:
            sampled: list[int] = []
            for offset in range(item.span.logits):
                sampled.append(
                    chosen.token(row + offset, item.request.sampling, item.index + offset)
                )
                if sampled[offset:] != list(item.drafts[offset : offset + 1]):
                    break
            row += item.span.logits
            tokens.append(sampled)
        self._last = {
            item.request.request_id: sampled[-1]
            for item, sampled in zip(work, tokens, strict=True)
            if sampled
        }
        return tokens

    @property
    def model(self) -> AnyModel:
        """The model, where it computes."""
        return self._model

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copy states from slot to slot."""
        if copies:
            self._model.copy_states(copies, self.kv)

    def _logits(self, spans: Sequence[Span], hook: LayerHook | None) -> torch.Tensor:
        """Return a step's logits, replayed where it is of that kind and without a hook."""
        found = None if self.graphs is None or hook else self.graphs.logits(spans)
        return self._model.forward(spans, self.kv, hook) if found is None else found

    def _known(self, item: Work) -> Span:
        """Put the last step's output where the scheduler did not know it."""
        if PENDING_TOKEN not in item.span.tokens:
            return item.span
        last = self._last[item.request.request_id]
        tokens = [last if token == PENDING_TOKEN else token for token in item.span.tokens]
        return replace(item.span, tokens=tokens)


def _moved(model: AnyModel, device: torch.device) -> AnyModel:
    if isinstance(model, Model):
        return model.to(device)
    if device.type != "cpu":
        raise ConfigError(
            f"{type(model).__name__} has no weights that could be on {device}: leave out the device"
        )
    return model


def _graphs(
    model: AnyModel, kv: Sequence[torch.Tensor], compute: Compute, *, wanted: bool | None
) -> DecodeGraphs | None:
    """Return what records decode steps. wanted: None where it does not matter."""
    if wanted is False or not (wanted or compute.captures):
        return None
    if not compute.captures:
        raise ConfigError(f"graphs are recorded on a GPU, not on {compute.device}: leave them out")
    if not isinstance(model, Model):
        if wanted:
            raise ConfigError(
                f"{type(model).__name__} has no decode step to record: leave them out"
            )
        return None
    return DecodeGraphs(model, kv, compute)
