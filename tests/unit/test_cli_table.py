"""The tables that a benchmark prints: whole in a terminal of 80 columns, and honest."""

from __future__ import annotations

import pytest

from kvtier.bench.report import ArmReport, Machine, Report, Summary
from kvtier.cli.table import show


def arm(name: str, ttft: float, **more) -> ArmReport:
    fields = {
        "requests": 8,
        "ttft_ms": Summary(ttft, ttft, ttft * 1.1),
        "tpot_ms": Summary(174.2, 174.2, 190.0),
        "hit_tokens": {name: 16_384},
        "recomputed_tokens": 16_615,
        "hit_rate": 49.6,
        "hit_rates": {name: 49.6},
        "tokens_sha256": "a" * 64,
        "disk_read_bytes": 0,
        "claimed_bytes": {},
        "times_sooner_than_recompute": 12_345.6 / ttft,
    }
    return ArmReport(name=name, **fields | more)


def printed(capsys, *arms: ArmReport, gpu: str = "") -> list[str]:
    machine = Machine("a processor", 2, "Linux", "3.11", {}, gpu)
    report = Report(
        workload="shared-prefix",
        model="random",
        model_sha256="",
        args={"threads": 1},
        machine=machine,
        arms=list(arms),
        problems=[],
        seconds=1.0,
        denominator="prompt tokens of all 8 requests",
        bytes_per_token=256,
    )
    show(report)
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def arms() -> list[ArmReport]:
    mib = 1 << 20
    return [
        arm("recompute", 12_345.6, hit_tokens={}),
        arm("lmdb", 297.0, disk_read_bytes=380 * mib, claimed_bytes={"lmdb": 379 * mib}),
        arm("s3", 3370.0, s3_sent_bytes=380 * mib, claimed_bytes={"s3": 379 * mib}),
    ]


def test_what_it_ran_on_is_named(capsys, arms):
    assert "random on a processor, 1 torch" in printed(capsys, *arms)[-1]
    told = printed(capsys, *arms, gpu="a board")[-1]
    assert "random on a board, 1 torch" in told
    assert "CPU" not in told


def test_tables_are_whole_in_eighty_columns(capsys, arms):
    lines = printed(capsys, *arms)
    tables = [line for line in lines if line.startswith("  ")]
    assert max(map(len, tables)) <= 80
    assert not [line for line in lines if "…" in line]
    text = "\n".join(tables)
    for found in (
        "12,346 ms",
        "13,580 ms",
        "41.6x",
        "16,384 lmdb",
        "379 MiB lmdb",
        "379 MiB s3",
        "380 MiB",
    ):
        assert found in text
    assert text.count("✓ same") == 3


def test_an_answer_that_differs_is_marked(capsys, arms):
    wrong = arm("dram", 300.0, tokens_sha256="b" * 64)
    [line] = [line for line in printed(capsys, *arms, wrong) if "✗" in line]
    assert line.split()[0] == "dram"


def test_it_says_what_it_does_not_show(capsys, arms):
    assert "it does not show the speed of a GPU" in printed(capsys, *arms)[-1]
