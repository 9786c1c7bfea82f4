"""The models of simulated worlds, and what a prefix needs of each, stated by hand.

An oracle must not ask the core what the core should have found, so nothing here is the core's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.identity.geometry import Component, Needs
from kvtier.identity.record import RecordId, split_record_id

BLOCK: Final = 4
CHUNK: Final = 8


@dataclass(frozen=True, slots=True)
class Model:
    """The components of a model, and on how many ranks of each kind it runs."""

    components: tuple[Component, ...]
    shards: int = 1
    stages: int = 1

    @property
    def width(self) -> int:
        """The parts of one chunk."""
        return sum(self.stages * (1 if c.replicated else self.shards) for c in self.components)

    @property
    def plain(self) -> bool:
        """Whether every chunk needs all its parts."""
        return all(component.needs is Needs.ALL for component in self.components)

    def needs(self, number: int, tokens: int, chunk: int) -> bool:
        """Say whether a prefix of `tokens` needs what a component has of a chunk."""
        component, end = self.components[number], (chunk + 1) * CHUNK
        if component.needs is Needs.TRAILING:
            return end > tokens - component.window
        return component.needs is Needs.ALL or end == tokens

    def needed(
        self, names: Sequence[Sequence[RecordId]], tokens: int, first: int = 0
    ) -> Iterator[RecordId]:
        """Yield the names of all that a prefix of `tokens` needs from chunk `first` on.

        names: of the parts of each complete chunk.
        """
        for chunk in range(first, -(-tokens // CHUNK)):
            for name in names[chunk]:
                if self.needs(split_record_id(name)[1].component, tokens, chunk):
                    yield name

    def usable(
        self,
        names: Sequence[Sequence[RecordId]],
        prompt: int,
        has: Callable[[RecordId], object],
    ) -> int:
        """Return the longest prefix, in tokens, of which all is there that it needs.

        prompt: its length; one token at least is left to compute. has: says what is there.
        """
        states = any(component.needs is Needs.LAST for component in self.components)
        step = CHUNK if states else BLOCK
        most = min(prompt - 1, len(names) * CHUNK) // step * step
        for tokens in range(most, 0, -step):
            if all(has(name) for name in self.needed(names, tokens)):
                return tokens
        return 0

    def anchors(self, names: Sequence[RecordId]) -> list[RecordId]:
        """Return those parts of a chunk that every longer prefix needs."""
        needs = [component.needs for component in self.components]
        return [one for one in names if needs[split_record_id(one)[1].component] is Needs.ALL]


_FULL: Final = Component(1, 2, 4)
MODELS: Final = {
    "plain": Model((_FULL,)),
    "two": Model((_FULL, Component(1, 2, 8, name="second"))),
    "ranks": Model((_FULL,), shards=2),
    "stages": Model((Component(2, 2, 4),), stages=2),
    "latent": Model(
        (Component(1, 1, 8, planes=1, name="latent", replicated=True), _FULL), shards=2
    ),
    "window": Model((_FULL, Component(1, 2, 4, name="window", needs=Needs.TRAILING, window=12))),
    "state": Model((_FULL, Component(1, 2, 4, planes=1, name="state", needs=Needs.LAST))),
}
"""By name. Their parts are far below a page, so that each takes one slot."""
