"""``kvtier inspect``, ``verify`` and ``purge`` beside a process that has the directory open."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli.main import run
from kvtier.testing.records import NAMESPACE

MIB = 1 << 20
CAPACITY = 24 * MIB

# Writes and deletes until its stdin ends; a word a line says that it goes on.
OWNER = """
import random, sys
from pathlib import Path
from select import select
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.testing.records import make_record
from kvtier.tiers.store import Status
store = LmdbSlabStore(Path(sys.argv[1]), int(sys.argv[2]), durability=sys.argv[3])
choose, mine, number = random.Random(7), [], 0
while True:
    number += 1
    record = make_record(number, choose.choice((3000, 40_000, 40_000, 300_000)))
    if store.write_many([record]) != [Status.OK]:
        store.delete_many([mine.pop(choose.randrange(len(mine))) for _ in range(len(mine) // 2)])
        continue
    mine.append(record.header.id)
    if number % 100 == 0:
        print(number, flush=True)
        if select([sys.stdin], [], [], 0)[0]:
            break
store.close()
"""


@contextlib.contextmanager
def owner(folder: Path, durability: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that churns a directory."""
    command = [sys.executable, "-c", OWNER, str(folder), str(CAPACITY), durability]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.stdin.close()
            while process.stdout.readline():
                pass
            assert process.wait(30) == 0


def asked(capsys, *args: object, status: int = 0) -> dict:
    assert run([str(arg) for arg in (*args, "--json")]) == status
    said = capsys.readouterr()
    assert said.err == ""
    return json.loads(said.out)


@pytest.mark.parametrize("durability", ["none", "batch", "each"])
def test_a_directory_is_looked_at_while_it_is_churned(capsys, tmp_path, durability) -> None:
    folder = tmp_path / "kv"
    records = changed = 0
    with owner(folder, durability) as process:
        process.stdout.readline()
        for _ in range(8):
            process.stdout.readline()
            found = asked(capsys, "inspect", folder)
            assert found["holder"] == str(process.pid)
            assert (found["durability"], found["capacity"]) == (durability, CAPACITY)
            assert found["charged_bytes"] <= CAPACITY
            records = max(records, found["records"])
            verdict = asked(capsys, "verify", folder)
            assert (verdict["damage"], verdict["torn"]) == ([], [])
            assert verdict["holder"] == str(process.pid)
            changed += verdict["changed"]
        for args in (["verify", "--repair"], ["purge", "--namespace", NAMESPACE.hex()]):
            assert run([args[0], str(folder), *args[1:]]) == 2
            assert f"is in use by process {process.pid}, and cannot" in capsys.readouterr().err
    assert records > 50
    assert asked(capsys, "inspect", folder)["holder"] is None
    whole = asked(capsys, "verify", folder, "--repair")
    assert (whole["whole"], whole["removed"], whole["changed"]) == (True, 0, 0)
    left = asked(capsys, "purge", folder, "--namespace", NAMESPACE.hex())["removed"]
    assert left == whole["checked"] > 0
    assert asked(capsys, "inspect", folder)["records"] == 0


def test_the_progress_is_shown_on_a_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with owner(folder, "each") as process:
        process.stdout.readline()
    shown = in_a_terminal([sys.executable, "-m", "kvtier", "verify", str(folder)])
    assert "verifying" in shown or "reading the index" in shown
    assert "records are right" in shown


def in_a_terminal(command: list[str]) -> str:
    """Run a command whose stderr is a terminal; return what it wrote."""
    import os
    import pty

    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=slave, env=environment
    ) as process:
        os.close(slave)
        said = b""
        with contextlib.suppress(OSError):  # the end of a terminal is an error
            while more := os.read(master, 4096):
                said += more
        os.close(master)
        said += process.stdout.read()
    assert process.returncode == 0
    return said.decode()
