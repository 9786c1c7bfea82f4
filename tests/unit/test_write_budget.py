"""Write budgets: what may be sent to a tier's Store in a day, and what becomes of the rest."""

from __future__ import annotations

import math

import pytest

import kvtier
from kvtier.catalog.spill import Spiller
from kvtier.config import Config, TierConfig, parse_tier
from kvtier.errors import ConfigError
from kvtier.metrics import Metrics
from kvtier.opening import open_tiers
from kvtier.seams import ThreadFlow
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.hands import Hands
from kvtier.testing.small_catalog import chain
from kvtier.testing.small_spill import FOOTPRINT
from kvtier.testing.toy import NAMESPACE
from kvtier.tiers.budget import WriteBudget
from kvtier.tiers.store import Capabilities, Status

DAY = 86_400.0

# ------------------------------------------------------------------------------------ the bucket


def test_a_budget_is_full_at_first_and_refilled_with_time():
    clock = Hands()
    budget = WriteBudget(1000, clock)
    assert budget.left == 1000
    budget.spend(1000)
    assert budget.left == 0
    clock.now += DAY / 4
    assert budget.left == pytest.approx(250)
    budget.spend(50)
    clock.now += DAY / 4
    assert budget.left == pytest.approx(450)
    clock.now += 100 * DAY
    assert budget.left == 1000, "one day's worth is the most"


def test_a_budget_is_short_below_half():
    budget = WriteBudget(1000, Hands())
    budget.spend(500)
    assert not budget.short
    budget.spend(1)
    assert budget.short


def test_an_unlimited_budget_is_never_short():
    clock = Hands()
    budget = WriteBudget(math.inf, clock)
    budget.spend(1 << 60)
    clock.now += DAY
    assert (budget.left, budget.short) == (math.inf, False)


# ------------------------------------------------------------------------------------- the choice


def test_a_url_says_how_much_may_be_written_in_a_day():
    assert parse_tier("lmdb:/kv?capacity=1GiB").write_budget is None
    assert parse_tier("lmdb:/kv?capacity=1GiB&write_budget=3GiB").write_budget == 3 << 30
    assert parse_tier("s3://b?capacity=1TiB&write_budget=unlimited").write_budget == math.inf
    with pytest.raises(ConfigError, match="did you mean 'write_budget'"):
        parse_tier("lmdb:/kv?capacity=1GiB&write-budget=3GiB")
    with pytest.raises(ConfigError, match="'unlimitd' is not a size"):
        parse_tier("lmdb:/kv?capacity=1GiB&write_budget=unlimitd")


@pytest.mark.parametrize("wrong", [0, -1, 0.5, math.nan])
def test_a_budget_made_by_hand_is_checked_too(wrong):
    with pytest.raises(ConfigError, match=r"write_budget .* is not one byte or more"):
        TierConfig("memory", "x", 1 << 20, write_budget=wrong)


class Store(MemoryStore):
    def __init__(self, capabilities: Capabilities) -> None:
        super().__init__()
        self._capabilities = capabilities

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities


USUAL = {
    "local": (Capabilities(durable=True), 1 << 20, "auto", 1 << 20),
    "local, unbounded": (Capabilities(durable=True), None, "auto", math.inf),
    "shared": (Capabilities(durable=True, shared=True), 1 << 20, "second-touch", math.inf),
    "memory": (Capabilities(), 1 << 20, "through", math.inf),
}


@pytest.mark.parametrize(
    ("capabilities", "capacity", "admission", "a_day"), USUAL.values(), ids=USUAL
)
def test_what_a_tier_does_when_nothing_is_said(capabilities, capacity, admission, a_day):
    setting = TierConfig("memory", "", capacity, store=Store(capabilities))
    tiers = open_tiers(Config(1 << 20, (setting,)), ThreadFlow(), Metrics(), Hands(), [4096])
    assert (tiers[1].admission, tiers[1].writes.a_day) == (admission, a_day)
    tiers[1].close()


def test_a_budget_below_one_chunk_is_refused_at_the_door(tmp_path):
    url = f"lmdb:{tmp_path}/kv?capacity=64MiB&write_budget=1KiB"
    with pytest.raises(ConfigError, match="write_budget 1 KiB a day is below one chunk"):
        kvtier.open("dram:1MiB", url, namespace=NAMESPACE)


# ----------------------------------------------------------------------------- what is charged


def test_what_is_sent_is_charged_also_when_it_fails(bench):
    bench.tier.writes = WriteBudget(1 << 20, bench.clock)
    size = bench.tier.footprint(bench.record.header.stored_bytes)
    bench.do("write")
    bench.fail(OSError("injected"))
    assert bench.do("write") is Status.FAILED
    assert bench.tier.writes.left == (1 << 20) - 2 * size


def test_what_is_not_sent_is_not_charged(bench):
    bench.tier.writes = WriteBudget(1 << 20, bench.clock)
    bench.fail(OSError("injected"))
    for _ in range(5):
        bench.do("delete")
    calls = bench.store.calls
    assert bench.do("write") is Status.FAILED, "the breaker is open"
    assert bench.store.calls == calls
    assert bench.tier.writes.left == 1 << 20


def test_what_is_left_is_a_figure(bench):
    bench.tier.figures()
    assert not any("write_budget" in series for series in bench.metrics.snapshot())
    bench.tier.writes = WriteBudget(1 << 20, bench.clock)
    bench.tier.writes.spend(1 << 19)
    bench.tier.figures()
    assert bench.count("write_budget_bytes") == 1 << 19


# ------------------------------------------------------------------------------ when it is empty


@pytest.mark.parametrize("admission", ["through", "second-touch", "on-evict", "auto"])
def test_what_the_budget_does_not_pay_for_is_dropped_and_counted(new_spill, admission):
    bench = new_spill(8)
    bench.disk.admission = admission
    bench.disk.writes = WriteBudget(5 * FOOTPRINT + 7, bench.small.clock)
    parts = chain(8)
    bench.spill(parts, parts)
    assert [depth for call in bench.numbers for depth in call] == [0, 1, 2, 3, 4]
    assert bench.dropped("budget") >= 3
    assert bench.dropped("headless") == bench.dropped("failed") == 0
    bench.small.clock.now += DAY
    bench.spill(parts)
    assert len(bench.disk.kept) == 8


def test_without_the_guard_more_is_written_than_the_budget_has(new_spill, monkeypatch):
    """The twin."""
    monkeypatch.setattr(Spiller, "_paid", lambda self, jobs: jobs)
    bench = new_spill(8)
    bench.disk.writes = WriteBudget(5 * FOOTPRINT, bench.small.clock)
    bench.spill(chain(8))
    assert bench.disk.writes.left < 0


def test_for_what_is_not_paid_for_no_room_is_made(new_spill):
    bench = new_spill(8, 4 * FOOTPRINT)
    old = chain(4)
    bench.spill(old)
    bench.disk.writes = WriteBudget(FOOTPRINT - 1, bench.small.clock)
    bench.spill(chain(1, seed=1))
    assert list(bench.disk.kept) == [part.name for part in old]
    assert bench.dropped("budget") == 1


def test_a_part_that_is_sent_again_is_paid_for_again(new_spill):
    bench = new_spill(8)
    bench.disk.writes = WriteBudget(3 * FOOTPRINT, bench.small.clock)
    (part,) = chain(1)
    bench.disk.fate = {part.name: [Status.FULL] * 100}
    bench.spill([part])
    assert len(bench.disk.calls) == 3
    assert bench.dropped("budget") == 1


def test_ahead_of_eviction_nothing_is_tried_again_until_it_can_be_paid_for(new_spill):
    bench = new_spill(8)
    bench.disk.admission = "on-evict"
    bench.disk.writes = WriteBudget(FOOTPRINT, bench.small.clock)
    bench.disk.writes.spend(FOOTPRINT)
    bench.spill(chain(8))
    before = bench.dropped("budget")
    assert before > 0
    bench.spill([], [], [])
    assert bench.dropped("budget") == before
    bench.small.clock.now += DAY  # it is full, and that is just enough
    bench.spill([])
    assert bench.numbers == [[0]]
