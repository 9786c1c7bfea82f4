"""Geometry: the shape of a model's KV on its engine, and how many bytes that is.

KV bytes per token = layers x planes x heads x head size x bytes per element, summed over the
components, with two planes (K and V) for attention: the formula of the PagedAttention paper
(Kwon et al., SOSP 2023, section 3). An MLA latent is one plane of one head whose size is the
latent rank plus the shared RoPE key (DeepSeek-V2, section 2.1).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.checks import check_kind, check_whole
from kvtier.errors import ConfigError, unknown
from kvtier.identity.record import PartName

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}
LAYOUT: Final = "layer-plane-token"
_NEAR_TOKENS: Final = 256
_MAX_CHUNK_TOKENS: Final = 8192
_MOST: Final = 1 << 31  # of layers, heads, elements or tokens: far beyond any model


class Needs(enum.Enum):
    """What a component needs of a prefix to continue it."""

    ALL = "all"  # full attention: every chunk
    TRAILING = "trailing"  # sliding window: the chunks that cover the last `window` tokens
    LAST = "last"  # a recurrent state, stored at the end of the prefix


@dataclass(frozen=True, slots=True)
class Component:
    """The KV of one kind of layer.

    heads: KV heads, all shards together; head_size: elements of one head of one plane.
    window: tokens that a layer with needs=TRAILING looks back on. replicated: every rank of
    tensor parallelism holds all of it, as of an MLA latent, so that it is stored once.
    """

    layers: int
    heads: int
    head_size: int
    planes: int = 2
    name: str = "attention"
    needs: Needs = Needs.ALL
    window: int = 0
    replicated: bool = False

    def __post_init__(self) -> None:
        check_kind("a component's name", self.name, str, ConfigError)
        for size in ("layers", "heads", "head_size", "planes"):
            what = f"component {self.name!r}: {size}"
            check_whole(what, getattr(self, size), 1, _MOST, ConfigError)
        check_whole(f"component {self.name!r}: window", self.window, 0, _MOST, ConfigError)
        check_kind(f"component {self.name!r}: needs", self.needs, Needs, ConfigError)
        check_kind(f"component {self.name!r}: replicated", self.replicated, bool, ConfigError)
        if (self.needs is Needs.TRAILING) != (self.window > 0):
            raise ConfigError(f"component {self.name!r}: a window goes with needs=TRAILING, only")


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV shape of a model on its engine. Shards are not in it: they name parts.

    block_tokens: the engine's block sizes; chunk_tokens: tokens of one chunk, a multiple of
    each. Raises ConfigError when they do not fit or a name is unknown.
    """

    components: tuple[Component, ...]
    dtype: str = "bfloat16"
    block_tokens: tuple[int, ...] = (16,)
    chunk_tokens: int = _NEAR_TOKENS
    layout: str = LAYOUT

    def __post_init__(self) -> None:
        _only_tuple("components", self.components)
        _only_tuple("block_tokens", self.block_tokens)
        if not self.components:
            raise ConfigError("a geometry needs at least one component")
        for component in self.components:
            check_kind("a component", component, Component, ConfigError)
        check_kind("a geometry's dtype", self.dtype, str, ConfigError)
        check_kind("a geometry's layout", self.layout, str, ConfigError)
        if self.dtype not in DTYPE_BYTES:
            raise unknown("dtype", self.dtype, DTYPE_BYTES)
        chunk_tokens_for(self.block_tokens, self.chunk_tokens)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token, all components and shards; states, which have none, apart."""
        grows = (one for one in self.components if one.needs is not Needs.LAST)
        return sum(one.layers * self._layer_bytes(one) for one in grows)

    def part_bytes(self, part: PartName) -> int:
        """Return the raw bytes of one part of a chunk: of all its tokens, or of one state."""
        if not (
            part.component < len(self.components)
            and part.shard < part.shards
            and part.stage < part.stages
        ):
            raise ConfigError(f"{part} is not a part of this geometry")
        component = self.components[part.component]
        layers = stage_layers(component, part.stage, part.stages)
        tokens = 1 if component.needs is Needs.LAST else self.chunk_tokens
        if component.heads % part.shards:
            raise ConfigError(
                f"the {component.heads} heads of component {component.name!r} cannot be cut into "
                f"{part.shards} shards"
            )
        return len(layers) * self._layer_bytes(component) * tokens // part.shards

    def encoding(self) -> str:
        """Return the canonical text that enters the namespace.

        Names are free text, so each stands behind its length: no two geometries encode alike.
        """
        parts = (
            f"{c.layers}:{c.planes}:{c.heads}:{c.head_size}:{c.needs.value}:{c.window}:"
            f"{_sized(c.name)}{':replicated' if c.replicated else ''}"
            for c in self.components
        )
        blocks = ",".join(map(str, self.block_tokens))
        sizes = f"{self.dtype}/{blocks}/{self.chunk_tokens}/{_sized(self.layout)}/"
        return sizes + ";".join(parts)

    def _layer_bytes(self, component: Component) -> int:
        """Return the bytes of one layer of a component: of one token, or of its state."""
        return component.planes * component.heads * component.head_size * DTYPE_BYTES[self.dtype]


def stage_layers(component: Component, stage: int, stages: int) -> range:
    """Return the layers that a stage of pipeline parallelism has; the first have one more.

    Raises ConfigError when there are fewer layers than stages.
    """
    if component.layers < stages:
        raise ConfigError(
            f"the {component.layers} layers of component {component.name!r} do not fill "
            f"{stages} stages"
        )
    each, more = divmod(component.layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def component_shards(component: Component, shards: int) -> int:
    """Return into how many shards a component is cut for as many ranks of tensor parallelism.

    One where it is replicated; with fewer heads than ranks, ranks share a head, as in grouped
    queries. Raises ConfigError when the heads do not go into the ranks, nor these into them.
    """
    if component.replicated:
        return 1
    if component.heads % shards == 0:
        return shards
    if shards % component.heads == 0:
        return component.heads
    raise ConfigError(
        f"the {component.heads} heads of component {component.name!r} cannot be spread over "
        f"{shards} ranks"
    )


def _only_tuple(what: str, value: object) -> None:
    """Refuse one of something where several are meant."""
    if not isinstance(value, tuple):
        raise ConfigError(f"{what} of a geometry is a tuple, not {value!r}; write ({value!r},)")


def _sized(text: str) -> str:
    return f"{len(text)}:{text}"


def chunk_tokens_for(block_tokens: Sequence[int], configured: int | None = None) -> int:
    """Return the chunk size for an engine's block sizes, in tokens.

    Without `configured`, the multiple of the blocks' least common multiple nearest to 256.
    Raises ConfigError when `configured`, or any chunk of at most 8,192 tokens, does not fit.
    """
    for block in block_tokens:
        check_whole("a block's tokens", block, 1, error=ConfigError)
    if not block_tokens:
        raise ConfigError("an engine has one block size at least, such as (16,)")
    common = math.lcm(*block_tokens)
    if configured is not None:
        check_kind("a chunk's tokens", configured, int, ConfigError)
        if configured < 1 or configured % common or configured > _MAX_CHUNK_TOKENS:
            most = _MAX_CHUNK_TOKENS // common * common
            near = min(max(common, (configured + common // 2) // common * common), most)
            remedy = (
                f"the nearest that fits is {near}"
                if most
                else f"no chunk of at most {_MAX_CHUNK_TOKENS} tokens fits them"
            )
            raise ConfigError(
                f"a chunk of {configured} tokens does not fit blocks of {list(block_tokens)} "
                f"tokens (a multiple of {common}, at most {_MAX_CHUNK_TOKENS}); {remedy}"
            )
        return configured
    if common > _MAX_CHUNK_TOKENS:
        raise ConfigError(
            f"blocks of {list(block_tokens)} tokens have the least common multiple {common}; "
            f"no chunk of at most {_MAX_CHUNK_TOKENS} tokens fits them"
        )
    return max(1, round(_NEAR_TOKENS / common)) * common
