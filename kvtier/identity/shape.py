"""The parts of a chunk, and which of them a prefix of some length needs.

A component of full attention needs every chunk; a sliding window those chunks that cover its last
tokens; a recurrent state the one stored at the prefix's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kvtier.identity.geometry import Geometry, Needs, component_shards
from kvtier.identity.record import PartName, RecordId

NO_PARENT: Final = -1


@dataclass(frozen=True)
class Shape:
    """The parts of one chunk, by position, for a geometry on a number of ranks.

    above: for each, the position of its parent among the parts of the chunk before, or NO_PARENT
    for one that stands alone. always: positions needed of every chunk; windows: positions with
    the tokens of their window; states: positions needed at the prefix's end.
    """

    names: tuple[PartName, ...]
    nbytes: tuple[int, ...]
    above: tuple[int, ...]
    always: tuple[int, ...]
    windows: tuple[tuple[int, int], ...]
    states: tuple[int, ...]
    chunk_tokens: int
    block_tokens: int

    @cached_property
    def plain(self) -> bool:
        """Whether every chunk needs all its parts, so that any length will do."""
        return len(self.always) == len(self.names)

    def needed(self, tokens: int, chunk: int) -> tuple[int, ...]:
        """Return the positions of those parts of a chunk that a prefix of `tokens` needs.

        tokens: beyond the chunk's first.
        """
        if self.plain:
            return self.always
        end = (chunk + 1) * self.chunk_tokens
        windows = (at for at, window in self.windows if end > tokens - window)
        states = self.states if end == tokens else ()
        return tuple(sorted((*self.always, *windows, *states)))

    def select(
        self, names: Sequence[Sequence[RecordId]], first: int, tokens: int
    ) -> Sequence[Sequence[RecordId]]:
        """Return, for each chunk from `first` on, the names of what a prefix of `tokens` needs."""
        last = -(-tokens // self.chunk_tokens)
        if self.plain:
            return names[first:last]
        return [
            [names[chunk][at] for at in self.needed(tokens, chunk)] for chunk in range(first, last)
        ]


def chunk_shape(geometry: Geometry, shards: int = 1, stages: int = 1) -> Shape:
    """Return the shape of a chunk on `shards` ranks of tensor and `stages` of pipeline parallelism.

    A window's or a state's parent is a part that every chunk has, so that it never outlives what
    it cannot be used without; where a model has no such part, it stands alone.
    Raises ConfigError when heads or layers cannot be spread over the ranks.
    """
    names = tuple(
        PartName(number, shard, count, stage, stages)
        for number, component in enumerate(geometry.components)
        for count in (component_shards(component, shards),)
        for stage in range(stages)
        for shard in range(count)
    )
    needs = [geometry.components[name.component].needs for name in names]
    always = tuple(at for at, need in enumerate(needs) if need is Needs.ALL)
    anchor = always[0] if always else NO_PARENT
    return Shape(
        names=names,
        nbytes=tuple(geometry.part_bytes(name) for name in names),
        above=tuple(at if at in always else anchor for at in range(len(names))),
        always=always,
        windows=tuple(
            (at, geometry.components[names[at].component].window)
            for at, need in enumerate(needs)
            if need is Needs.TRAILING
        ),
        states=tuple(at for at, need in enumerate(needs) if need is Needs.LAST),
        chunk_tokens=geometry.chunk_tokens,
        block_tokens=geometry.block_tokens[0],
    )
