"""Traces and long documents from end to end: real processes, a small random model, real tiers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import zstandard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # as in test_bench.py
REQUESTS = [[1, 2, 3], [1, 2, 4], [5, 6, 7], [8, 9, 10], [1, 2, 3], [5, 6, 11]]
POSSIBLE = 2 + 3 + 2  # blocks that a prompt before had


def kvtier(*args):
    command = [sys.executable, "-m", "kvtier", "bench", *map(str, args)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=170)


def reported(*args):
    ran = kvtier(*args, "--json", "-")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["problems"] == []
    assert len({arm["tokens_sha256"] for arm in report["arms"]}) == 1
    return report, {arm["name"]: arm for arm in report["arms"]}


@pytest.fixture
def trace(tmp_path):
    """Return a packed trace of six requests, of three blocks and a little more each."""
    lines = [
        json.dumps(
            {
                "timestamp": 50 * number,
                "input_length": 3 * 512 + 100,
                "output_length": 64,
                "hash_ids": blocks,
            }
        )
        for number, blocks in enumerate(REQUESTS)
    ]
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(zstandard.compress("\n".join(lines).encode()))
    return path


def test_each_tier_adds_what_the_ones_above_lost(trace, tmp_path):
    picture = tmp_path / "t.png"
    sizes = ("--bytes-per-token", "1KiB", "--hbm", "3MiB", "--dram", "4MiB", "--disk", "99MiB")
    args = (with_a_bad_line(trace), "--skip-bad", "--dir", tmp_path, *sizes, "--plot", picture)
    report, arms = reported("trace", *args)
    total = len(REQUESTS) * (3 * 16 + 4)
    assert list(arms) == ["recompute", "hbm", "dram", "lmdb"]
    for arm in arms.values():
        assert sum(arm["hit_tokens"].values()) + arm["recomputed_tokens"] == total
    assert arms["recompute"]["hit_rate"] == 0.0
    assert arms["lmdb"]["hit_rate"] == report["ceiling"]
    assert report["ceiling"] == pytest.approx(100 * POSSIBLE * 16 / total, abs=1e-3)
    assert 0 < arms["hbm"]["hit_rate"] < arms["dram"]["hit_rate"] < report["ceiling"]
    assert arms["lmdb"]["claimed_bytes"]["lmdb"] > 0
    assert arms["lmdb"]["requests_per_s"] > 0
    assert report["capacities"]["hbm"] == 6 * 16 * report["bytes_per_token"]
    assert report["args"]["skipped_lines"] == 1
    assert "prompt tokens of all 6 requests" in report["denominator"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_clock_serves_what_a_model_does(trace, tmp_path):
    args = (trace, "--timing-model", "--prefill", "1000", "--dir", tmp_path)
    report, arms = reported("trace", *args, "--arms", "recompute,dram", "--dram", "64KiB")
    assert report["model"] == "timing model"
    assert arms["dram"]["hit_rate"] == report["ceiling"]
    # 1,636 tokens of the trace at 1,000 a second; what is found takes no time of the clock
    assert arms["recompute"]["ttft_ms"]["p50"] == pytest.approx(1636, rel=0.1)
    assert arms["dram"]["ttft_ms"]["p50"] < arms["recompute"]["ttft_ms"]["p50"]


def test_requests_that_come_too_fast_wait(trace, tmp_path):
    args = (trace, "--timing-model", "--prefill", "10000", "--speed-up", "1", "--dir", tmp_path)
    more = ("--arms", "recompute", "--output-details", "--warmup", "0.5")
    report, arms = reported("trace", *args, *more)
    waited = [one["ttft_s"] for one in arms["recompute"]["details"]]
    assert report["args"]["rate"] == pytest.approx(6 / 0.25)
    assert "the last 3 of 6 requests" in report["denominator"]
    assert len(waited) == 3
    # each takes 0.16 s and comes 0.05 s after the one before
    assert min(waited[1:]) > 1.5 * waited[0]
    ran = kvtier("trace", *args, "--arms", "recompute")
    assert "24 came a second, too many for recompute: they waited." in ran.stdout


def test_a_bad_line_is_named(trace):
    ran = kvtier("trace", with_a_bad_line(trace))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "line 2: input_length: it is missing" in ran.stderr


def test_documents_that_hbm_lost_are_found_in_the_tier(tmp_path):
    args = ("--model", "random", "--suffix-len", "128", "--dir", tmp_path, "--repeat-mode", "tile")
    more = ("--hit-miss-ratio", "3:1", "--arms", "hbm,dram,lmdb")
    _, arms = reported("long-doc", *args, *more)
    assert arms["hbm"]["hit_rate"] < 20  # in turn, one of three at a time: most is lost
    for name in ("dram", "lmdb"):
        assert len(arms[name]["ttft_each_ms"]) == 6 + 2
        assert arms[name]["hit_rates"][name] > 40
        assert set(arms[name]["hit_tokens"]) <= {"hbm", name}
        assert arms[name]["cold_ttft_ms"]["p50"] > arms[name]["ttft_ms"]["p50"]
    assert arms["lmdb"]["claimed_bytes"]["lmdb"] > 0


def with_a_bad_line(trace):
    """Return the trace with its second line spoilt."""
    lines = zstandard.decompress(trace.read_bytes()).decode().splitlines()
    bad = trace.with_name("bad.jsonl")
    bad.write_text("\n".join([lines[0], '{"timestamp": 1}', *lines[1:]]))
    return bad
