"""``kvtier serve``: what it refuses at the door, and what it tells."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from kvtier.cli import serve as serve_command
from kvtier.cli.main import run
from kvtier.daemon.answers import Answer
from kvtier.daemon.messages import Figures
from kvtier.daemon.principals import Principal
from kvtier.daemon.settings import Settings
from kvtier.daemon.supervisor import Supervisor
from kvtier.testing.daemon import running
from kvtier.testing.rawclient import RawClient
from kvtier.testing.waiting import until

DRAM = "dram:8MiB"


def refused(capsys, *args) -> str:
    assert run(["serve", *args]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: ")
    return said.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "name the tiers, such as dram:8GiB, or a file with --config"),
        (["--config", "x.toml", DRAM], "name the tiers or a file with --config, and not both"),
        (["--config", "no/such.toml"], "cannot read no/such.toml"),
        (["lmdb:x?capacity=1GiB"], "begins with one dram tier, such as dram:8GiB"),
        ([DRAM, "lmbd:x?capacity=1GiB"], "did you mean 'lmdb'"),
        ([DRAM, "--sockt", "x"], "did you mean '--socket'?"),
        ([DRAM, "--socket", "/run/" + "x" * 120], "has 125 bytes, and the system takes 107; choos"),
        ([DRAM, "--socket", ""], "is no path of a socket"),
        ([DRAM, "--socket", "/proc/no/such"], "folder /proc/no cannot be used"),
        (["dram:900TiB"], "of memory available here; ask for less, or raise the limit (MemoryMax="),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, args, said):
    assert said in refused(capsys, *args)


ONE = '[principals.one]\nuid = 1\nsocket = "/run/1"\ntiers = ["dram:1MiB"]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('tiers = ["dram:1MiB"]\nsockte = "x"', "unknown option 'sockte'; did you mean 'socket'?"),
        ("socket = 3\ntiers = []", "is a path, not 3"),
        ('socket = "x"', 'needs tiers = ["dram:8GiB", ...]'),
        ("principals = 3", "are tables, such as [principals.NAME]"),
        ("[principals]", "are tables, such as [principals.NAME]"),
        ("[principals.one]\nuid = 1", "principal 'one' has no socket; it needs uid, socket and"),
        (ONE + "gid = 1", "unknown option of principal 'one' 'gid'; did you mean 'uid'?"),
        ("[principals]\none = 1", "principal 'one' needs a table with uid, socket and tiers"),
        (ONE.replace("uid = 1", "uid = -1"), "the uid of principal 'one' must be a whole number"),
        (ONE.replace('"/run/1"', '""'), "'' is no path of a socket"),
        ('socket = "x"\n' + ONE, "its own tiers, socket and recording; take socket away"),
        (ONE + ONE.replace("one", "two"), "'one' and 'two' have the same uid; give each its own"),
        (
            ONE + ONE.replace("one", "two").replace("uid = 1", "uid = 2"),
            "'one' and 'two' have the same socket; give each its own",
        ),
        (
            ONE
            + ONE.replace("one", "two")
            .replace("uid = 1", "uid = 2")
            .replace("/run", "/run/../run"),
            "'one' and 'two' have the same socket; give each its own",
        ),
        (
            ONE.replace("1MiB", '1MiB", "lmdb:kv?capacity=1GiB')
            + ONE.replace("1MiB", '1MiB", "lmdb:kv?capacity=2GiB')
            .replace("one", "two")
            .replace("= 1", "= 2")
            .replace("/run/1", "/run/2"),
            "'one' and 'two' have the same lmdb tier; give each its own",
        ),
        (ONE + "[tenants.a]\nflor = 1", "unknown option of tenant 'a' 'flor'; did you mean 'floor"),
        (ONE + "[tenants.a]\nceiling = 2", "tenant 'a': a quota needs 0 <= floor <= ceiling <= 1"),
        ("tiers = [", "is not TOML"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(capsys, tmp_path, text, said):
    (tmp_path / "kvtier.toml").write_text(text)
    assert said in refused(capsys, "--config", str(tmp_path / "kvtier.toml"), "--print-config")


def test_what_would_be_served_is_printed_and_can_be_read_again(capsys, tmp_path):
    file, other = tmp_path / "kvtier.toml", tmp_path / "other.toml"
    two = ONE.replace("one", '"the second"').replace("= 1", "= 2").replace("/run/1", "/run/2")
    for text in (
        'socket = "/run/kv"\ntiers = ["dram:1MiB", "memory:x?capacity=1GiB"]\n',
        ONE + two + '[tenants."a b"]\nfloor = "10%"\n',
    ):
        file.write_text(text)
        assert run(["serve", "--config", str(file), "--print-config"]) == 0
        printed = capsys.readouterr().out
        other.write_text(printed)
        assert run(["serve", "--config", str(other), "--print-config"]) == 0
        assert capsys.readouterr().out == printed
    assert "uid = 2" in printed
    assert "floor = 0.1" in printed


def test_a_secret_is_not_printed(capsys):
    url = "memory:token=hidden?capacity=64MiB"
    assert run(["serve", "--print-config", "--socket", "/run/kv", DRAM, url]) == 0
    assert "hidden" not in capsys.readouterr().out


def test_what_it_tells_when_it_is_ready_and_at_the_end(tmp_path, monkeypatch):
    path = tmp_path / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service:
        service.bind(str(path))
        service.settimeout(20)
        with running(DRAM, "memory:x?capacity=64MiB", path=tmp_path / "s") as daemon:
            assert daemon.ready == {
                "event": "ready",
                "socket": str(tmp_path / "s"),
                "pid": daemon.process.pid,
                "server": daemon.server_pid(),
                "arena_bytes": 8 << 20,
                "tiers": ["dram", "memory"],
                "generation": 1,
            }
            assert service.recv(100) == b"READY=1"
            with RawClient(daemon.path) as client:
                client.greet()
                assert client.ask(Figures(), Answer)
            daemon.process.terminate()
            assert daemon.process.wait(20) == 0
            lines = daemon.log.with_name("said").read_text().splitlines()
            assert [json.loads(line)["event"] for line in lines] == ["ready", "ended"]
        assert service.recv(100) == b"STOPPING=1"


def test_it_goes_on_when_nobody_reads_what_it_tells(tmp_path):
    import signal
    import subprocess
    import sys

    from kvtier.testing.with_parent import with_parent

    command = [sys.executable, "-m", "kvtier", "serve", DRAM, "--socket", str(tmp_path / "s")]
    with subprocess.Popen(with_parent(command), stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.readline()
        assert said.startswith(f"ready: socket {tmp_path}/s, pid {process.pid}, server ")
        process.stdout.close()
        server = int(said.split("server ")[1].split(",")[0])
        os.kill(server, signal.SIGKILL)
        until(lambda: again(tmp_path / "s"), 20.0)
        process.terminate()
        assert process.wait(20) == 0


def again(path) -> bool:
    try:
        with RawClient(path) as client:
            return client.greet().generation == 2
    except (EOFError, ConnectionError):
        return False


def test_principals_start_side_by_side(tmp_path, monkeypatch):
    """Each opens tiers of its own, which may take a while."""
    calls = []
    for name in ("begin", "wait"):
        own = getattr(Supervisor, name)

        def noted(self, *args, name=name, own=own):
            calls.append(name)
            return own(self, *args)

        monkeypatch.setattr(Supervisor, name, noted)
    found = [
        Principal(name, tmp_path / name, Settings((DRAM,), os.geteuid())) for name in ("one", "two")
    ]
    ready = []

    def tell(event, **said):
        ready.append((event, said.get("principal")))
        if len(ready) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    assert serve_command._run(found, tell) == 0
    assert calls == ["begin", "begin", "wait", "wait"]
    assert ready == [("ready", "one"), ("ready", "two"), ("ended", None)]


# ---- before it serves


class Slow(Supervisor):
    """Its server never serves."""

    program = ("-c", "import time; time.sleep(600)")


def test_who_ends_it_before_it_serves_gets_what_was_asked_for(tmp_path, monkeypatch):
    wait, told = Supervisor.wait, []

    def waits(self, timeout=None):
        os.kill(os.getpid(), signal.SIGTERM)
        return wait(self, timeout)

    monkeypatch.setattr(Supervisor, "program", Slow.program)
    monkeypatch.setattr(Supervisor, "wait", waits)
    found = [Principal("", tmp_path / "s", Settings((DRAM,), os.geteuid()))]
    assert serve_command._run(found, lambda event, **_: told.append(event)) == 0
    assert told == ["ended"]


@pytest.mark.parametrize("blocks", [True, False])
def test_the_terminals_word_is_not_for_a_server_that_starts(tmp_path, monkeypatch, blocks):
    """The twin gets it before it can ignore it, and writes a traceback."""
    if not blocks:
        monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    with contextlib.closing(Slow(Settings((DRAM,), os.geteuid()), tmp_path / "s")) as one:
        one.begin()
        until(lambda: one.server)
        status = Path(f"/proc/{one.server}/status").read_text()
    blocked = int(status.split("SigBlk:")[1].split()[0], 16)
    assert bool(blocked >> signal.SIGINT - 1 & 1) == blocks
