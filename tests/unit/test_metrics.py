"""Metrics keep the conventions and can be scraped; reports are bounded in rate and memory."""

from __future__ import annotations

import re
import threading

import pytest

from kvtier import metrics as module
from kvtier.errors import MisuseError
from kvtier.events import Reporter
from kvtier.metrics import TABLE, Metric, Metrics, exposition
from kvtier.testing.hands import Hands

UNITS = {
    *(
        "bytes",
        "calls",
        "chunks",
        "dollars",
        "fetches",
        "holds",
        "leases",
        "matches",
        "parts",
        "pins",
    ),
    *(
        "plans",
        "prefetches",
        "records",
        "requests",
        "seconds",
        "servers",
        "sessions",
        "slots",
        "tokens",
    ),
}
SAMPLE = re.compile(r'(?P<name>[a-z_]+)(?:\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)+)\})? \S+')


def faults(rows: dict[str, Metric]) -> list[str]:
    """Name what breaks the Prometheus conventions for names, units and labels."""
    found = []
    for name, row in rows.items():
        if name != row.name or not re.fullmatch(r"kvtier_[a-z]+(?:_[a-z]+)*", name):
            found.append(f"{name}: name")
        if name.endswith("_total") != (row.kind == "counter"):
            found.append(f"{name}: _total marks a counter, only")
        if row.unit not in UNITS:
            found.append(f"{name}: unit")
        if row.unit in {"bytes", "seconds"} and row.unit not in name:
            found.append(f"{name}: a base unit stands in the name")
        if not row.help or row.help.endswith(".") or "\n" in row.help:
            found.append(f"{name}: help")
        if len(set(row.labels)) < len(row.labels):
            found.append(f"{name}: labels")
    return found


def test_the_table_keeps_the_conventions():
    assert faults(TABLE) == []
    assert len(TABLE) == len(module._ROWS)


def test_a_bad_row_would_show():
    bad = Metric("kvtier_used_total", "gauge", "MiB", "Says more.", ("tier", "tier"))
    assert len(faults({"kvtier_used_total": bad})) == 4


def test_counters_add_and_gauges_hold_the_last():
    metrics = Metrics()
    metrics.add("saved_chunks")
    metrics.add("saved_chunks", 4)
    metrics.set("tier_parts", 7, tier="dram")
    metrics.set("tier_parts", 5, tier="dram")
    metrics.add("dropped_spills", 2, tier="s3", reason="full")
    metrics.add("dropped_spills", 3, reason="queue", tier="s3")
    assert metrics.get("saved_chunks") == 5
    assert metrics.get("tier_parts", tier="dram") == 5
    assert metrics.get("dropped_spills") == 5
    assert metrics.get("dropped_spills", reason="full") == 2
    assert metrics.get("expired_leases") == 0
    assert metrics.snapshot() == {
        'kvtier_dropped_spills_total{tier="s3",reason="full"}': 2,
        'kvtier_dropped_spills_total{tier="s3",reason="queue"}': 3,
        "kvtier_saved_chunks_total": 5,
        'kvtier_tier_parts{tier="dram"}': 5,
    }


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("nothing", {}),
        ("kvtier_saved_chunks_total", {}),
        ("saved_chunks", {"tier": "s3"}),
        ("tier_parts", {"level": "s3"}),
    ],
)
@pytest.mark.parametrize("verb", ["add", "set", "get"])
def test_a_wrong_name_or_label_is_misuse(verb: str, name: str, labels: dict[str, str]):
    metrics = Metrics()
    arguments = {"add": (name, 1), "set": (name, 1), "get": (name,)}[verb]
    with pytest.raises(MisuseError, match="no metric"):
        getattr(metrics, verb)(*arguments, **labels)


def test_a_missing_label_is_misuse_where_something_is_counted():
    with pytest.raises(MisuseError):
        Metrics().add("hit_tokens")
    with pytest.raises(MisuseError):
        Metrics().set("saved_chunks", 1)  # a counter is no gauge


def test_what_is_counted_elsewhere_only_rises():
    metrics = Metrics()
    for value in (3, 2):
        metrics.mirror("sent_requests", value, tier="s3", kind="GET")
    assert metrics.snapshot() == {'kvtier_sent_requests_total{tier="s3",kind="GET"}': 3}
    with pytest.raises(MisuseError):
        metrics.mirror("sessions", 1)  # a gauge is no counter


def test_the_text_can_be_scraped():
    metrics = Metrics()
    metrics.add("fetched_bytes", 123_456_789_012, tier='od"d\\na\nme')
    metrics.add("fetched_bytes", 1, tier="s3")
    metrics.set("tier_used_bytes", 0.5, tier="s3")
    lines = list(exposition({**metrics.snapshot(), "kvtier_of_another_release": 1.0}))
    kinds: dict[str, str] = {}
    for line in lines:
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            sample = SAMPLE.fullmatch(line)
            assert sample, line
            assert kinds[sample["name"]] == TABLE[sample["name"]].kind
            float(line.rpartition(" ")[2])
    assert len(lines) == 3 + 2 * 2
    assert any(line.endswith(" 123456789012") for line in lines), "a rate needs every digit"


def test_no_count_is_lost_between_threads():
    metrics = Metrics()
    barrier = threading.Barrier(4)

    def count() -> None:
        barrier.wait()
        for _ in range(2000):
            metrics.add("hit_tokens", 2, tier="dram")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.get("hit_tokens", tier="dram") == 16_000


# ---------------------------------------------------------------------------------------- reports


def test_a_cause_is_told_once_in_ten_seconds_and_then_how_often(caplog):
    clock = Hands(0.0)
    report = Reporter(clock)
    for _ in range(50):
        report.warn("s3", "down")
    report.warn("s3", "slow")
    report.warn("lmdb", "down")
    assert caplog.messages == ["s3: down", "s3: slow", "lmdb: down"]
    clock.now += 10
    report.warn("s3", "down")
    assert caplog.messages[-1] == "s3: down (49 more like it)"


def test_causes_without_end_take_no_memory_and_no_log_without_end(caplog):
    clock = Hands(0.0)
    report = Reporter(clock)
    for number in range(5000):
        report.warn("s3", f"request {number}")
    assert len(report._last) <= 258
    assert len(caplog.records) <= 258, "who makes causes up would fill the operator's disk"
    clock.now += 11
    report.warn("s3", "another")
    assert caplog.records[-1].getMessage() == "s3: another"


def test_a_counter_that_is_looked_up_once_counts_with_the_others():
    metrics = Metrics()
    add = metrics.counter("load_decisions", choice="load")
    assert metrics.snapshot() == {}
    add()
    metrics.add("load_decisions", choice="load")
    assert metrics.get("load_decisions", choice="load") == 2
    with pytest.raises(MisuseError):
        metrics.counter("load_decisions", tier="dram")
