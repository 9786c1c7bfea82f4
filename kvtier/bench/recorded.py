"""A recorded trace as prompts: its hashed blocks as tokens that nobody wrote, its lengths scaled.

Equal hashes give equal tokens, so what the trace's prompts shared, these share too.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ConfigError
from kvtier.planning.optimum import ceiling
from kvtier.planning.trace import Trace

ENGINE_BLOCK: Final = 16
_SCALES: Final = "1/32, 0.25 or 1"


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """One request. at: seconds after the first one. blocks: what `prompt` makes its tokens of."""

    at: float
    blocks: list[int]
    tokens: int
    output_len: int

    def cut(self, context: int, size: int) -> Asked:
        """Return it with a prompt that fits a model's context, with its answer."""
        tokens = context - self.output_len
        if self.tokens <= tokens:
            return self
        return Asked(self.at, self.blocks[: -(-tokens // size)], tokens, self.output_len)


class Recorded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A trace's requests, as they are served.

    block_size: of the trace, tokens; block_tokens: what a block became. rate: requests a second
    that arrive whether or not others are done; None: one at a time. warmup: fraction of the
    requests that only fills the caches. hbm: bytes of the engine's own pool; None: an eighth of
    the different blocks. bytes_per_token: of the model that the sizes are meant for; None: of
    the one that serves.
    """

    trace: str
    block_size: int
    block_tokens: int
    scale: float
    num_prompts: int
    skipped_lines: int
    warmup: float
    rate: float | None
    hbm: int | None
    bytes_per_token: int | None
    asked: list[Asked]

    @property
    def first(self) -> int:
        """The first request that counts."""
        return int(len(self.asked) * self.warmup)


def block_tokens(block_size: int, scale: str | None) -> int:
    """Return the tokens that a block of the trace becomes; by default, one block of the engine.

    Raises ConfigError where that is no multiple of the engine's block.
    """
    if scale is None:
        return ENGINE_BLOCK
    try:
        found = Fraction(scale) * block_size
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"--scale is a number like {_SCALES}, not {scale!r}") from None
    if found.denominator != 1 or found < 1 or int(found) % ENGINE_BLOCK:
        fits = Fraction(ENGINE_BLOCK, block_size)
        raise ConfigError(
            f"--scale {scale} makes {float(found):g} tokens of a block of {block_size}, and the "
            f"engine's blocks have {ENGINE_BLOCK}; give a multiple of {fits}"
        )
    return int(found)


def recorded(  # noqa: PLR0913  (what a run is told)
    trace: Trace,
    *,
    size: int,
    num_prompts: int,
    output_len: int,
    warmup: float,
    seconds_per_unit: float,
    speed_up: float | None,
    request_rate: float | None,
    hbm: int | None,
    bytes_per_token: int | None,
) -> Recorded:
    """Return the first `num_prompts` requests of a trace, its blocks as `size` tokens each.

    output_len: the most tokens of an answer. speed_up: how much faster than recorded requests
    arrive; request_rate: how many a second, at the trace's own pace; without both, one by one.
    """
    count = min(num_prompts, len(trace))
    scale = Fraction(size, trace.block_tokens)
    times = np.asarray([trace.time(number) for number in range(count)])
    at = _arrivals((times - times[0]) * seconds_per_unit, speed_up, request_rate)
    asked = []
    for number, (blocks, tokens) in zip(range(count), trace.requests(), strict=False):
        whole, rest = divmod(tokens, trace.block_tokens)
        length = max(whole * size + -(-rest * scale.numerator // scale.denominator), 1)
        named = list(blocks)
        if len(named) * size < length:
            named.append(-number - 1)  # what has no hash is nobody else's
        wanted = round(trace.output(number) * scale)
        asked.append(Asked(float(at[number]), named, length, min(max(wanted, 1), output_len)))
    span = float(at[-1])
    return Recorded(
        trace=trace.name,
        block_size=trace.block_tokens,
        block_tokens=size,
        scale=float(scale),
        num_prompts=count,
        skipped_lines=trace.skipped,
        warmup=warmup,
        rate=None if speed_up is None and request_rate is None else count / span if span else 0.0,
        hbm=hbm,
        bytes_per_token=bytes_per_token,
        asked=asked,
    )


def _arrivals(
    seconds: NDArray[np.float64], speed_up: float | None, request_rate: float | None
) -> NDArray[np.float64]:
    """Return when requests arrive; where the trace has one time only, at equal distances."""
    if speed_up is not None:
        return seconds / speed_up
    if request_rate is None:
        return np.zeros(len(seconds))
    span = float(seconds[-1])
    if not span:
        return np.arange(len(seconds), dtype=np.float64) / request_rate
    return seconds * (len(seconds) / request_rate / span)


def prompt(asked: Asked, size: int, vocabulary: int, seed: int) -> NDArray[np.int32]:
    """Return a request's tokens, int32 [tokens]: of each block a hash of its number.

    One seed gives one set. The hash is splitmix64's finaliser (Steele, Lea, Flood 2014).
    """
    salt = (seed * 0x9E3779B97F4A7C15) % (1 << 64)
    numbers = [(block + salt) % (1 << 64) for block in asked.blocks]
    mixed = _mixed(np.asarray(numbers, np.uint64)[:, None])
    mixed = _mixed(np.add(mixed, np.arange(size, dtype=np.uint64), dtype=np.uint64))
    return (mixed.ravel()[: asked.tokens] % np.uint64(vocabulary)).astype(np.int32)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def different(asked: Sequence[Asked]) -> int:
    """Return how many different blocks requests name."""
    return len({block for one in asked for block in one.blocks})


def most_found(asked: Sequence[Asked], size: int, warmup: float) -> float:
    """Return what percentage of the prompt tokens a cache without bounds would have had."""
    trace = Trace("", size)
    for one in asked:
        trace.add(0.0, one.tokens, 0, one.blocks)
    return round(ceiling(trace, warmup=warmup).rate_tokens, 3)
