"""Explain where tiers are shared: what each said when it was asked, or that it was not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import kvtier
from kvtier.config import TierConfig
from kvtier.errors import Unavailable
from kvtier.testing.simhost import SharedMemory
from kvtier.testing.toy import CHUNK, CHUNK_BYTES, NAMESPACE, Toy, prompt
from kvtier.tiers.store import Status

TOKENS = prompt(4 * CHUNK + 10)


@pytest.fixture
def shared():
    """Open toy engines on shared tiers of these names, which answer every look-up so."""
    toys: list[Toy] = []

    def one(**answers: Status | Exception) -> Toy:
        tiers = []
        for tier, answer in answers.items():
            store = SharedMemory()
            store.contains_many = lambda ids, answer=answer: said(answer, ids)
            tiers.append(TierConfig(tier, "", None, store=store))
        config = kvtier.Config(8 * CHUNK_BYTES, tuple(tiers))
        toys.append(Toy(kvtier.open(config, namespace=NAMESPACE)))
        return toys[-1]

    def said(answer: Status | Exception, ids: Sequence[bytes]) -> list[Status]:
        if isinstance(answer, Exception):
            raise answer
        return [answer] * len(ids)

    yield one
    for each in toys:
        each.close()


def asked(toy: Toy) -> str:
    """Let a fetch ask; return what is told of it then, but for how long ago it was."""
    match = toy.cache.match(TOKENS)
    assert toy.cache.fetch(match, timeout=20, deadline=60).result(20) is None
    what, _, when = toy.cache.explain(TOKENS).end.why.rpartition(" when asked ")
    assert when in ("just now.", *(f"{seconds} s ago." for seconds in range(1, 20)))
    return what


def test_a_shared_tier_that_was_not_asked_yet_and_one_that_had_it_not(shared):
    toy = shared(memory=Status.ABSENT)
    assert "memory was not asked yet; a fetch asks." in toy.cache.explain(TOKENS).end.why
    assert asked(toy).endswith(" memory had it not")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Unavailable("gone"), " memory failed (look up: Unavailable: gone)"),
        (Status.FAILED, " memory failed (look up: it fails all 4 records of a call)"),
        (Status.NEWER, " memory had it of a version that is not read here"),
    ],
)
def test_a_shared_tier_that_could_not_be_asked_had_it_perhaps(shared, answer, says):
    assert says in asked(shared(memory=answer))


def test_of_each_shared_tier_it_is_told_what_it_said(shared):
    why = asked(shared(one=Unavailable("gone"), two=Status.ABSENT, three=Status.ABSENT))
    assert "one failed (look up: Unavailable: gone), two, three had it not" in why
