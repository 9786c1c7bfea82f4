"""Models of several kinds of layer, each of which keeps another kind of KV.

Full attention keeps a key and a value of every token; a sliding window needs the last of them
only; MLA keeps one latent vector a token; a recurrent layer keeps one state. Around them all is
as in ``Model``: norms, SwiGLU, and tiles of one fixed shape.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from kvtier.engine.attention import BACKENDS, QUERY_TILE, Attention, PagedAttention
from kvtier.engine.decode import DecodeAttention, slots_in
from kvtier.engine.latent import LatentWeights
from kvtier.engine.layers import LayerHook
from kvtier.engine.model import ROW_TILE, Model, angles, turn
from kvtier.engine.recurrent import DecodeRecurrence, Recurrence, recurrent_width
from kvtier.engine.spans import Span, placed
from kvtier.engine.weights import LayerWeights, ModelConfig, Weights, random_weights
from kvtier.errors import ConfigError
from kvtier.identity.geometry import Component, Needs


class Kind(enum.Enum):
    """What a layer looks back with."""

    FULL = "attention"
    WINDOW = "window"
    LATENT = "latent"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """The shape of a model: its sizes, and the kind of each of its layers.

    window: tokens that a WINDOW layer sees. latent_rank, rope_size: of what a LATENT layer keeps
    of a token, the vector that is projected up, and the key that RoPE turns.
    """

    sizes: ModelConfig
    kinds: tuple[Kind, ...]
    window: int = 32
    latent_rank: int = 24
    rope_size: int = 8

    def __post_init__(self) -> None:
        if len(self.kinds) != self.sizes.layers:
            raise ConfigError(f"{self.sizes.layers} layers need as many kinds, not {self.kinds}")
        if min(self.window, self.latent_rank, self.rope_size) < 1 or self.rope_size % 2:
            raise ConfigError("window, latent_rank and an even rope_size must be at least 1")

    @property
    def used(self) -> tuple[Kind, ...]:
        """The kinds that occur, in the order of their components."""
        return tuple(dict.fromkeys(self.kinds))

    def attention(self, kind: Kind) -> ModelConfig:
        """Return the sizes of the heads of a kind: MLA looks at its latents as at one KV head."""
        if kind is not Kind.LATENT:
            return self.sizes
        size = self.latent_rank + self.rope_size
        return dataclasses.replace(self.sizes, kv_heads=1, head_size=size)

    def component(self, kind: Kind) -> Component:
        """Describe the KV of one kind of layer."""
        heads, layers = self.attention(kind), self.kinds.count(kind)
        if kind is Kind.RECURRENT:
            size = heads.head_size**2
            return Component(layers, heads.heads, size, 1, kind.value, Needs.LAST)
        planes, needs, window = 1 if kind is Kind.LATENT else 2, Needs.ALL, 0
        if kind is Kind.WINDOW:
            needs, window = Needs.TRAILING, self.window
        return Component(
            layers,
            heads.kv_heads,
            heads.head_size,
            planes,
            kind.value,
            needs,
            window,
            replicated=kind is Kind.LATENT,
        )


class HybridModel(Model):
    """See Model. A layer's ``qkv`` projects what its kind mixes, ``attention_out`` what it gives.

    Recurrent states start from zeros at position 0 and are in their slots from then on.
    """

    def __init__(self, shape: HybridConfig, weights: Weights) -> None:
        super().__init__(weights)
        self.shape = shape
        turns = angles(shape.sizes.context_tokens, shape.rope_size, shape.sizes.rope_base)
        cos, sin = turns.cos().to(self.dtype), turns.sin().to(self.dtype)
        self.latent_turns = cos.to(self.device), sin.to(self.device)

    def to(self, device: torch.device) -> Self:
        """See Model."""
        there = super().to(device)
        cos, sin = self.latent_turns
        there.latent_turns = cos.to(device), sin.to(device)
        return there

    @property
    def components(self) -> tuple[Component, ...]:
        """What KV the model keeps, one for each kind of layer."""
        return tuple(self.shape.component(kind) for kind in self.shape.used)

    @torch.inference_mode()
    def forward(
        self, spans: Sequence[Span], kv: Sequence[torch.Tensor], hook: LayerHook | None = None
    ) -> torch.Tensor:
        """See Model. kv: a pool for each component."""
        rows = -(-sum(len(span.tokens) for span in spans) // ROW_TILE) * ROW_TILE
        ids, positions = placed(spans, rows, self.device)
        hidden = self._embed(spans, ids)
        count = sum(len(span.tokens) for span in spans)
        mixers: dict[Kind, _Mixer] = {}
        for index, kind in enumerate(self.shape.used):
            if kind is Kind.RECURRENT:
                mixers[kind] = Recurrence(spans, kv[index], index, self.config.head_size)
                continue
            heads, window = self.shape.attention(kind), self._window(kind)
            paged = PagedAttention(heads, spans, kv[index], self.dtype, index, window)
            mixers[kind] = self._mixer(kind, paged, positions, count)
        self._mixed(hidden, mixers, hook)
        return self._logits(hidden, spans)

    @torch.inference_mode()
    def decode(self, numbers: torch.Tensor, keys: int, kv: Sequence[torch.Tensor]) -> torch.Tensor:
        """See Model. It moves recurrent states on, each time that it runs."""
        ids, positions, hidden = self._decoded(numbers)
        mixers: dict[Kind, _Mixer] = {}
        for index, kind in enumerate(self.shape.used):
            if kind is Kind.RECURRENT:
                slots = slots_in(numbers, index, len(self.shape.used))
                size = self.config.head_size
                mixers[kind] = DecodeRecurrence(slots, numbers[:, 1], kv[index], size)
                continue
            heads, window = self.shape.attention(kind), self._window(kind)
            paged = DecodeAttention(heads, numbers, keys, kv[index], self.dtype, index, window)
            mixers[kind] = self._mixer(kind, paged, positions, len(ids))
        self._mixed(hidden, mixers)
        return self._head(hidden)[: len(ids)].float()

    def _mixed(
        self,
        hidden: torch.Tensor,
        mixers: Mapping[Kind, _Mixer],
        hook: LayerHook | None = None,
    ) -> None:
        """Pass all rows of `hidden` through the layers, in place."""
        rows, done = len(hidden), dict.fromkeys(self.shape.used, 0)
        with sdpa_kernel(BACKENDS[self.device.type]):
            for kind, layer in zip(self.shape.kinds, self.weights.layers, strict=True):
                projected = hidden.new_zeros(rows + QUERY_TILE, layer.qkv.shape[0])
                mixed = hidden.new_zeros(rows + QUERY_TILE, layer.attention_out.shape[1])
                for first in range(0, rows, ROW_TILE):
                    tile = slice(first, first + ROW_TILE)
                    normed = self._norm(hidden[tile], layer.attention_norm)
                    torch.mm(normed, layer.qkv.t(), out=projected[tile])
                component = self.shape.used.index(kind)
                if hook is not None:
                    hook.before(component, done[kind])
                mixers[kind].mix(done[kind], projected, mixed)
                if hook is not None:
                    hook.after(component, done[kind])
                done[kind] += 1
                self._finish(layer, hidden, mixed)

    def _finish(self, layer: LayerWeights, hidden: torch.Tensor, mixed: torch.Tensor) -> None:
        """Add to all rows of `hidden` what the layer mixed, and then its SwiGLU."""
        for first in range(0, len(hidden), ROW_TILE):
            tile = slice(first, first + ROW_TILE)
            self._feed_forward(layer, hidden[tile], mixed[tile])

    def _window(self, kind: Kind) -> int:
        return self.shape.window if kind is Kind.WINDOW else 0

    def _mixer(
        self, kind: Kind, attention: Attention, positions: torch.Tensor, count: int
    ) -> _Attention:
        """Return what mixes the layers of a kind of attention. positions: of whole tiles."""
        turns = self.latent_turns if kind is Kind.LATENT else (self.cos, self.sin)
        cos, sin = (one.index_select(0, positions) for one in turns)
        latent = self.shape.latent_rank if kind is Kind.LATENT else 0
        return _Attention(self.shape.attention(kind), latent, attention, count, (cos, sin))


class _Attention:
    """One step's attention layers of one kind: RoPE, then write and read.

    latent: the first elements of every head that RoPE leaves as they are; of the kept head they
    are the latent, which is normed. count: tokens of all spans.
    """

    def __init__(
        self,
        heads: ModelConfig,
        latent: int,
        attention: Attention,
        count: int,
        turns: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._heads, self._latent, self._attention = heads, latent, attention
        self._count, self._turns = count, turns

    def mix(self, layer: int, projected: torch.Tensor, mixed: torch.Tensor) -> None:
        """Fill the spans' rows of `mixed`."""
        heads, latent = self._heads, self._latent
        cos, sin = self._turns
        for first in range(0, len(cos), ROW_TILE):
            tile = slice(first, first + ROW_TILE)
            turned = projected[tile, : heads.query_size + heads.kv_size]
            turned = turned.unflatten(1, (-1, heads.head_size))
            if latent:
                kept = turned[:, -1, :latent]
                kept.copy_(functional.rms_norm(kept, (latent,)))
            turn(turned[:, :, latent:], cos[tile], sin[tile])
        self._attention.write(layer, projected[: self._count, heads.query_size :])
        self._attention.read(layer, projected[:, : heads.query_size], mixed)


_Mixer = _Attention | Recurrence | DecodeRecurrence


def random_hybrid(shape: HybridConfig, seed: int = 0) -> HybridModel:
    """Return a model with weights drawn from a normal distribution; one seed gives one model."""
    weights = random_weights(shape.sizes, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    layers = tuple(
        _of_kind(shape, kind, layer, generator)
        for kind, layer in zip(shape.kinds, weights.layers, strict=True)
    )
    return HybridModel(shape, dataclasses.replace(weights, layers=layers))


def _of_kind(
    shape: HybridConfig, kind: Kind, layer: LayerWeights, generator: torch.Generator
) -> LayerWeights:
    """Return the layer with projections for its kind."""
    sizes, rank = shape.sizes, shape.latent_rank

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * sizes.initializer_range

    if kind is Kind.RECURRENT:
        width = recurrent_width(sizes.heads, sizes.head_size)
        return dataclasses.replace(layer, qkv=draw(width, sizes.hidden_size))
    if kind is Kind.LATENT:
        per_head = sizes.head_size + shape.rope_size
        latent = LatentWeights(
            query=draw(sizes.heads * per_head, sizes.hidden_size),
            down=draw(rank + shape.rope_size, sizes.hidden_size),
            up_keys=draw(sizes.heads, sizes.head_size, rank),
            up_values=draw(sizes.heads, sizes.head_size, rank),
            out=draw(sizes.hidden_size, sizes.query_size),
        )
        into, out = latent.folded()
        return dataclasses.replace(layer, qkv=into, attention_out=out)
    return layer
