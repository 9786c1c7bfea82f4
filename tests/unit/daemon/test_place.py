"""Where a daemon listens: what is taken over, and what is never touched."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

import pytest

import kvtier
from kvtier.daemon.place import (
    MOST_PATH,
    Place,
    check_own,
    check_path,
    rendezvous,
    runtime_folder,
    user_folder,
)
from kvtier.daemon.status import ask_status
from kvtier.daemon.worker import Worker
from kvtier.device.cpu import CpuDevice
from kvtier.testing.toy import GEOMETRY, NAMESPACE

FORKS = "ignore:This process .* is multi-threaded:DeprecationWarning"  # Python 3.12
pytestmark = pytest.mark.filterwarnings(FORKS)


def test_a_live_socket_is_not_taken_though_nobody_holds_its_lock(tmp_path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen(1)
        with pytest.raises(kvtier.ConfigError, match=f"in use by process {os.getpid()}; stop it"):
            Place(tmp_path / "s")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "s"))


def test_a_folder_that_is_a_loop_is_refused_in_a_word(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(kvtier.ConfigError, match="loop cannot be used"):
        Place(tmp_path / "loop" / "s")


def test_without_asking_who_listens_it_would_be(tmp_path, monkeypatch):
    monkeypatch.setattr(Place, "_clear_stale", lambda self: self.path.unlink(missing_ok=True))
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen(1)
        Place(tmp_path / "s").close()


def dying(path) -> socket.socket:
    """Return a socket that still listens though the process that made it has ended."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen(1)
        socket.send_fds(theirs, [b"x"], [listening.fileno()])
        os._exit(0)
    with ours, theirs:
        _, [number], _, _ = socket.recv_fds(ours, 1, 1)
    os.waitpid(child, 0)
    return socket.socket(fileno=number)


def test_a_daemon_that_is_not_quite_gone_is_waited_for(tmp_path, monkeypatch):
    listening = dying(tmp_path / "s")
    waits = []

    def wait(*args) -> None:
        waits.append(args)
        listening.close()

    monkeypatch.setattr("kvtier.daemon.place.select.select", wait)
    Place(tmp_path / "s").close()
    assert len(waits) == 1


def test_but_not_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier.daemon.place._DYING_SECONDS", 0.0)
    with (
        dying(tmp_path / "s"),
        pytest.raises(kvtier.ConfigError, match="in use by"),
    ):
        Place(tmp_path / "s")


def test_a_stale_socket_and_lock_are_taken_over_and_a_file_is_not(tmp_path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
    (tmp_path / "s.lock").write_text("")
    place = Place(tmp_path / "s")
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    place.close()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "s").write_text("mine")
    with pytest.raises(kvtier.ConfigError, match="is no socket; remove it, or choose another"):
        Place(tmp_path / "s")
    assert (tmp_path / "s").read_text() == "mine"


def test_at_its_end_a_daemon_does_not_remove_the_socket_of_another(tmp_path):
    place = Place(tmp_path / "s")
    (tmp_path / "s").unlink()
    (tmp_path / "s").write_text("another's")
    place.close()
    assert (tmp_path / "s").read_text() == "another's"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720])
def test_a_folder_that_others_write_to_is_refused(tmp_path, mode):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(kvtier.ConfigError, match=r"others may put files into .* chmod 700 it"):
        Place(folder / "s")


def test_a_folder_is_made_for_its_user_alone(tmp_path):
    place = Place(tmp_path / "new" / "s")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    place.close()
    assert not (tmp_path / "new").exists()
    with pytest.raises(kvtier.ConfigError, match=r"cannot be used .*make it, or choose another"):
        Place(tmp_path / "no" / "such" / "s")


def test_a_folder_goes_with_who_made_it_alone_and_empty(tmp_path):
    Place(tmp_path / "s").close()
    assert tmp_path.exists()
    place = Place(tmp_path / "new" / "s")
    (tmp_path / "new" / "other").touch()
    place.close()
    assert (tmp_path / "new").exists()
    (tmp_path / "new" / "other").rename(tmp_path / "new" / "s")
    with pytest.raises(kvtier.ConfigError, match="is no socket"):
        Place(tmp_path / "new" / "s")
    assert (tmp_path / "new").exists()


def test_the_lock_keeps_a_second_process_out_before_there_is_a_socket(tmp_path):
    place = Place(tmp_path / "s")
    (tmp_path / "s").unlink()
    child = os.fork()
    if not child:
        status = 1
        try:
            Place(tmp_path / "s")
        except kvtier.ConfigError as error:
            status = 0 if f"in use by process {os.getppid()};" in str(error) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    place.close()


def test_without_the_lock_it_would_come_in(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier.daemon.place.fcntl.lockf", lambda *_: None)
    place = Place(tmp_path / "s")
    (tmp_path / "s").unlink()
    child = os.fork()
    if not child:
        Place(tmp_path / "s")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    place.close()


def test_a_lock_file_that_was_removed_meanwhile_is_no_lock(tmp_path, monkeypatch):
    """A daemon that ends removes its lock file; who had opened it just then locks the next one."""
    real, files = fcntl.lockf, []

    def removed_once(number, how):
        real(number, how)
        files.append(os.fstat(number).st_ino)
        if len(files) == 1:
            (tmp_path / "s.lock").unlink()

    monkeypatch.setattr("kvtier.daemon.place.fcntl.lockf", removed_once)
    place = Place(tmp_path / "s")
    assert len(files) == 2
    assert (tmp_path / "s.lock").stat().st_ino == files[1]
    place.close()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/run/" + "x" * 103, "has 108 bytes, and the system takes 107; choose a shorter one"),
        ("", "'' is no path of a socket"),
        ("a\0b", "is no path of a socket"),
    ],
)
def test_a_path_that_no_socket_can_have_is_refused(path, said):
    with pytest.raises(kvtier.ConfigError) as why:
        check_path(path)
    assert said in str(why.value)


def test_the_longest_path_works():
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
        path = f"{folder}/{'x' * (MOST_PATH - len(folder) - 1)}"
        Place(path).close()
        assert len(path) == MOST_PATH


# ---- the folder of this user's sockets


@pytest.fixture
def short():
    """Return a folder whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
        yield Path(folder)


def test_the_users_own_folder_is_made_for_a_daemon_and_kept_private(short, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    assert runtime_folder() == short / "kvtier"
    assert (short / "kvtier").stat().st_mode & 0o777 == 0o700
    assert rendezvous("an-engine") == short / "kvtier" / "engine-an-engine.sock"
    long, odd = rendezvous("x" * 200), rendezvous("../../etc/passwd")
    assert {one.parent for one in (long, odd)} == {short / "kvtier"}
    assert long != odd
    check_own(str(odd))
    (short / "kvtier").chmod(0o755)
    refuse = pytest.raises(kvtier.ConfigError, match="is no folder of this user's alone; remove it")
    with refuse:
        runtime_folder()
    with refuse:
        check_own(str(odd))
    check_own(str(short / "elsewhere" / "s"))


def test_a_link_in_its_place_is_refused(short, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    (short / "elsewhere").mkdir(0o700)
    (short / "kvtier").symlink_to(short / "elsewhere")
    refuse = pytest.raises(kvtier.ConfigError, match="is no folder of this user's alone")
    with refuse:
        runtime_folder()
    with refuse:
        check_own(str(rendezvous("an-engine")))


def ask_for_status(path):
    ask_status(str(user_folder() / "kv.sock") if path is None else path, 0.1)


def bind_a_rank(path):
    Worker("an-engine", path).bind(GEOMETRY, [], CpuDevice(), timeout=0.1)


def open_a_cache(path):
    url = f"unix:{user_folder() / 'kv.sock' if path is None else path}?timeout=100ms"
    kvtier.open(url, namespace=NAMESPACE)


@pytest.mark.parametrize("client", [ask_for_status, bind_a_rank, open_a_cache])
@pytest.mark.parametrize("where", [None, "no/such/kv.sock", "kv.sock"])
def test_a_client_makes_nothing(short, monkeypatch, client, where):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    path = None if where is None else str(short / where)
    says = rf"no daemon answers at {short}/.*No such file.*start one with `kvtier serve`, or see"
    with pytest.raises(kvtier.ConfigError, match=says):
        client(path)
    assert list(short.iterdir()) == []


@pytest.mark.parametrize("client", [ask_for_status, bind_a_rank, open_a_cache])
def test_a_client_trusts_no_folder_that_others_may_write_to(short, monkeypatch, client):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    runtime_folder().chmod(0o777)
    with pytest.raises(kvtier.ConfigError, match="is no folder of this user's alone"):
        client(None)
    for module in ("link", "status", "worker"):
        monkeypatch.setattr(f"kvtier.daemon.{module}.check_own", lambda _: None)
    with pytest.raises(kvtier.ConfigError, match="no daemon answers at"):  # the twin asks there
        client(None)


def test_a_file_that_is_no_lock_is_not_taken_for_one(tmp_path):
    (tmp_path / "s.lock").write_text("somebody's")
    with pytest.raises(kvtier.ConfigError, match=r"s\.lock is no lock of a daemon's; remove it"):
        Place(tmp_path / "s")
    assert (tmp_path / "s.lock").read_text() == "somebody's"
    (tmp_path / "s.lock").unlink()
    Place(tmp_path / "s").close()


def test_without_a_look_at_it_it_would_be_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier.daemon.place._check_lock", lambda *_: None)
    (tmp_path / "s.lock").write_text("somebody's")
    Place(tmp_path / "s").close()
    assert not (tmp_path / "s.lock").exists()


def test_a_place_that_is_refused_leaves_no_lock(tmp_path):
    (tmp_path / "s").write_text("")
    with pytest.raises(kvtier.ConfigError, match="is no socket"):
        Place(tmp_path / "s")
    assert list(tmp_path.iterdir()) == [tmp_path / "s"]
