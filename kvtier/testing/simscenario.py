"""The shape of one simulated run, drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Final

from kvtier.testing.faults import Rates

__all__ = ["TROUBLES", "Scenario", "TierShape"]

TROUBLES: Final = ("faults", "cancels", "clears", "hangs", "disorder")
"""What a scenario can be without: disorder is any order but first-in-first-out, and stalls."""

_NO_FAULTS: Final = Rates()
# Twice those that most guards are for.
_KINDS: Final = (*(field.name for field in fields(Rates)), "unavailable", "failed", "wrong")


@dataclass(frozen=True, slots=True)
class TierShape:
    """One tier below DRAM. records: its budget, in records of the larger part; None for none.

    bounded: the Store itself answers FULL, otherwise the Tier's count is all there is.
    """

    records: int | None
    bounded: bool = True
    shared: bool = False
    admission: str = "through"


@dataclass(frozen=True, slots=True)
class Scenario:
    """The shape of one run. ``draw`` takes it from a seed, faults and cancellations included.

    ops: rounds that all requests together live through, at most; None for two to four each. One
    is a match, perhaps a load, and a save. only: numbers of the requests that run; empty for all.
    herd: all requests want the same prompt at the same time, and DRAM has just been cleared.
    steady: callbacks run first-in-first-out, and nothing stalls.
    shuffle: see Conditions.
    """

    dram_slots: int
    tiers: tuple[TierShape, ...]
    components: int
    shards: int
    requests: int
    rates: Rates = _NO_FAULTS
    cancel_rate: float = 0.0
    clears: bool = False
    hangs: bool = False
    herd: bool = False
    ops: int | None = None
    only: tuple[int, ...] = ()
    steady: bool = False
    shuffle: int = 0

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        """Return the scenario of a seed: small, so that everybody is in everybody's way."""
        rng = random.Random(f"{seed}/scenario")
        components, shards = rng.choice(((1, 1), (1, 1), (1, 2), (2, 1)))
        width = components * shards
        shapes = tuple(
            TierShape(
                rng.choice((None, 4, 8, 16)) if not index else rng.choice((None, 12)),
                bounded=rng.random() < 0.5,
                shared=rng.random() < 0.25,
                admission=rng.choice(("through", "through", "second-touch")),
            )
            for index in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 2)))
        )
        return cls(
            dram_slots=rng.randint(3, 7) * width,
            tiers=shapes,
            components=components,
            shards=shards,
            requests=rng.randint(5, 10),
            rates=_trouble(rng),
            cancel_rate=rng.choice((0.0, 0.02, 0.05)),
            clears=rng.random() < 0.45,
            hangs=rng.random() < 0.06,
            herd=rng.random() < 0.25,
        )

    def without(self, what: str) -> Scenario:
        """Return the scenario with one kind of trouble less, of TROUBLES."""
        changes: dict[str, Scenario] = {
            "faults": replace(self, rates=_NO_FAULTS),
            "cancels": replace(self, cancel_rate=0.0),
            "clears": replace(self, clears=False),
            "hangs": replace(self, hangs=False),
            "disorder": replace(self, steady=True),
        }
        return changes[what]

    @property
    def round_seconds(self) -> float:
        """How long a request waits before a round, at most; where calls hang, they are met."""
        return 25.0 if self.hangs else 0.08

    @property
    def kept_requests(self) -> list[int]:
        """The numbers of the requests that run."""
        return [n for n in range(self.requests) if not self.only or n in self.only]

    @property
    def rounds_at_least(self) -> int:
        """How many rounds each request must be ready for, so that ``ops`` is reached."""
        return -(-(self.ops or 0) // max(len(self.kept_requests), 1))

    @property
    def faultless(self) -> bool:
        """Say whether every tier keeps and returns all that it was given, and nothing else."""
        return self.rates == _NO_FAULTS and not any(shape.shared for shape in self.tiers)


def _trouble(rng: random.Random) -> Rates:
    """Return no faults, a few of every kind, or many of one kind, which finds more."""
    kind = rng.randrange(6)
    if kind < 2:
        return _NO_FAULTS
    if kind == 2:
        return Rates.all(rng.choice((0.01, 0.03)))
    return Rates(**{rng.choice(_KINDS): rng.choice((0.1, 0.3, 0.9))})
