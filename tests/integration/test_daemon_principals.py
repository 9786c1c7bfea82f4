"""One daemon for several users: each has its own, and none can touch another's."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import kvtier
from kvtier.daemon.answers import Answer
from kvtier.daemon.messages import Figures
from kvtier.daemon.place import Place
from kvtier.testing.daemon import children, running
from kvtier.testing.rawclient import RawClient, greeted
from kvtier.testing.waiting import until

AS_USER = """
import os, sys
from kvtier.testing.rawclient import RawClient, hello
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
try:
    with RawClient(sys.argv[2]) as client:
        pidfd = os.pidfd_open(os.getpid())
        client.say(hello(), 1, passing=pidfd)
        print(client.read()[0])
        print(client.ended() if len(sys.argv) > 3 else "")
except OSError as error:
    print(error.strerror)
"""


def as_user(uid, path, *more) -> str:
    command = [sys.executable, "-c", AS_USER, str(uid), str(path), *more]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def passable(tmp_path):
    """Return a folder that others may pass through."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


USERS = {"one": 64_001, "two": 64_002}


def in_folders_of_their_own(folder):
    for name, uid in USERS.items():
        (folder / name).mkdir(0o700)
        os.chown(folder / name, uid, -1)
    return {name: folder / name / "s" for name in USERS}


def in_folders_that_are_made(folder):
    return {name: folder / name / "s" for name in USERS}


def in_one_of_roots(folder):
    (folder / "run").mkdir(0o755)
    return {name: folder / "run" / f"{name}.sock" for name in USERS}


PLACES = [in_folders_of_their_own, in_folders_that_are_made, in_one_of_roots]


@contextlib.contextmanager
def principals(folder, paths):
    """Run one daemon for two users, until both of them are served."""
    text = "".join(
        f'[principals.{name}]\nuid = {uid}\nsocket = "{paths[name]}"\n'
        f'tiers = ["dram:{4 + number}MiB"]\n'
        for number, (name, uid) in enumerate(USERS.items())
    )
    (folder / "kvtier.toml").write_text(text)
    with running(config=folder / "kvtier.toml") as daemon:
        said = daemon.log.with_name("said")
        until(lambda: said.read_text().count('"event":"ready"') == 2, 20.0)
        yield daemon
    assert not any(path.exists() for path in paths.values())


@needs_root
@pytest.mark.parametrize("place", PLACES, ids=lambda one: one.__name__)
def test_each_principal_has_its_own_socket_arena_and_server(passable, place):
    paths = place(passable)
    with principals(passable, paths) as daemon:
        assert len(children(daemon.supervisor_pid)) == 2
        for name, uid in USERS.items():
            found = paths[name].stat()
            assert (found.st_uid, found.st_mode & 0o777) == (uid, 0o600)
            assert "Welcome(generation=1" in as_user(uid, paths[name])
            other = next(one for one in USERS.values() if one != uid)
            assert as_user(other, paths[name]) == "Permission denied\n"
        found = [greeted(path) for path in paths.values()]
        assert [welcome.nbytes >> 20 for welcome, _ in found] == [4, 5]
        assert len({inode for _, inode in found}) == 2


@needs_root
def test_a_folder_that_is_another_users_is_to_be_roots(passable):
    paths = in_folders_of_their_own(passable)
    with pytest.raises(
        kvtier.ConfigError, match=f"give it to root, not user {USERS['one']}, or choose"
    ):
        Place(paths["one"].with_name("t"), USERS["two"])
    os.chown(paths["one"].parent, 0, -1)
    Place(paths["one"].with_name("t"), USERS["two"]).close()


@needs_root
def test_whoever_comes_to_anothers_socket_all_the_same_is_told_and_closed(passable):
    paths = in_one_of_roots(passable)
    with principals(passable, paths):
        paths["one"].chmod(0o666)
        said = as_user(USERS["two"], paths["one"], "ended")
        assert "this socket is not for the user 64002; connect to that of" in said
        assert said.endswith("True\n")


@needs_root
def test_what_is_done_to_one_principals_daemon_the_others_does_not_notice(passable):
    paths = in_one_of_roots(passable)
    with principals(passable, paths) as daemon, RawClient(paths["two"]) as client:
        client.greet()
        with RawClient(paths["one"]) as bad:
            bad.sock.sendall(b"garbage" * 1000)
            assert bad.ended()
        restarted = daemon.log.with_name("said")
        first = json.loads(restarted.read_text().splitlines()[0])
        assert first["principal"] == "one"
        os.kill(first["server"], signal.SIGKILL)
        until(lambda: '"event":"restarted"' in restarted.read_text(), 20.0)
        assert client.ask(Figures(), Answer)
        assert [greeted(path)[0].generation for path in paths.values()] == [2, 1]


@needs_root
def test_a_link_in_a_users_folder_fools_nobody(passable):
    """Where a user puts files, nothing is made or locked with root's rights."""
    (passable / "one").mkdir(0o700)
    os.chown(passable / "one", USERS["one"], -1)
    target = passable / "roots"
    (passable / "one" / "s.lock").symlink_to(target)
    with pytest.raises(kvtier.ConfigError, match="cannot write"):
        Place(passable / "one" / "s", USERS["one"])
    (passable / "one" / "s.lock").unlink()
    place = Place(passable / "one" / "s", USERS["one"])
    assert (passable / "one" / "s.lock").stat().st_uid == USERS["one"]
    place.close()
    assert not target.exists()


@needs_root
def test_otherwise_root_would_write_there(passable, monkeypatch):
    (passable / "one").mkdir(0o700)
    os.chown(passable / "one", USERS["one"], -1)
    monkeypatch.setattr(Place, "_others_write", lambda self: False)
    place = Place(passable / "one" / "s", USERS["one"])
    assert (passable / "one" / "s.lock").stat().st_uid == 0
    place.close()
