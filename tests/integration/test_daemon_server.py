"""The daemon as operators run it: what it survives, how it ends, and that no two share a place."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kvtier
from kvtier.daemon import supervisor as supervisors
from kvtier.daemon.answers import Answer, Closing
from kvtier.daemon.frames import encode
from kvtier.daemon.messages import Figures, Hello
from kvtier.daemon.settings import Settings
from kvtier.daemon.supervisor import Supervisor
from kvtier.testing.daemon import running
from kvtier.testing.rawclient import RawClient, greeted, hello
from kvtier.testing.waiting import lives, until

DRAM = "dram:8MiB"


def for_ever(call, *args):
    while True:
        call(*args)


def refuses(path) -> bool:
    try:
        RawClient(path).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.fixture
def supervised(tmp_path):
    """Start supervisors in this process, which end with the test."""
    made = []

    def start(*urls, path="s", **given):
        made.append(Supervisor(Settings(urls or (DRAM,), os.geteuid()), tmp_path / path, **given))
        return made[-1]

    yield start
    for one in made:
        one.close()


# ---- a server dies, a supervisor dies, both end in order


def test_a_killed_server_comes_back_with_the_same_arena_and_the_next_generation():
    with running(DRAM) as daemon:
        first, inode = greeted(daemon.path)
        assert (first.generation, first.tiers, first.nbytes) == (1, ("dram",), 8 << 20)
        assert first.arena == inode
        with RawClient(daemon.path) as client:
            client.greet()
            for generation in (2, 3):
                os.kill(daemon.server_pid(), signal.SIGKILL)
                until(daemon.server_pid)
                welcome, _ = greeted(daemon.path)
                assert (welcome.generation, welcome.arena) == (generation, inode)
            assert client.ended()
        assert "was ended by signal 9; it starts again" in daemon.log.read_text()


def test_a_server_loads_no_torch_and_opens_no_gpu():
    with running(DRAM) as daemon:
        mapped = Path(f"/proc/{daemon.server_pid()}/maps").read_text()
        assert "libpython" in mapped or "python3" in mapped
        assert not [word for word in ("torch", "libcuda", "/dev/nvidia") if word in mapped]


def test_clients_that_come_while_there_is_no_server_are_served_by_the_next():
    with running(DRAM) as daemon:
        pid = daemon.server_pid()
        os.kill(pid, signal.SIGSTOP)
        with RawClient(daemon.path) as client:
            pidfd = os.pidfd_open(os.getpid())
            client.say(hello(), 1, passing=pidfd)  # in the socket's queue, not accepted
            os.close(pidfd)
            os.kill(pid, signal.SIGKILL)
            assert client.read()[0].generation == 2


def orphaned(tmp_path, program, within) -> bool:
    """Kill a supervisor; say whether its server ends, too, `within` seconds."""
    script = (
        "import os, sys; from kvtier.daemon.supervisor import Supervisor;"
        "from kvtier.daemon.settings import Settings;"
        "Supervisor.program = tuple(sys.argv[2:]) or Supervisor.program;"
        f"s = Supervisor(Settings(({DRAM!r},), os.geteuid()), sys.argv[1]);"
        "print(s.start().server, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "s"), *program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        server = int(parent.stdout.readline())
        parent.kill()
    try:
        until(lambda: not lives(server), within)
    except TimeoutError:
        os.kill(server, signal.SIGKILL)
        return False
    return True


NO_SIGNAL = "s.ctypes = SimpleNamespace(CDLL=lambda _: SimpleNamespace(prctl=lambda *_: 0));"
NO_LINK = "s._orphaned = lambda: None;"


@pytest.mark.parametrize(
    ("without", "ends"),
    [("", True), (NO_SIGNAL, True), (NO_LINK, True), (NO_SIGNAL + NO_LINK, False)],
    ids=["as it is", "by the link", "by the signal", "by neither"],
)
def test_a_server_ends_with_its_supervisor(tmp_path, without, ends):
    script = (
        "import sys; from types import SimpleNamespace; import kvtier.daemon.server as s;"
        f"{without} s.main()"
    )
    program = ["-c", script] if without else []
    assert orphaned(tmp_path, program, 30.0 if ends else 2.0) == ends


def test_what_a_killed_supervisor_left_is_cleaned_up_by_the_next(tmp_path):
    path = tmp_path / "s"
    with running(DRAM, path=path) as daemon:
        server = daemon.server_pid()
        daemon.process.kill()
        until(lambda: not lives(server))
        until(lambda: refuses(path))
        with running(DRAM, path=path) as other:
            assert greeted(path)[0].generation == 1
            assert other.supervisor_pid != daemon.supervisor_pid
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("whom", ["supervisor", "server"])
def test_sigterm_ends_in_order_and_leaves_nothing(tmp_path, whom):
    path = tmp_path / "s"
    with running(DRAM, f"lmdb:{tmp_path}/kv?capacity=64MiB", path=path) as daemon:
        with RawClient(path) as client:
            client.greet()
            os.kill(
                daemon.supervisor_pid if whom == "supervisor" else daemon.server_pid(),
                signal.SIGTERM,
            )
            assert client.heard(Closing)
            assert client.ended()
        assert daemon.process.wait(20) == 0
        assert '{"event":"ended"' in daemon.log.with_name("said").read_text()
    assert [one.name for one in tmp_path.iterdir()] == ["kv"]


ENDS = """
import os, sys
from kvtier.daemon import server
sys.exit(1 if os.path.exists({flag!r}) else server.main())
"""


def test_a_server_that_cannot_start_again_is_tried_until_it_can(tmp_path, supervised, monkeypatch):
    flag = tmp_path / "flag"
    monkeypatch.setattr(Supervisor, "program", ("-c", ENDS.format(flag=str(flag))))
    one = supervised(DRAM, f"lmdb:{tmp_path}/kv?capacity=64MiB")
    one.start()
    flag.touch()
    os.kill(one.server, signal.SIGKILL)
    seen = set()
    until(lambda: seen.add(one.server) or len(seen - {0}) > 2, 60)
    flag.unlink()
    welcome, _ = greeted(one.path)
    assert welcome.generation > 1
    assert welcome.tiers == ("dram", "lmdb")


def test_a_supervisor_with_a_defect_says_so_and_takes_its_server_along(supervised, caplog):
    def fail(started):
        if started.generation > 1:
            raise RuntimeError("a defect")

    one, told = supervised(tell=fail), threading.Event()
    first = one.start(ended=told.set)
    os.kill(first.server, signal.SIGKILL)
    assert told.wait(20)
    assert one.failed
    assert one.server == 0
    assert not one.path.exists()
    assert "the supervisor fails, and its server ends with it" in caplog.text


# ---- one place, one daemon


def refused(*urls, **given) -> str:
    with pytest.raises(RuntimeError) as why, running(*urls, **given):
        pass
    said = str(why.value)
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def test_a_second_daemon_is_told_who_has_the_socket_and_the_directory(tmp_path):
    path, kv = tmp_path / "s", f"lmdb:{tmp_path}/kv?capacity=64MiB"
    with running(DRAM, kv, path=path) as daemon:
        said = refused(DRAM, path=path)
        assert f"{path} is in use by process {daemon.supervisor_pid}; stop it, or choose" in said
        said = refused(DRAM, kv)
        assert f"{tmp_path}/kv is in use by process {daemon.server_pid()}; stop it, or" in said
        assert greeted(path)[0].generation == 1
    with running(DRAM, kv, path=path):
        assert greeted(path)[0].generation == 1


def test_in_one_process_too(supervised):
    supervised().start()
    with pytest.raises(kvtier.ConfigError, match=f"in use by process {os.getpid()}; stop it"):
        supervised()


# ---- the memory


def test_no_client_can_cut_the_arena_or_unseal_it(supervised):
    one = supervised()
    one.start()
    with RawClient(one.path) as client:
        client.greet()
        arena = client.descriptors[0]
        for size in (0, 4096, 64 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(arena, size)
        with mmap.mmap(arena, 8 << 20) as memory:
            memory[:] = b"\xa5" * (8 << 20)  # its own principal's bytes, and nothing else
        assert client.ask(Figures(), Answer)
    assert greeted(one.path)[0].generation == 1


def test_memory_without_seals_is_not_served(supervised, monkeypatch):
    def unsealed(capacity):
        number = os.memfd_create("kvtier-arena", os.MFD_CLOEXEC)
        os.ftruncate(number, capacity)
        return number

    monkeypatch.setattr(supervisors, "sealed_memory", unsealed)
    with pytest.raises(kvtier.ConfigError, match="this memory is not sealed"):
        supervised().start()


def test_more_memory_than_there_is_is_refused_at_once():
    said = refused("dram:900TiB")
    assert "of memory available here; ask for less, or raise the limit (MemoryMax=" in said


# ---- clients that do harm


def test_a_client_that_never_reads_is_dropped_and_others_are_served(supervised):
    one = supervised()
    one.start()
    with RawClient(one.path) as client, RawClient(one.path) as other:
        client.greet()
        other.greet(Hello(b"another session!", "other", "scheduler"))
        frame = encode(Figures(), 1) * 64
        with pytest.raises(ConnectionError):
            for_ever(client.sock.sendall, frame)
        assert other.ask(Figures(), Answer)
    assert greeted(one.path)[0].generation == 1


def test_a_server_that_nobody_could_end_is_not_left_behind(supervised, monkeypatch):
    """Without a descriptor for it: else the next one would have its arena at the same time."""
    one, began, opened = supervised(), [], os.pidfd_open
    spawn = Supervisor._spawn

    def spawned(self, link):
        began.append(spawn(self, link))
        return began[-1]

    def none_left(pid):
        if len(began) == 2 and pid == began[1].pid:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(pid)

    monkeypatch.setattr(Supervisor, "_spawn", spawned)
    monkeypatch.setattr(os, "pidfd_open", none_left)
    first = one.start()
    os.kill(first.server, signal.SIGKILL)
    until(lambda: len(began) == 3 and one.server)
    assert began[1].returncode == -signal.SIGKILL
    assert greeted(one.path)[0].generation > 1
