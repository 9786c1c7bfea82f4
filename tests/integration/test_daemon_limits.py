"""The daemon and its clients under limits of their processes: one line that says what to raise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import kvtier
from kvtier.daemon.settings import Settings
from kvtier.daemon.supervisor import Supervisor
from kvtier.testing.daemon import running

LITTLE = """
import os, resource, sys
import kvtier
from pathlib import Path
from kvtier.daemon import server, supervisor, wire
from kvtier.testing.toy import NAMESPACE

def little(mebibytes=1):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20),) * 2)

def few():
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
"""
GRANTS = """
grants = server.Grants

def last(*args):
    little()
    return grants(*args)

server.Grants = last
"""
UNGUARDED = "server.OSError = server.MemoryError = server.KvtierError\n"
SERVE = "sys.exit(server.main())\n"
OPEN = """
try:
    kvtier.open(sys.argv[1], namespace=NAMESPACE)
except kvtier.ConfigError as error:
    print(error)
"""


@pytest.fixture
def started_with(tmp_path):
    """Start a daemon whose server is another program, and return what is wrong with it."""

    def wrong(program):
        class Other(Supervisor):
            pass

        Other.program = ("-c", program)
        daemon = Other(Settings(("dram:64MiB",), os.geteuid()), tmp_path / "s")
        with pytest.raises(kvtier.ConfigError) as raised:
            daemon.start(60)
        assert list(tmp_path.iterdir()) == []
        return str(raised.value)

    return wrong


def test_memory_that_a_server_does_not_get_is_told_by_its_size(started_with):
    assert "cannot take 64 MiB of memory for dram (Cannot allo" in started_with(
        LITTLE + "little(32)\n" + SERVE
    )


def test_a_server_without_memory_for_all_else_says_what_to_raise(started_with, capfd):
    said = started_with(LITTLE + GRANTS + SERVE)
    assert said.startswith("the server cannot be set up (Cannot allocate memory); raise its limits")
    assert capfd.readouterr().err == ""


def test_without_the_guard_it_would_end_with_a_traceback(started_with, capfd):
    said = started_with(LITTLE + UNGUARDED + GRANTS + SERVE)
    assert said == "the server ended with status 1; see what it wrote"
    assert "OSError: [Errno 12]" in capfd.readouterr().err


def test_a_server_with_too_few_open_files_says_what_to_raise(started_with, capfd):
    said = started_with(LITTLE + "few()\n" + SERVE)
    assert said.startswith("the server cannot be set up (Too many open files); raise its limits")
    assert capfd.readouterr().err == ""


def test_a_python_that_the_user_may_not_run_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path))
    daemon = Supervisor(Settings(("dram:8MiB",), os.geteuid()), tmp_path / "s")
    with pytest.raises(
        kvtier.ConfigError, match=r"cannot be started \(Permission denied\); see th"
    ):
        daemon.start(60)


@pytest.mark.parametrize(
    ("limit", "said"),
    [("little()\n", "Cannot allocate memory"), ("few()\n", "Too many open files")],
)
def test_a_client_without_room_is_told_so_at_once_and_not_that_there_is_no_daemon(limit, said):
    with running("dram:64MiB") as daemon:
        command = [sys.executable, "-c", LITTLE + limit + OPEN, f"{daemon.url}?timeout=5m"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert f"cannot take part in the daemon at {daemon.path} ({said}); raise its lim" in done.stdout


def test_without_looking_at_the_cause_it_would_wait(tmp_path):
    with running("dram:64MiB") as daemon:
        unguarded = "wire._WANTING = ()\n"
        command = [sys.executable, "-c", LITTLE + "little()\n" + unguarded + OPEN]
        command.append(f"{daemon.url}?timeout=200ms")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    # What it hears depends on where memory ends first; it is never what to do about it.
    assert "raise its limits" not in done.stdout
    assert "no daemon answers at " in done.stdout or done.returncode
