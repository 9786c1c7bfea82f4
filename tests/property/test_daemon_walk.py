"""Whatever clients and servers do: each slot in use is accounted for, and none has two owners.

Nothing is left when all processes are dead.
"""

from __future__ import annotations

from collections import Counter

import pytest

from kvtier.catalog.catalog import Catalog
from kvtier.daemon.grants import Grants
from kvtier.daemon.holds import Holds
from kvtier.daemon.out import Out, Outs
from kvtier.daemon.session import Holding, Session
from kvtier.errors import MisuseError
from kvtier.testing.daemon_walk import ACTS, Walk

SEEDS = range(12)
STEPS = 150


def walk(seed: int) -> Counter[str]:
    one = Walk(seed)
    try:
        for _ in range(STEPS):
            one.step()
        one.end()
    finally:
        one.daemon.close()
    return one.seen


def test_whoever_comes_goes_and_dies_every_slot_is_accounted_for():
    seen = sum(map(walk, SEEDS), Counter())
    assert set(seen) == set(ACTS)
    assert min(seen.values()) > 5, seen


def given_away(outs: Outs, out: Out, slots: bytes) -> bool:
    """Let go of a plan's slots as it goes out."""
    del outs, slots
    out.end(False)
    return True


def anybodys(outs: Outs, plan: int, session: bytes, *, ok: bool) -> None:
    """Settle a plan for whoever asks."""
    del session
    if plan in outs._all:
        outs._end(outs._all[plan], ok=ok)


def unwatched(outs: Outs, out: Out) -> None:
    """End a plan when its session's process is dead, whatever its ranks do."""
    if out.orphan:
        outs._end(out, ok=False)


def forgotten(holds: Holds, session: Session, holding: Holding) -> None:
    """Forget a lease without ending it."""
    del session.holdings[holding.number]
    holds._outs.charge(session.token, -holding.charged)


def nothing(*_: object, **__: object) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("owner", "name", "without"),
    [
        (Outs, "add", given_away),
        (Outs, "settle", anybodys),
        (Outs, "_look_at", unwatched),
        (Outs, "died", nothing),
        (Outs, "resume", nothing),
        (Holds, "release", forgotten),
        (Holds, "_weigh", nothing),
        (Holds, "look_at", nothing),
        (Grants, "add", lambda *_: True),
        (Catalog, "give_back", nothing),
    ],
)
def test_without_a_guard_the_model_disagrees(monkeypatch, owner, name, without):
    monkeypatch.setattr(owner, name, without)
    with pytest.raises((AssertionError, KeyError, MisuseError)):
        sum(map(walk, SEEDS), Counter())
