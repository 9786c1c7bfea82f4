"""A short soak: clients and server of one daemon are killed and stopped, and no byte is wrong.

Each guard without which slots would be given away under somebody's copy is taken out of the server
in turn (``careless``); then the soak sees wrong bytes. Where clients do not let go of the memory of
a daemon that is gone, it sees two arenas.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def soaked(root: Path, *options: str, careless: str = "") -> tuple[int, dict[str, Any]]:
    """Run a soak; return its status and its report."""
    paths = [str(root), *([str(Path(__file__).parent / "careless")] if careless else [])]
    command = [sys.executable, "-m", "kvtier.testing.soak", "--clients", "8", *options]
    run = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "KVTIER_CARELESS": careless},
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.stdout, run.stderr
    return run.returncode, json.loads(run.stdout.splitlines()[-1])


def test_a_short_soak_finds_nothing_wrong(root):
    short = ("--seconds", "60", "--least", "10", "--stalls", "6", "--supervisor", "5")
    status, report = soaked(root, *short)
    assert not status, report
    for name in ("wrong_bytes", "hangs", "leaked_leases", "errors"):
        assert report[name] == 0, report
    assert report["arenas_alive_max"] == 1, report
    for name in ("kills", "supervisors_killed", "clients_killed", "stops", "stalled_copies"):
        assert report[name] > 0, report
    for name in ("loads", "saves", "resumes"):
        assert report[name] > 0, report


@pytest.mark.parametrize(("guard", "server"), [("revoke", "20"), ("forget", "4")])
def test_without_a_guard_the_soak_sees_wrong_bytes(root, guard, server):
    """Slots are few; a server lives, and a copy stands still, until others have used them."""
    short = ("--seconds", "120", "--stalls", "4", "--first", "--supervisor", "0")
    scarce = ("--chunks", "24", "--server", server, "--longest", "5")
    status, report = soaked(root, *short, *scarce, careless=guard)
    assert status == 1, report
    assert report["wrong_bytes"] > 0, report


def test_without_letting_go_the_soak_sees_two_arenas(root):
    short = ("--seconds", "60", "--first", "--supervisor", "5")
    status, report = soaked(root, *short, careless="keep")
    assert status == 1, report
    assert report["arenas_alive_max"] > 1, report
