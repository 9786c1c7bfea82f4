"""``kvtier serve --record``: what all clients of a daemon ask for, as one trace."""

from __future__ import annotations

import functools
import json
import os
import signal
from dataclasses import replace

import pytest

import kvtier
from kvtier.cli.main import run
from kvtier.daemon.principals import of_file
from kvtier.planning.trace import read_trace
from kvtier.testing.daemon import running
from kvtier.testing.toy import CHUNK, NAMESPACE, prompt
from kvtier.testing.waiting import until

OTHER = replace(NAMESPACE, model="another")


def asked(daemon, *prompts, namespace=NAMESPACE) -> list[str]:
    """Let a client match prompts; return its keys."""
    with kvtier.open(daemon.url, namespace=namespace) as cache:
        for tokens in prompts:
            match = cache.match(tokens)
            while match.pending:
                match = cache.match(tokens)
        return [key.hex() for tokens in prompts for key in cache.prefix(tokens).keys]


def recorded(daemon, count: int) -> None:
    with kvtier.open(daemon.url, namespace=NAMESPACE) as cache:
        until(lambda: cache.metrics.get("recorded_requests") == count, 20.0)


def test_the_requests_of_all_clients_are_one_trace(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    first, second = prompt(4 * CHUNK, 1), prompt(5 * CHUNK + 7, 2)
    with running("dram:8MiB", "--record", str(path)) as daemon:
        assert daemon.ready["record"] == str(path)
        keys = asked(daemon, first, second)
        asked(daemon, first[: 2 * CHUNK])
        asked(daemon, first, namespace=OTHER)
    found = read_trace(path, None)
    assert found.block_tokens == CHUNK
    assert [(len(blocks), tokens) for blocks, tokens in found.requests()] == [
        (4, 4 * CHUNK),
        (5, 5 * CHUNK + 7),
        (2, 2 * CHUNK),
        (4, 4 * CHUNK),
    ]
    assert list(found.blocks(2)) == list(found.blocks(0))[:2]
    assert not set(found.blocks(3)) & set(found.blocks(0))  # the models share nothing
    assert not any(key[:8] in path.read_text() for key in keys)
    assert run(["replay", str(path), "--sweep"]) == 0
    assert "4 requests" in capsys.readouterr().out


def test_a_daemon_and_a_library_of_one_salt_name_blocks_alike(tmp_path):
    salt = tmp_path / "salt"
    salt.write_text("0123456789abcdef\n")
    path, own = tmp_path / "r.jsonl", tmp_path / "own.jsonl"
    with running("dram:8MiB", "--record", str(path), "--record-salt", str(salt)) as daemon:
        asked(daemon, prompt(3 * CHUNK, 1))
        with kvtier.open(daemon.url, namespace=NAMESPACE) as cache:
            cache.record(own, salt=b"0123456789abcdef")
            cache.match(prompt(3 * CHUNK, 1))
    lines = [json.loads(one.read_text().splitlines()[0]) for one in (path, own)]
    assert len(lines[0]["hash_ids"]) == 3
    assert all(lines[0][name] == lines[1][name] for name in lines[0] if name != "timestamp")


@pytest.mark.parametrize("counted", [False, True])
def test_what_a_cache_looks_for_itself_is_no_request(tmp_path, counted):
    path = tmp_path / "r.jsonl"
    first, second = prompt(CHUNK, 1), prompt(2 * CHUNK, 2)
    with running("dram:8MiB", "--record", str(path)) as daemon:
        asked(daemon, first)
        with kvtier.open(daemon.url, namespace=NAMESPACE) as cache:
            cache._desk.match(cache.prefix(second), counted=counted)
            there = cache.metrics.get("match_tokens")
    lengths = [CHUNK, 2 * CHUNK] if counted else [CHUNK]
    assert [tokens for _, tokens in read_trace(path, None).requests()] == lengths
    assert there == sum(lengths)


def test_a_server_that_starts_again_goes_on_with_the_recording(tmp_path):
    path = tmp_path / "r.jsonl"
    with running("dram:8MiB", "--record", str(path)) as daemon:
        asked(daemon, prompt(CHUNK, 1))
        recorded(daemon, 1)
        os.kill(daemon.server_pid(), signal.SIGKILL)
        asked(daemon, prompt(2 * CHUNK, 1))
        recorded(daemon, 1)
    found = read_trace(path, None)
    assert [tokens for _, tokens in found.requests()] == [CHUNK, 2 * CHUNK]
    assert list(found.blocks(1))[:1] == list(found.blocks(0))
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_gone_when_a_server_starts_again_costs_lines_alone(tmp_path):
    """Guard: tests/unit/recorder/test_recorder.py, the recorder that is made again."""
    folder = tmp_path / "logs"
    folder.mkdir()
    path = folder / "r.jsonl"
    with running("dram:8MiB", "--record", str(path)) as daemon:
        path.unlink()
        folder.rmdir()
        os.kill(daemon.server_pid(), signal.SIGKILL)
        asked(daemon, prompt(CHUNK, 1))
        with kvtier.open(daemon.url, namespace=NAMESPACE) as cache:
            lost = functools.partial(cache.metrics.get, "unrecorded_requests", reason="failed")
            until(lambda: lost() == 1, 20.0)
        assert f"cannot record into {path} (No such file" in daemon.log.read_text()
        folder.mkdir()
        asked(daemon, prompt(2 * CHUNK, 1))
        recorded(daemon, 1)
    assert [tokens for _, tokens in read_trace(path, None).requests()] == [2 * CHUNK]


def refused(capsys, *args) -> str:
    assert run(["serve", "dram:8MiB", "--socket", "s", *args]) == 2
    error: str = capsys.readouterr().err
    return error


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--record-size", "1GiB"), "record_size of this daemon is of a recording; name its file"),
        (("--record", "r", "--record-size", "1KiB"), "a recording's bytes must be a whole number"),
        (("--record", "r", "--record-size", "big"), "'big' is not a size"),
        (("--record", "r", "--record-salt", "no/such"), "cannot be read from no/such (No such"),
        (("--record", "r", "--record-salt", "empty"), "empty is empty, and no salt"),
        (("--record", "r", "--record-salt", "short"), "a salt of 5 bytes can be guessed"),
        (("--record", "no/such/r"), "(No such file or directory); name another file"),
        (("--record", "."), "(Is a directory); name another file"),
        (("--record", "/dev/full"), "it is no file; name another"),
    ],
)
def test_what_cannot_be_recorded_with_is_refused_at_the_start(
    tmp_path, monkeypatch, capsys, args, says
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("short\n")
    (tmp_path / "empty").write_text("\n")
    assert says in refused(capsys, *args)


TWO = """
[principals.one]
uid = 1
socket = "/run/1"
tiers = ["dram:1MiB"]
record = "/var/1.jsonl"
record_size = "1MiB"
[principals.two]
uid = 2
socket = "/run/2"
tiers = ["dram:1MiB"]
record = "/var/2.jsonl"
"""


def test_each_principal_has_its_recording(tmp_path, capsys):
    file = tmp_path / "kv.toml"
    command = ["serve", "--config", str(file), "--print-config"]
    file.write_text(TWO)
    assert run(command) == 0
    printed = capsys.readouterr().out
    assert 'record = "/var/1.jsonl"\nrecord_size = "1048576B"' in printed
    file.write_text(printed)
    assert run(command) == 0
    assert capsys.readouterr().out == printed
    for text, says in (
        (TWO.replace("/var/2", "/var/1"), "have the same record; give each its own"),
        (f'record = "x"\n{TWO}', "its own tiers, socket and recording; take record away"),
        (TWO.replace('"/var/2.jsonl"', "3"), "record of principal 'two' must be a str, not 3"),
    ):
        file.write_text(text)
        assert run(command) == 2
        assert says in capsys.readouterr().err
    file.write_text(TWO)
    assert run([*command, "--record", "x"]) == 2
    assert "take --record away" in capsys.readouterr().err


def test_a_configuration_that_is_printed_has_the_salt_s_file_and_not_the_salt(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "salt").write_text("0123456789abcdef\n")
    given = ["dram:1MiB", "--socket", "/run/1", "--record", "r", "--record-salt", "salt"]
    assert run(["serve", *given, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert f'record_salt = "{tmp_path}/salt"\n' in printed
    assert "0123456789abcdef" not in printed
    (tmp_path / "kv.toml").write_text(printed)
    (one,) = of_file(tmp_path / "kv.toml", None)
    assert one.settings.record.salt == b"0123456789abcdef"
    assert run(["serve", "--config", "kv.toml", "--print-config"]) == 0
    assert capsys.readouterr().out == printed


def test_options_go_before_the_file_s(tmp_path, capsys):
    file = tmp_path / "kv.toml"
    file.write_text('tiers = ["dram:1MiB"]\nsocket = "/run/1"\nrecord = "/var/1"\n')
    command = ["serve", "--config", str(file), "--print-config"]
    for more, name in (((), "/var/1"), (("--record", "/var/2"), "/var/2")):
        assert run([*command, *more]) == 0
        assert f'record = "{name}"' in capsys.readouterr().out
