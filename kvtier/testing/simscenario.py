"""The shape of one simulated run, drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Final, Literal

from kvtier.testing.faults import Rates
from kvtier.testing.simconditions import Cancel

__all__ = ["HANG_SECONDS", "TROUBLES", "Scenario", "TierShape"]

TROUBLES: Final = ("faults", "cancels", "clears", "hangs", "crashes", "disorder")
"""What a scenario can be without: disorder is any order but first-in-first-out, and stalls."""

HANG_SECONDS: Final = (60.0, 270.0)
"""How long a call takes that hangs; a third of it on the thread, where for a Tier 30 s hang."""

_NO_FAULTS: Final = Rates()
# Twice those that most guards are for.
_KINDS: Final = (*(field.name for field in fields(Rates)), "unavailable", "failed", "wrong")


@dataclass(frozen=True, slots=True)
class TierShape:
    """One tier below DRAM. records: its budget, in records of the larger part; None for none.

    bounded: the Store itself answers FULL, otherwise the Tier's count is all there is. durable:
    it survives a crash, but for what it had not synced; it syncs every so many changes.
    """

    records: int | None
    bounded: bool = True
    shared: bool = False
    admission: str = "through"
    durable: bool = False
    sync_every: int = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """The shape of one run. ``draw`` takes it from a seed, faults and cancellations included.

    clients: each sends two to four requests, one after the other; one is a match, perhaps a load,
    and a save. ops: calls on the cache after which no request begins, in place of that number.
    only: numbers of the clients that take part; empty for all.
    herd: all clients want the same prompt at the same time, and DRAM has just been cleared.
    crashes: the step at which each life ends, before the last; at rest if it has fewer. in_write:
    not before a write to a store is under way, unless that takes 300 steps.
    order: see Conditions; with ``fifo`` nothing stalls. cancel_at, shuffle: see Conditions.
    """

    dram_slots: int
    tiers: tuple[TierShape, ...]
    components: int
    shards: int
    clients: int
    rates: Rates = _NO_FAULTS
    cancel_rate: float = 0.0
    clears: bool = False
    hangs: bool = False
    herd: bool = False
    ops: int | None = None
    only: tuple[int, ...] = ()
    crashes: tuple[int, ...] = ()
    in_write: bool = False
    order: Literal["random", "pct", "fifo"] = "random"
    cancel_at: Cancel | None = None
    shuffle: int = 0

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        """Return the scenario of a seed: small, so that everybody is in everybody's way."""
        rng = random.Random(f"{seed}/scenario")
        components, shards = rng.choice(((1, 1), (1, 1), (1, 2), (2, 1)))
        width = components * shards
        crashes = _crashes(rng)
        return cls(
            dram_slots=rng.randint(3, 7) * width,
            tiers=_tiers(rng, durable=bool(crashes)),
            components=components,
            shards=shards,
            clients=rng.randint(5, 10),
            rates=_trouble(rng),
            cancel_rate=rng.choice((0.0, 0.02, 0.05)),
            clears=rng.random() < 0.45,
            hangs=not crashes and rng.random() < 0.06,
            herd=rng.random() < 0.25,
            crashes=crashes,
            in_write=bool(crashes) and rng.random() < 0.7,
            order="pct" if rng.random() < 0.3 else "random",
        )

    def without(self, what: str) -> Scenario:
        """Return the scenario with one kind of trouble less, of TROUBLES."""
        changes: dict[str, Scenario] = {
            "faults": replace(self, rates=_NO_FAULTS),
            "cancels": replace(self, cancel_rate=0.0),
            "clears": replace(self, clears=False),
            "hangs": replace(self, hangs=False),
            "crashes": replace(self, crashes=()),
            "disorder": replace(self, order="fifo"),
        }
        return changes[what]

    @property
    def round_seconds(self) -> float:
        """How long a client waits before a request, at most; where calls hang, they are met."""
        return 25.0 if self.hangs else 0.08

    @property
    def kept_clients(self) -> list[int]:
        """The numbers of the clients that take part."""
        return [n for n in range(self.clients) if not self.only or n in self.only]

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


def _crashes(rng: random.Random) -> tuple[int, ...]:
    """Return no crash for four worlds of five."""
    if rng.random() >= 0.2:
        return ()
    return tuple(rng.randint(50, 900) for _ in range(rng.choice((1, 1, 2))))


def _tiers(rng: random.Random, *, durable: bool) -> tuple[TierShape, ...]:
    """Return up to two tiers below DRAM. durable: the first of them is, and local."""
    count = rng.choice((1, 1, 2) if durable else (0, 1, 1, 1, 1, 2, 2, 2))
    return tuple(
        TierShape(
            rng.choice((None, 4, 8, 16)) if not index else rng.choice((None, 12)),
            bounded=rng.random() < 0.5,
            shared=rng.random() < 0.25 and not (durable and not index),
            admission=rng.choice(("through", "through", "second-touch")),
            durable=durable and not index,
            sync_every=rng.choice((1, 1, 4, 12)),
        )
        for index in range(count)
    )
