"""``kvtier inspect``, ``verify`` and ``purge``: what they refuse, what they tell, how they exit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import medium
from kvtier.cli.main import run
from kvtier.storage_backends.lmdb_slab import LmdbSlabStore
from kvtier.testing.records import NAMESPACE, make_record
from kvtier.tiers.store import Status

MIB = 1 << 20
DIGEST = ["--namespace", NAMESPACE.hex()]


def refused(capsys, *args: object) -> str:
    assert run([str(arg) for arg in args]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    return said.err


def told(capsys, *args: object, status: int = 0) -> str:
    assert run([str(arg) for arg in args]) == status
    said = capsys.readouterr()
    assert said.err == ""  # no progress where stderr is no terminal
    return said.out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a closed tier's directory with 25 records."""
    where = tmp_path / "kv"
    store = LmdbSlabStore(where, 64 * MIB)
    records = [make_record(number, 50_000) for number in range(25)]
    assert set(store.write_many(records)) == {Status.OK}
    store.close()
    return where


def spoil(folder: Path, count: int) -> None:
    """Flip a bit in each of some slots."""
    left = count
    for path in folder.glob("*.seg"):
        data = bytearray(path.read_bytes())
        for at in range(0, len(data), 57_344):
            if left and data[at : at + 8] == b"KVTIERrc":
                data[at + 5000] ^= 1
                left -= 1
        path.write_bytes(data)
    assert not left


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["inspect"], "Missing argument 'DIRECTORY'"),
        (["inspect", ""], "directory is empty"),
        (["inspect", "no/such"], "no/such does not exist; name the directory of an lmdb tier"),
        (["inspect", "a\0b"], "names no directory that can be used"),
        (["inspect", "/proc"], "/proc holds no lmdb tier: it has no file named format"),
        (["inspect", "x", "--jsno"], "did you mean '--json'?"),
        (["verify", "no/such"], "does not exist"),
        (["verify", "no/such", "--repair"], "does not exist"),
        (["verify", "/proc", "--repair"], "holds no lmdb tier"),
        (["verify", "x", "--repiar"], "did you mean '--repair'?"),
        (["purge", "x"], "Missing option '--namespace'"),
        (["purge", "no/such", *DIGEST], "does not exist"),
        (["purge", "x", "--namespace", "acme"], "'acme' is no namespace's digest"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, args, said) -> None:
    assert said in refused(capsys, *args)
    assert not Path("no/such").exists()


def test_another_version_is_refused_by_all(capsys, folder: Path) -> None:
    (folder / "format").write_bytes(b"kvtier slab store, format 9\n")
    for args in (["inspect"], ["verify"], ["verify", "--repair"], ["purge", *DIGEST]):
        said = refused(capsys, args[0], folder, *args[1:])
        assert "has format 9, and this kvtier knows only 2; use the kvtier that wrote it" in said


def test_inspect_tells_it_within_80_columns(capsys, folder: Path) -> None:
    said = told(capsys, "inspect", folder)
    for words in (
        f"{folder}: closed",
        "format 2, durability batch",
        "of 64 MiB taken (",
        "25 records, 1.192 MiB",
        NAMESPACE.hex()[:8],
        "12/24",
        "56 KiB",
    ):
        assert words in said
    tables = said.splitlines()[4:]
    assert max(map(len, tables)) <= 80
    assert "…" not in said


def test_inspect_as_json(capsys, folder: Path) -> None:
    found = json.loads(told(capsys, "inspect", folder, "--json"))
    assert (found["records"], found["holder"], found["capacity"]) == (25, None, 64 * MIB)
    assert found["namespaces"][0]["namespace"] == NAMESPACE.hex()
    assert found["namespaces"][0]["age_s"]["most"] < 3600
    assert found["classes"][0]["used_slots"] == 25


def test_a_damaged_index_is_one_line(capsys, folder: Path) -> None:
    (folder / "index.lmdb").write_bytes(b"\xff" * 100_000)
    said = refused(capsys, "inspect", folder)
    assert f"is damaged (invalid); look at it with: kvtier verify {folder}" in said
    assert "the index is invalid" in told(capsys, "verify", folder, status=1)
    assert "written anew" in told(capsys, "verify", folder, "--repair")


def test_verify_exits_by_what_it_found(capsys, folder: Path) -> None:
    assert "25 records are right, 1.192 MiB in " in told(capsys, "verify", folder)
    spoil(folder, 3)
    said = told(capsys, "verify", folder, status=1)
    assert "22 records are right" in said
    assert "3 records are wrong: payload 3" in said
    assert said.count("the stored bytes fail their checksum") == 3
    assert f"remove what is wrong with: kvtier verify {folder} --repair" in said
    assert "3 records were removed" in told(capsys, "verify", folder, "--repair")
    assert "22 records are right" in told(capsys, "verify", folder)


def test_much_damage_is_cut_in_words_and_whole_in_json(capsys, folder: Path) -> None:
    spoil(folder, 23)
    said = told(capsys, "verify", folder, status=1)
    assert said.count("fail their checksum") == 20
    assert "and 3 more; --json has all" in said
    verdict = json.loads(told(capsys, "verify", folder, "--json", status=1))
    assert len(verdict["damage"]) == 23
    assert verdict["damage"][0]["reason"] == "payload"
    assert (verdict["whole"], verdict["checked"]) == (False, 2)


def test_purge_says_what_went(capsys, folder: Path) -> None:
    said = told(capsys, "purge", folder, "--namespace", NAMESPACE.hex()[:8])
    assert said == f"25 records of namespace {NAMESPACE.hex()}, 1.192 MiB, were removed\n"
    purged = json.loads(told(capsys, "purge", folder, *DIGEST, "--json"))
    assert (purged["removed"], purged["namespace"]) == (0, NAMESPACE.hex())


@pytest.mark.parametrize("command", ["inspect", "verify", "purge"])
def test_help_is_there(capsys, command: str) -> None:
    assert f"Usage: kvtier {command}" in told(capsys, command, "--help")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "0 s"), (59.4, "59 s"), (60, "1 min"), (5400, "1.5 h"), (86_400 * 12.34, "12.3 d")],
)
def test_ages_are_short(seconds: float, said: str) -> None:
    assert medium.age(seconds) == said


def test_a_stranger_under_that_name_is_refused(capsys, monkeypatch: Any) -> None:
    monkeypatch.setattr(medium, "load_store", lambda entry: dict)
    assert "cannot be looked at from outside" in refused(capsys, "inspect", "x")
    monkeypatch.setattr(medium, "store_types", dict)
    assert "has no lmdb tier" in refused(capsys, "verify", "x")
