"""The shape of one simulated run, drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Final, Literal

from kvtier.testing.faults import Rates
from kvtier.testing.simconditions import Cancel
from kvtier.testing.simmodel import MODELS

TROUBLES: Final = ("faults", "cancels", "clears", "hangs", "crashes", "disorder")
"""What a scenario can be without: disorder is any order but first-in-first-out, and stalls."""

HANG_SECONDS: Final = (40.0, 90.0)
"""How long a call hangs; for a Tier it does after 30."""

_NO_FAULTS: Final = Rates()
# Twice and more those that most guards are for.
_KINDS: Final = (
    *(field.name for field in fields(Rates)),
    *("unavailable", "failed", "absent", "lost_write"),
)


@dataclass(frozen=True, slots=True)
class TierShape:
    """One tier below DRAM. records: its budget, in records of the larger part; None for none.

    bounded: the Store itself answers FULL, otherwise the Tier's count is all there is. durable:
    it survives a crash, but for what it had not synced. sync_every, ordered: see SimDisk.
    writes: its write budget for a day, in such records; None for unlimited. packed: it is shared,
    and small parts lie in packs there.
    """

    records: int | None
    bounded: bool = True
    shared: bool = False
    admission: str = "through"
    durable: bool = False
    sync_every: int = 1
    ordered: bool = True
    writes: int | None = None
    packed: bool = False


# Kinds of worlds, and how many of a hundred are drawn.
_WORLDS: Final = {"plain": 22, "crashing": 32, "hanging": 14, "decaying": 24, "failing": 8}
# What another host has written spoils, and is not written again: heads go, their tails stay.
_DECAYING: Final = (TierShape(None, shared=True),)
_DECAYS: Final = (Rates(wrong=0.6, lost_ack=0.95), Rates(absent=0.4, lost_ack=0.95))


@dataclass(frozen=True, slots=True)
class Scenario:
    """The shape of one run. ``draw`` takes it from a seed, faults and cancellations included.

    model: of MODELS. clients: each sends two to four requests, one after the other; one is a
    match, perhaps a load, and a save. ops: calls on the cache after which no request begins, in
    place of that number.
    only: numbers of the clients that take part; empty for all.
    strangers: requests are of two namespaces that share the catalog.
    herd: all clients want the same prompt at the same time, and DRAM has just been cleared.
    crashes: the step at which each life ends, before the last; at rest if it has fewer. in_write:
    not before a write to a store is under way, unless that takes 300 steps.
    policy, ttl: of all tiers; the latter of those that are not shared.
    order: see Conditions; with ``fifo`` nothing stalls. cancel_at, shuffle: see Conditions.
    """

    dram_slots: int
    tiers: tuple[TierShape, ...]
    model: str
    clients: int
    strangers: bool = False
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
    policy: str = "lru"
    ttl: float | None = None

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        """Return the scenario of a seed: small, so that everybody is in everybody's way."""
        rng = random.Random(f"{seed}/scenario")
        (kind,) = rng.choices(tuple(_WORLDS), tuple(_WORLDS.values()))
        model = rng.choice(("plain", "plain", *MODELS))
        crashes = tuple(rng.randint(50, 900) for _ in range(rng.choice((1, 2, 2))))
        drawn = cls(
            dram_slots=rng.randint(3, 7) * MODELS[model].width,
            tiers=_packing(
                _admitting(_tiers(rng), random.Random(f"{seed}/admission")),
                random.Random(f"{seed}/packs"),
            ),
            model=model,
            clients=rng.randint(5, 10),
            rates=_trouble(rng),
            cancel_rate=rng.choice((0.0, 0.02, 0.05)),
            clears=rng.random() < 0.45,
            strangers=rng.random() < 0.25,
            herd=rng.random() < 0.25,
            order="pct" if rng.random() < 0.3 else "random",
        )
        first, rest = drawn.tiers[:1] or (TierShape(rng.choice((None, 8))),), drawn.tiers[1:]
        if kind == "crashing":
            durable = replace(
                first[0], durable=True, shared=False, packed=False, records=rng.choice((None, 16))
            )
            syncs, ordered = rng.choice((1, 12, 24)), rng.random() < 0.3
            durable = replace(durable, sync_every=syncs, ordered=ordered)
            rates, in_write = rng.choice((_NO_FAULTS, drawn.rates)), rng.random() < 0.8
            drawn = replace(drawn, tiers=(durable, *rest), rates=rates)
            return replace(drawn, crashes=crashes, in_write=in_write)
        if kind == "hanging":
            return replace(drawn, tiers=(*first, *rest), hangs=True, rates=_NO_FAULTS)
        if kind == "failing":
            rates = Rates(**{rng.choice(("unavailable", "failed")): 0.9})
            return replace(drawn, tiers=(*first, *rest), rates=rates)
        if kind == "decaying":
            drawn = replace(drawn, model="plain", dram_slots=3, clients=10)
            drawn = replace(drawn, clears=False, herd=False, strangers=False, cancel_rate=0.0)
            return replace(drawn, tiers=_DECAYING, rates=rng.choice(_DECAYS))
        return drawn

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
        return 30.0 if self.hangs else 0.08

    @property
    def kept_clients(self) -> list[int]:
        """The numbers of the clients that take part."""
        return [n for n in range(self.clients) if not self.only or n in self.only]

    @property
    def decaying(self) -> bool:
        """Say whether most of what another host has written spoils."""
        return self.rates in _DECAYS

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


def _admitting(tiers: tuple[TierShape, ...], rng: random.Random) -> tuple[TierShape, ...]:
    """Let some run ahead of eviction, or by a budget, and let the budgets of some run out."""
    modes = [(shape.admission, shape.admission, "on-evict", "auto") for shape in tiers]
    return tuple(
        replace(shape, admission=rng.choice(mode), writes=rng.choice((None, None, None, 6, 20)))
        for shape, mode in zip(tiers, modes, strict=True)
    )


def _packing(tiers: tuple[TierShape, ...], rng: random.Random) -> tuple[TierShape, ...]:
    """Let some that are shared pack small parts."""
    return tuple(replace(shape, packed=shape.shared and rng.random() < 0.5) for shape in tiers)


def _tiers(rng: random.Random) -> tuple[TierShape, ...]:
    """Return up to two tiers below DRAM."""
    return tuple(
        TierShape(
            rng.choice((None, 4, 8, 16)) if not index else rng.choice((None, 12)),
            bounded=rng.random() < 0.5,
            shared=rng.random() < 0.25,
            admission=rng.choice(("through", "through", "second-touch")),
            sync_every=rng.choice((1, 4, 12, 24)),
            ordered=rng.random() < 0.5,
        )
        for index in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 2)))
    )
