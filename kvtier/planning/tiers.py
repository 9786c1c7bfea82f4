"""Tiers: which blocks each tier of a stack holds, by the live cache's rules.

All that is used comes into DRAM and is written through to each tier below; each tier evicts for
itself; a prompt is found as far as every block is in some tier, each in the fastest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.catalog.spill import BATCH_BYTES
from kvtier.errors import ConfigError
from kvtier.planning.simulate import Overlay, Tier
from kvtier.planning.trace import Trace
from kvtier.policies.base import Policy

UNBOUNDED: Final = 1 << 62
_NONE: Final = -1


@dataclass(frozen=True, slots=True)
class Level:
    """One tier, DRAM first. nbytes: its capacity, None for no bound; speeds of reading."""

    name: str
    nbytes: int | None
    bytes_per_s: float
    latency: float = 0.0


class Tiers:
    """All tiers of one replay, and what they did after the warm-up."""

    def __init__(
        self,
        trace: Trace,
        levels: Sequence[Level],
        policy: Callable[[], Policy],
        block_bytes: int,
        overlay: Overlay,
    ) -> None:
        self.levels = levels
        self.tiers = []
        self._parent = trace.parent
        self._lots: list[int] = []  # blocks that the live cache writes at a time
        for level in levels:
            blocks = UNBOUNDED if level.nbytes is None else level.nbytes // block_bytes
            if not blocks:
                raise ConfigError(f"{level.name} has no room for one block of {block_bytes} bytes")
            most = min(blocks, trace.unique)
            self._lots.append(max(min(BATCH_BYTES // block_bytes, blocks // 8), 1))
            self.tiers.append(Tier(trace, policy, most, servable=True, overlay=overlay))
        self.hits = [0] * len(levels)
        self.read = [0] * len(levels)
        self.start()

    def start(self) -> None:
        """Count what is written from now on."""
        self._begun = [tier.entered for tier in self.tiers]

    @property
    def written(self) -> list[int]:
        """Blocks that came into each tier since ``start``."""
        return [tier.entered - was for tier, was in zip(self.tiers, self._begun, strict=True)]

    def find(self, blocks: Sequence[int], now: float) -> list[int]:
        """Return the tier of each block, from the first, as far as every one is in some tier."""
        for tier in self.tiers:
            tier.pass_time(now)
        insides = [tier.inside for tier in self.tiers]
        found = []
        for block in blocks:
            for number, inside in enumerate(insides):
                if inside[block]:
                    found.append(number)
                    break
            else:
                break
        return found

    def load(self, blocks: Sequence[int], found: int, loaded: int) -> None:
        """Count a prompt as used by each tier, and let what is loaded come into the upper ones.

        found: blocks, from the first, that are in some tier; loaded: those that are brought up.
        """
        for tier in self.tiers:
            tier.touch(blocks[:found])
        self._bring(blocks[:loaded], 0)

    def save(self, blocks: Sequence[int]) -> None:
        """Let what was computed come in, of a prompt and its answer: all that is in no tier."""
        insides = [tier.inside for tier in self.tiers]
        found = sum(
            1 for _ in itertools.takewhile(lambda one: any(i[one] for i in insides), blocks)
        )
        self._bring(blocks, found)

    def _bring(self, blocks: Sequence[int], first: int) -> None:
        """Let blocks from the first of a prompt on come into DRAM, and then into the tiers below.

        As far as there is room, and the ones before them too where a tier below lacks them.
        """
        top, *lower = self.tiers
        absent = [block for block in blocks[first:] if not top.inside[block]]
        held = self._parent[absent[0]] if absent else _NONE
        room = top.make_room(len(absent), held)
        if room and first:  # a save marks once more what it continues
            for tier in self.tiers:
                tier.touch(blocks[:first], again=True)
        top.enter(absent[:room])
        for tier, lot in zip(lower, self._lots[1:], strict=True):
            missing = [block for block in blocks if not tier.inside[block]]
            there = list(itertools.takewhile(top.inside.__getitem__, missing))
            for start in range(0, len(there), lot):
                some = there[start : start + lot]
                room = tier.make_room(len(some), self._parent[some[0]])
                tier.enter(some[:room])
                if room < len(some):
                    break
