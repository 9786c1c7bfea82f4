"""A daemon's figures, and those that its client counts itself."""

from __future__ import annotations

from kvtier.daemon.remote import RemoteMetrics


def test_what_a_client_counts_stays_when_the_daemon_is_asked():
    answers = [{"kvtier_saved_chunks_total": 3.0}, None, {"kvtier_saved_chunks_total": 4.0}]
    metrics = RemoteMetrics(lambda: answers.pop(0))
    metrics.add("load_decisions", choice="load")
    assert metrics.get("load_decisions", choice="load") == 1
    metrics.add("load_decisions", choice="load")
    metrics.set("tier_latency_seconds", 0.5, tier="s3")
    assert metrics.get("saved_chunks") == 3  # nobody answers: the last one holds
    assert metrics.snapshot() == {
        'kvtier_load_decisions_total{choice="load"}': 2,
        "kvtier_saved_chunks_total": 4,
        'kvtier_tier_latency_seconds{tier="s3"}': 0.5,
    }
