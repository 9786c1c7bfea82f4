"""Replaying a trace: each arm has the tiers of the one before, and one below them.

Nothing is emptied: what is found, and where, is what the tiers' sizes and order of leaving make
of the trace. One at a time, requests go to all arms in turn; where they arrive at their own times,
one arm after the other serves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtier.bench.messages import ModelLoaded
from kvtier.bench.place import Place
from kvtier.bench.processes import Bench, Outcome, Tell
from kvtier.bench.recorded import Asked, Recorded, different, most_found
from kvtier.bench.settings import Settings
from kvtier.errors import ConfigError

_PAGE: Final = 4096
_INDEX: Final = 2048  # bytes of a record in the lmdb tier's index, about
_EMPTY: Final = 4 << 20  # of that index without records
_SHARES: Final = (8, 4, 2)  # of the different blocks: HBM, DRAM and disk, unless told
_AT_ONCE: Final = 16  # requests of an arm before the next one has its turn, of a clock


def replay_recorded(settings: Settings, shape: Recorded, place: Place, tell: Tell) -> Outcome:
    """Serve a trace by every arm; the first part of it only fills the caches."""
    size = shape.block_tokens
    with Bench(settings, place, tell) as bench:
        bench.start()
        loaded = bench.loaded()
        asked = [one.cut(loaded.context_tokens, size) for one in shape.asked]
        cut = sum(one != before for one, before in zip(asked, shape.asked, strict=True))
        hbm, dram, disk = _sizes(settings, shape, asked, loaded)
        bench.give(dram=dram, disk=disk)
        bench.open(settings.arms, hbm // loaded.bytes_per_token, spare=False)
        for arm in settings.arms:  # what is slow the first time
            bench.replay(arm, [Asked(0.0, [1 << 40], size, 1)], size, is_timed=False)
        if shape.rate is None:
            seconds = _one_by_one(bench, shape, asked)
        else:
            seconds = _as_they_arrive(bench, shape, asked)
        bench.clean()
    capacities = {"hbm": hbm, "dram": dram, "lmdb": disk}
    return Outcome(
        loaded,
        bench.samples,
        seconds=seconds,
        capacities=capacities,
        cut_prompts=cut,
        ceiling=most_found(asked, size, shape.warmup),
    )


def _one_by_one(bench: Bench, shape: Recorded, asked: Sequence[Asked]) -> dict[str, float]:
    arms, first = bench.settings.arms, shape.first
    lot = 1 if bench.settings.seconds_per_token is None else _AT_ONCE
    seconds = dict.fromkeys(arms, 0.0)
    starts = [*range(0, first, lot), *range(first, len(asked), lot)]
    bench.steps(len(starts) * len(arms))
    for turn, start in enumerate(starts):
        end = min(start + lot, first if start < first else len(asked))
        for arm in bench.rotated(turn):
            bench.step(f"request {start + 1:,} of {len(asked):,}, {arm}")
            for number in range(start, end):
                is_timed = number >= first
                took = bench.replay(arm, [asked[number]], shape.block_tokens, is_timed=is_timed)
                seconds[arm] += took.seconds if is_timed else 0.0
    return seconds


def _as_they_arrive(bench: Bench, shape: Recorded, asked: Sequence[Asked]) -> dict[str, float]:
    arms, first, seconds = bench.settings.arms, shape.first, {}
    bench.steps(2 * len(arms))
    for arm in arms:
        bench.step(f"the first {first:,} requests, {arm}")
        if first:
            bench.replay(arm, list(asked[:first]), shape.block_tokens, is_timed=False)
        bench.step(f"{len(asked) - first:,} requests, {arm}")
        began = asked[first].at
        rest = [Asked(one.at - began, *_after(one)) for one in asked[first:]]
        seconds[arm] = bench.replay(arm, rest, shape.block_tokens, is_timed=True).seconds
    return seconds


def _after(one: Asked) -> tuple[list[int], int, int]:
    return one.blocks, one.tokens, one.output_len


def _sizes(
    settings: Settings, shape: Recorded, asked: Sequence[Asked], loaded: ModelLoaded
) -> tuple[int, int, int]:
    """Return the bytes of the engine's pool, of DRAM and of the lmdb tier. Raises ConfigError.

    Sizes that were given for another model's KV hold as many of the trace's blocks here.
    """
    part = shape.block_tokens * loaded.bytes_per_token
    blocks = different(asked)
    longest = max(-(-(one.tokens + one.output_len) // shape.block_tokens) for one in asked)
    least = {"--hbm": longest, "--dram": 2 * longest, "--disk": longest}
    held = []
    for given, share, option in zip(
        (shape.hbm, settings.dram, settings.disk), _SHARES, least, strict=True
    ):
        if given is None:
            held.append(max(blocks // share, least[option]))
            continue
        there = part if shape.bytes_per_token is None else shape.bytes_per_token * shape.block_size
        held.append(given // there)
        if held[-1] < least[option]:
            raise ConfigError(
                f"{option} has room for {held[-1]:,} blocks of the trace, and its longest prompt "
                f"takes {least[option]:,} there; give more, or fewer --num-prompts"
            )
    on_disk = -(-part // _PAGE) * _PAGE + _PAGE + _INDEX
    return held[0] * part, held[1] * part, held[2] * on_disk + _EMPTY
