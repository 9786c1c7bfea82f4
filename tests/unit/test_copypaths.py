"""What `kvtier doctor --device` measures, keeps and says, on a CPU in the place of a GPU."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kvtier.bench.copypaths import cpu_speeds, measure
from kvtier.cli.copies import copies_of
from kvtier.cli.doctor import doctor
from kvtier.device.paths import PATHS, Choice, Speed, Table, kept_table
from kvtier.errors import ConfigError
from kvtier.testing.cpu_driver import CpuDriver

KIB = 1 << 10


def test_every_way_is_measured_for_every_kind_of_copy():
    driver = CpuDriver()
    table = measure(driver, (4 * KIB, 64 * KIB), (16, 64), 2 << 20)
    assert table.gpu == driver.name
    kinds = {(one.role, one.run_bytes, one.runs) for one in table.speeds}
    assert kinds == {
        (role, size, runs)
        for role in ("load", "store")
        for size, runs in ((4 * KIB, 16), (4 * KIB, 64), (64 * KIB, 16))  # the rest is too large
    }
    assert {one.choice.way for one in table.speeds} == set(PATHS)
    assert len(table.speeds) == len(kinds) * 7
    assert all(one.gb_per_s > 0 for one in table.speeds)
    assert driver.pinned == {}


def test_a_driver_without_batched_copies_is_measured_without():
    table = measure(CpuDriver(batches=False), (4 * KIB,), (16,), 1 << 20)
    assert {one.choice.way for one in table.speeds} == {"staged", "direct"}


def test_memory_that_is_not_pinned_is_told(tmp_path):
    driver = CpuDriver()
    driver.refuses = True
    with pytest.raises(ConfigError, match="not pinned"):
        measure(driver, (4 * KIB,), (16,), 1 << 20)
    (finding,) = copies_of(driver, tmp_path)
    assert (finding.state, list(tmp_path.iterdir())) == ("limited", [])
    assert "not pinned" in finding.found


def test_what_was_measured_is_kept_and_told_fastest_first(tmp_path):
    driver = CpuDriver()
    speeds = tuple(
        Speed("load", 4 * KIB, 16, choice, speed)
        for choice, speed in ((Choice("staged"), 2.0), (Choice("direct", 4), 9.0))
    )
    (finding,) = copies_of(driver, tmp_path, Table(driver.name, speeds))
    assert finding.name == "load of 16 runs of 4 KiB"
    assert finding.found == "direct (4) 9.0, staged 2.0 GB/s"
    kept = kept_table(tmp_path, driver.name)
    assert kept.choose("load", 16 * 4 * KIB, 16) == Choice("direct", 4)


def test_the_cpu_is_measured_in_both_directions():
    assert {role for role, speed in cpu_speeds(4 << 20) if speed > 0} == {"load", "store"}


def test_without_a_gpu_the_command_says_that_it_was_not_run(tmp_path):
    done = CliRunner().invoke(doctor, ["--device", "--json"])
    findings = {one["name"]: one for one in json.loads(done.stdout)}
    assert "load" in findings["copies by CPU"]["found"]
    import torch

    if torch.version.cuda is None:
        assert findings["copies by GPU"]["found"] == "not run"
        assert "built without CUDA" in findings["copies by GPU"]["change"]
