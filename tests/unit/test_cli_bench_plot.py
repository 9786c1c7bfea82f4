"""A benchmark's picture: drawn for every workload, its title true, a bad file refused in time."""

from __future__ import annotations

import msgspec
import pytest

from kvtier.bench.report import ArmReport, Machine, Ratio, Report, Summary
from kvtier.cli.bench_plot import COLOURS, draw_report, finding
from kvtier.cli.main import run
from kvtier.errors import ConfigError


def arm(name, ttft, **more):
    fields = {
        "requests": 3,
        "ttft_ms": Summary(ttft, ttft, ttft),
        "tpot_ms": None,
        "hit_tokens": {} if name == "recompute" else {name: 4096},
        "recomputed_tokens": 100,
        "hit_rate": 0.0 if name == "recompute" else 97.5,
        "hit_rates": {} if name == "recompute" else {name: 97.5},
        "tokens_sha256": "a" * 64,
        "disk_read_bytes": 0,
        "claimed_bytes": {"lmdb": 1 << 20} if name == "lmdb" else {},
        "ttft_each_ms": [ttft * 0.9, ttft, ttft * 1.1],
        "times_sooner_than_recompute": 900 / ttft,
    }
    return ArmReport(name=name, **fields | more)


def report(*arms, **more):
    fields = {
        "workload": "shared-prefix",
        "model": "random",
        "model_sha256": "",
        "args": {"threads": 1},
        "machine": Machine("a processor", 2, "Linux", "3.11", {}),
        "arms": list(arms) or [arm("recompute", 900.0), arm("dram", 20.0), arm("lmdb", 45.0)],
        "problems": [],
        "seconds": 1.0,
        "denominator": "prompt tokens of all 3 requests",
        "bytes_per_token": 256,
    }
    return Report(**fields | more)


def cold():
    return [
        msgspec.structs.replace(one, cold_ttft_ms=Summary(900.0, 900.0, 900.0))
        for one in report().arms
    ]


CASES = {
    "one of each": report(),
    "a single arm": report(arm("hbm", 20.0, hit_rate=0.0, hit_rates={}, hit_tokens={})),
    "documents": report(*cold()),
    "many": report(arm("dram", 9.0, ttft_each_ms=[float(n + 1) for n in range(500)])),
    "a trace": report(ceiling=98.0, capacities={"dram": 1 << 20, "lmdb": 3 << 30}),
    "problems": report(problems=["arm dram answers differently"]),
}


@pytest.fixture(scope="module", autouse=True)
def fonts(tmp_path_factory):
    """Let matplotlib open its fonts, which it keeps, before anybody counts descriptors."""
    draw_report(report(), tmp_path_factory.mktemp("fonts") / "x.png")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture_is_drawn(tmp_path, name, kind):
    path = tmp_path / f"x.{kind}"
    draw_report(CASES[name], path)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_every_arm_has_a_colour_of_its_own():
    assert len(set(COLOURS.values())) == len(COLOURS) == 5


def test_the_title_says_what_was_found():
    assert "45x from dram, 20x from lmdb" in finding(report())
    traced = finding(report(ceiling=98.0))
    assert "dram 97.5%, + lmdb 97.5%; 98.0% is possible" in traced
    slower = arm("lmdb", 910.0, ttft_over_recompute=Ratio(1.02, 0.9, 1.1, 8))
    assert "lmdb takes 1.02 times" in finding(report(arm("recompute", 900.0), slower))
    assert "problems: 1" in finding(CASES["problems"])


def test_a_picture_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        draw_report(report(), tmp_path / "none" / "x.png")


@pytest.mark.parametrize("command", ["shared-prefix", "multi-turn", "no-reuse", "long-doc"])
@pytest.mark.parametrize("engine", [[], ["vllm"]])
def test_without_matplotlib_nothing_is_begun(capsys, monkeypatch, command, engine):
    monkeypatch.setattr("kvtier.cli.output.find_spec", lambda _: None)
    assert run(["bench", *engine, command, "--plot", "x.png"]) == 2
    assert 'pip install "kvtier[plot]"' in capsys.readouterr().err
