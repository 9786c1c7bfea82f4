"""The daemon of one engine's own: it ends with its process, and a fork takes nothing of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

import kvtier
from kvtier.daemon import supervisor as supervisors
from kvtier.daemon.place import rendezvous
from kvtier.daemon.private import PrivateDaemon
from kvtier.testing.rawclient import RawClient
from kvtier.testing.waiting import lives, until

DRAM = "dram:8MiB"
FORKS = "ignore:This process .* is multi-threaded:DeprecationWarning"  # Python 3.12
pytestmark = pytest.mark.filterwarnings(FORKS)


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """Have sockets in a folder of the test's own."""
    with tempfile.TemporaryDirectory(prefix="kvtier-") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name) / "kvtier"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def generation(path) -> int:
    with RawClient(path) as client:
        return client.greet().generation


def test_it_is_found_by_the_engines_id_and_leaves_nothing(folder):
    with PrivateDaemon(DRAM, engine="one") as daemon, PrivateDaemon(DRAM, engine="two") as other:
        assert daemon.path == rendezvous("one") != other.path
        assert generation(daemon.path) == 1
        with pytest.raises(kvtier.ConfigError, match=f"in use by process {os.getpid()}; .* id$"):
            PrivateDaemon(DRAM, engine="one")
        server = daemon.server
        daemon.close()
        daemon.close()
        assert not lives(server)
        assert generation(other.path) == 1
    assert list(folder.iterdir()) == []


def test_what_it_cannot_be_started_with_is_said_and_nothing_is_left(folder, tmp_path):
    threads, files = threading.active_count(), descriptors()
    with pytest.raises(kvtier.ConfigError, match="did you mean 'lmdb'"):
        PrivateDaemon(DRAM, "lmbd:x?capacity=1GiB", engine="one")
    with pytest.raises(kvtier.ConfigError, match="/proc/no"):
        PrivateDaemon(DRAM, "lmdb:/proc/no?capacity=64MiB", engine="one")
    with pytest.raises(TimeoutError):
        PrivateDaemon(DRAM, engine="one", timeout=0.0)
    assert list(folder.iterdir()) == []
    assert threading.active_count() == threads
    assert descriptors() == files


OWNER = """
import os, sys
from kvtier.daemon.private import PrivateDaemon
daemon = PrivateDaemon(*sys.argv[2:], engine=sys.argv[1])
print(daemon.server, flush=True)
sys.stdin.read()
"""


def owner(*args) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", OWNER, *args]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


CARELESS = "import kvtier.daemon.supervisor as it; it._errors = lambda: None; "


@pytest.mark.parametrize(("before", "nothing"), [("", True), (CARELESS, False)])
def test_nothing_is_printed_into_its_memory_where_stderr_is_closed(before, nothing):
    """And the twin: what the server opens first would get the number, which is its arena."""
    command = [sys.executable, "-c", before + OWNER.strip(), "one", DRAM]
    closing = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    with subprocess.Popen(closing, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        server = int(process.stdout.readline())
        place = os.readlink(f"/proc/{server}/fd/2")  # noqa: PTH115  (of what is no file)
        process.communicate()
    assert (place == os.devnull) is nothing


def test_it_ends_with_a_process_that_is_killed_and_the_next_takes_its_place():
    with owner("one", DRAM) as process:
        server = int(process.stdout.readline())
        process.kill()
    until(lambda: not lives(server))
    with PrivateDaemon(DRAM, engine="one") as daemon:
        assert generation(daemon.path) == 1


def test_what_killed_ones_left_is_cleared_by_the_next_and_live_ones_stay(folder):
    with owner("killed", DRAM) as process, PrivateDaemon(DRAM, engine="mine") as mine:
        server = int(process.stdout.readline())
        process.kill()
        until(lambda: not lives(server))
        assert (folder / "engine-killed.sock").exists()
        with owner("another", DRAM) as other:
            other.stdout.readline()
            with PrivateDaemon(DRAM, engine="next"):
                names = {one.name for one in folder.iterdir() if one.suffix == ".sock"}
                assert names == {f"engine-{name}.sock" for name in ("another", "mine", "next")}
                assert generation(mine.path) == generation(rendezvous("another")) == 1
            other.communicate()
    assert list(folder.iterdir()) == []


def test_it_ends_in_order_with_a_process_that_ends_so(folder, tmp_path):
    with owner("one", DRAM, f"lmdb:{tmp_path}/kv?capacity=64MiB") as process:
        server = int(process.stdout.readline())
        process.communicate()
        assert process.returncode == 0
    assert not lives(server)
    assert list(folder.iterdir()) == []


def test_it_outlives_the_thread_that_asked_for_it():
    made = []
    thread = threading.Thread(target=lambda: made.append(PrivateDaemon(DRAM, engine="one")))
    thread.start()
    thread.join()
    [daemon] = made
    with daemon:
        os.kill(daemon.server, signal.SIGKILL)
        until(lambda: daemon.server)
        assert generation(daemon.path) == 2


def test_a_server_started_by_a_thread_that_ends_would_end_with_it():
    with PrivateDaemon(DRAM, engine="one") as daemon:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made = []
        go = threading.Event()

        def start() -> None:
            made.append(daemon._supervisor._spawn(theirs.fileno()))
            go.wait()

        thread = threading.Thread(target=start)
        thread.start()
        with ours, theirs:
            assert ours.recv(1 << 16), "it serves"
            go.set()
            assert made[0].wait(20) == -signal.SIGKILL


# ---- forks


def in_child(call) -> int:
    """Run something in a forked child; return its exit status."""
    child = os.fork()
    if not child:
        status = 99
        try:
            status = call()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def held() -> int:
    """Return how many descriptors of a daemon's are open here."""
    links = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return sum("kvtier-" in link for link in links)


def test_a_forked_child_holds_nothing_of_it_and_ends_nothing():
    with PrivateDaemon(DRAM, engine="one") as daemon:
        assert held() >= 3

        def child() -> int:
            daemon.close()
            return held()

        assert in_child(child) == 0
        assert generation(daemon.path) == 1
        assert daemon.path.exists()


def test_without_that_a_child_would_keep_the_memory(monkeypatch):
    monkeypatch.setattr(supervisors.Supervisor, "forget", lambda self: None)
    with PrivateDaemon(DRAM, engine="one"):
        assert in_child(held) >= 3


def test_a_forked_child_may_have_a_daemon_of_its_own():
    def child() -> int:
        with PrivateDaemon(DRAM, engine="two") as daemon:
            return generation(daemon.path)

    with PrivateDaemon(DRAM, engine="one"):
        assert in_child(child) == 1
