"""The arithmetic of a benchmark's report, on numbers worked out by hand."""

from __future__ import annotations

import hashlib

import pytest

from kvtier.bench.messages import Served
from kvtier.bench.report import (
    ArmReport,
    Ratio,
    Sample,
    Summary,
    against_recompute,
    arm_report,
    digest,
    machine,
    miscounted,
    percentile,
    problems,
    ratio,
    summary,
)

ALL = slice(0, None)


def served(ttft=1.0, tpot=0.1, hits=None, tokens=(5, 6), fetched=None, read_bytes=0, recomputed=4):
    return Served(list(tokens), ttft, tpot, hits or {}, recomputed, read_bytes, fetched or {})


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([7.0], 99, 7.0), ([1, 2, 3, 4], 50, 2.5), ([4, 1, 3, 2], 100, 4), ([0, 10], 99, 9.9)],
)
def test_a_percentile_lies_between_the_nearest_values(values, percent, expected):
    assert percentile(values, percent) == pytest.approx(expected)


def test_a_summary_is_in_milliseconds():
    assert summary([0.1, 0.2, 0.6]) == Summary(300.0, 200.0, 592.0)


def test_a_ratio_is_the_median_of_pairs():
    assert ratio([1, 4, 9], [1, 2, 3]) == Ratio(2.0, 1.0, 3.0, 3)


def test_a_digest_is_of_all_ids_as_little_endian_int32():
    raw = bytes([1, 0, 0, 0, 0, 1, 0, 0, 2, 0, 0, 0])
    assert digest([[1, 256], [2]]) == hashlib.sha256(raw).hexdigest()


def test_an_arm_sums_over_its_requests():
    samples = {
        "recompute": [Sample(served(ttft=1.0)), Sample(served(ttft=3.0))],
        "hbm": [Sample(served(ttft=0.1)), Sample(served(ttft=0.1))],
        "s3": [
            Sample(served(0.2, 0.1, {"s3": 512}, fetched={"s3": 90}), 512, 100),
            Sample(served(0.2, 0.3, {"s3": 256}, fetched={"s3": 45}), 256, 50),
        ],
    }
    arm = arm_report("s3", samples, timed=ALL, details=False)
    assert (arm.requests, arm.hit_tokens, arm.recomputed_tokens) == (2, {"s3": 768}, 8)
    assert (arm.ttft_ms.mean, arm.tpot_ms.p50) == (200.0, 200.0)
    assert arm.times_sooner_than_recompute == pytest.approx(10)
    assert arm.ttft_over_hbm == pytest.approx(2)
    assert (arm.s3_sent_bytes, arm.claimed_bytes) == (150, {"s3": 135})
    assert arm.details is None
    assert arm_report("s3", samples, timed=ALL, details=True).details[1].hits == {"s3": 256}


def test_only_timed_requests_count_for_time():
    samples = {"hbm": [Sample(served(ttft=9.0)), Sample(served(ttft=0.5))]}
    arm = arm_report("hbm", samples, timed=slice(1, None), details=False)
    assert (arm.ttft_ms.mean, arm.requests) == (500.0, 2)


def test_one_output_token_has_no_time_per_token():
    samples = {"hbm": [Sample(served(tpot=None, tokens=(5,)))]}
    assert arm_report("hbm", samples, timed=ALL, details=False).tpot_ms is None


def test_arms_without_a_partner_have_no_ratio():
    arm = arm_report("dram", {"dram": [Sample(served())]}, timed=ALL, details=False)
    assert arm.times_sooner_than_recompute is None
    assert arm.ttft_over_hbm is None


def test_throughput_is_output_over_the_whole_request():
    samples = {
        "recompute": [Sample(served(ttft=1.0, tpot=1.0))],
        "dram": [Sample(served(ttft=1.5, tpot=2.5))],
    }
    arm = arm_report("dram", samples, timed=ALL, details=False)
    arm = against_recompute(arm, samples)
    assert arm.output_tokens_per_s == pytest.approx(0.5)
    assert arm.throughput_over_recompute == Ratio(0.5, 0.5, 0.5, 1)
    assert arm.ttft_over_recompute == Ratio(1.5, 1.5, 1.5, 1)


def found(samples, *, reuse=True):
    arms = [arm_report(name, samples, timed=ALL, details=False) for name in samples]
    return problems(arms, samples, {name: (name,) if reuse else () for name in samples})


def test_equal_answers_and_right_tiers_are_no_problem():
    samples = {
        "recompute": [Sample(served())],
        "dram": [Sample(served(hits={"dram": 256}), 256)],
    }
    assert found(samples) == []


def test_the_arm_that_answers_differently_is_named():
    samples = {"recompute": [Sample(served())], "lmdb": [Sample(served(tokens=(5, 7)))]}
    [problem] = found(samples)
    assert "arm lmdb answers differently" in problem


def test_without_a_recompute_arm_the_majority_is_right():
    samples = {
        "hbm": [Sample(served(tokens=(1,)))],
        "dram": [Sample(served(tokens=(2,)))],
        "lmdb": [Sample(served(tokens=(2,)))],
    }
    [problem] = found(samples)
    assert "arm hbm" in problem


@pytest.mark.parametrize("hits", [{"lmdb": 256}, {"dram": 128}, {}, {"dram": 256, "hbm": 16}])
def test_hits_from_elsewhere_or_too_few_are_a_problem(hits):
    [problem] = found({"dram": [Sample(served(hits=hits), 256)]})
    assert "256 should have come from dram" in problem


def test_an_arm_may_take_from_all_tiers_that_it_is_allowed():
    samples = {"dram": [Sample(served(hits={"dram": 256, "hbm": 16}), 272)]}
    arms = [arm_report("dram", samples, timed=ALL, details=False)]
    assert problems(arms, samples, {"dram": ("hbm", "dram")}) == []
    [problem] = problems(arms, samples, {"dram": ("hbm",)})
    assert "272 should have come from hbm" in problem


def test_the_hit_rate_is_of_the_requests_that_count():
    samples = {
        "dram": [Sample(served(recomputed=90)), Sample(served(hits={"dram": 6}, recomputed=2))]
    }
    arm = arm_report("dram", samples, timed=slice(1, None), details=False)
    assert (arm.hit_rate, arm.hit_rates) == (75.0, {"dram": 75.0})
    assert arm_report("dram", samples, timed=ALL, details=False).hit_rate == pytest.approx(6.122)


def test_where_nothing_is_shared_any_hit_is_a_problem():
    assert found({"dram": [Sample(served())]}, reuse=False) == []
    assert found({"dram": [Sample(served(hits={"dram": 16}))]}, reuse=False)


def test_the_machine_is_named():
    here = machine()
    assert here.cpu
    assert here.packages["kvtier"]


@pytest.mark.parametrize(
    ("claimed", "disk", "sent", "wrong"),
    [
        ({"lmdb": 10**8}, 10**8 + 10**5, None, 0),
        ({"lmdb": 10**8}, 10**8 - 1, None, 1),
        ({"lmdb": 10**8}, 11 * 10**7, None, 1),
        ({"s3": 10**8}, 0, 10**8, 0),
        ({"s3": 10**8}, 0, 10, 1),
        ({"s3": 10**8}, 0, None, 0),  # a server of which nothing is known
        ({}, 500, 500, 0),
    ],
)
def test_bytes_that_the_system_did_not_count_are_a_problem(claimed, disk, sent, wrong):
    none = Summary(mean=0.0, p50=0.0, p99=0.0)
    arm = ArmReport(
        name="arm",
        requests=1,
        ttft_ms=none,
        tpot_ms=none,
        hit_tokens={},
        recomputed_tokens=0,
        hit_rate=0.0,
        hit_rates={},
        tokens_sha256="",
        disk_read_bytes=disk,
        claimed_bytes=claimed,
        s3_sent_bytes=sent,
    )
    assert len(miscounted(arm, 10**7)) == wrong
    assert not miscounted(arm, 4096) or counted_less(arm)  # small records are mostly header


def counted_less(arm):
    return max(arm.disk_read_bytes, arm.s3_sent_bytes or 0) < max(arm.claimed_bytes.values())
