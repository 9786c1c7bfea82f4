"""``kvtier status``: what a daemon says of itself to people, scripts and Prometheus."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import urllib.error
import urllib.request

import pytest

import kvtier
from kvtier.cli import listen
from kvtier.cli.main import run
from kvtier.daemon.status import Status
from kvtier.metrics import TABLE
from kvtier.testing.daemon import running
from kvtier.testing.toy import CHUNK, NAMESPACE, Toy, dram, prompt

WITHIN = 20


def said(capsys, *args, status: int = 0) -> str:
    assert run(["status", *args]) == status
    text = capsys.readouterr()
    assert not text.err
    return text.out


def used(path) -> None:
    """Let a client save a prompt, and load it."""
    url = f"unix:{path}?patience=5s&timeout=60s"
    with contextlib.closing(Toy(kvtier.open(url, namespace=NAMESPACE))) as toy:
        tokens = prompt(4 * CHUNK + 1)
        toy.save("a", tokens)
        assert toy.load("b", tokens)[0] == 4 * CHUNK


def test_a_person_a_script_and_prometheus_are_told_the_same(tmp_path, capsys):
    with running(dram(32), "memory:status?capacity=unbounded", path=tmp_path / "s") as daemon:
        used(daemon.path)
        path = str(daemon.path)
        shown = said(capsys, path)
        assert "0 other sessions" in shown
        assert f"of {4 * CHUNK + 1} tokens matched were loaded" in shown
        assert {"dram", "memory"} <= {
            line.split()[0] for line in shown.splitlines() if line.strip()
        }
        told = json.loads(said(capsys, path, "--json"))
        assert told["tiers"] == ["dram", "memory"]
        assert told["troubles"] == {}
        assert told["figures"]['kvtier_hit_tokens_total{tier="dram"}'] == 4 * CHUNK
        lines = said(capsys, path, "--prometheus").splitlines()
        assert f'kvtier_hit_tokens_total{{tier="dram"}} {4 * CHUNK}' in [
            line.removesuffix(".0") for line in lines
        ]
        assert all(line.split("{")[0].split(" ")[0] in TABLE for line in lines if line[0] != "#")


def test_a_tier_that_is_not_served_is_said_and_the_exit_status_is_1(tmp_path, capsys, monkeypatch):
    ails = Status(1, 8 << 20, ("dram", "s3"), {"s3": "EIO: it is [gone]"}, {})
    for module in (kvtier.daemon.status, listen):
        monkeypatch.setattr(module, "ask_status", lambda *_: ails)
    path = str(tmp_path / "s")
    assert "s3 is not served: EIO: it is [gone]" in said(capsys, path, status=1)
    said(capsys, path, "--alive")
    with listening(path) as url:
        assert answered(f"{url}/health") == (503, "application/json")
        assert answered(f"{url}/metrics")[0] == 200
        assert answered(f"{url}/alive?from=here")[0] == 200


@contextlib.contextmanager
def listening(path, host="127.0.0.1"):
    """Serve over HTTP, on a thread."""
    with listen.Listener(host, 0, str(path)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}"
        server.shutdown()
        thread.join(WITHIN)


def answered(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=WITHIN) as found:  # noqa: S310  (our own)
            found.read()
            return found.status, found.headers["Content-Type"].partition(";")[0]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"].partition(";")[0]


def test_prometheus_asks_over_http_and_a_daemon_that_is_gone_is_503(tmp_path, monkeypatch):
    path = tmp_path / "s"
    with listening(path, "::1") as url:
        with running(dram(8), path=path):
            assert answered(f"{url}/metrics") == (200, "text/plain")
            assert answered(f"{url}/health") == (200, "application/json")
            assert answered(f"{url}/other")[0] == 404
        monkeypatch.setattr(listen, "_FRESH_SECONDS", -1.0)
        for each in ("metrics", "health", "alive"):
            assert answered(f"{url}/{each}")[0] == 503


def test_whoever_asks_how_often_the_daemon_is_asked_once_a_second(tmp_path, monkeypatch):
    asked = []
    ails = Status(1, 8 << 20, ("dram",), {}, {})
    monkeypatch.setattr(listen, "ask_status", lambda *_: (asked.append(1), ails)[1])
    monkeypatch.setattr(listen, "_FRESH_SECONDS", WITHIN)
    with listening(tmp_path / "s") as url:
        for _ in range(5):
            assert answered(f"{url}/metrics")[0] == 200
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("error", "told"), [(BrokenPipeError, 0), (TimeoutError, 0), (ArithmeticError, 1)]
)
def test_of_a_client_that_is_gone_nothing_is_said(tmp_path, monkeypatch, capsys, error, told):
    """And the twin: of a mistake here all is."""
    ended, shut = threading.Event(), listen.Listener.shutdown_request

    def gone(*_):
        raise error

    def end(server, request):
        shut(server, request)
        ended.set()

    monkeypatch.setattr(listen._Handler, "_answer", gone)
    monkeypatch.setattr(listen.Listener, "shutdown_request", end)
    with listening(tmp_path / "s") as url:
        with contextlib.suppress(OSError, http.client.HTTPException):
            answered(f"{url}/nothing")
        assert ended.wait(WITHIN)
    assert capsys.readouterr().err.count("Traceback") == told


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["no/such"], "no daemon answers at"),
        (["x", "--json", "--prometheus"], "choose one"),
        (["x", "--listen", "80"], "is no HOST:PORT, such as 127.0.0.1:9477"),
        (["x", "--listen", "127.0.0.1:99999"], "is no HOST:PORT"),
        (["x", "--listen", "no.such.invalid:1"], "cannot listen at"),
        (["daemon:///run/kv.sock"], "no path of a socket, such as /run/kvtier/kv.sock"),
        (["unix:no/such?timeout=1s"], "/no/such within 0.1 s ([Errno 2] No such file or dir"),
        (["x" * 200], "bytes, and the system takes 107"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, monkeypatch, args, words):
    monkeypatch.setattr("kvtier.cli.status._SECONDS", 0.1)
    assert run(["status", *args]) == 2
    text = capsys.readouterr()
    assert not text.out
    assert text.err.count("\n") == 1
    assert words in text.err
