"""A daemon whose disk fails goes on without it, says so to all who ask, and when it is well."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

import kvtier
from kvtier.cli import serve
from kvtier.daemon.health import Watch
from kvtier.daemon.principals import of_urls
from kvtier.daemon.settings import Ails, Down, Settings, Started
from kvtier.daemon.supervisor import Supervisor
from kvtier.testing.toy import CHUNK, NAMESPACE, Toy, dram, prompt
from kvtier.testing.waiting import until

FAILS = """
import os, sys
import kvtier.tiers.breaker as breaker
from kvtier.daemon import server
from kvtier.storage_backends.slab import FileIO

breaker.REST_SECONDS = 0.1
write = FileIO.pwrite

def pwrite(self, *rest):
    if os.path.exists({flag!r}):
        raise OSError(5, "Input/output error")
    return write(self, *rest)

FileIO.pwrite = pwrite
server.main()
"""


def test_a_disk_that_fails_is_said_to_clients_and_operator_and_so_is_its_return(tmp_path):
    flag, heard = tmp_path / "fails", []

    class Failing(Supervisor):
        program = ("-c", FAILS.format(flag=str(flag)))

    tiers = (dram(64), f"lmdb:{tmp_path}/kv?capacity=64MiB&durability=each")
    one = Failing(Settings(tiers, os.geteuid()), tmp_path / "s", tell=heard.append)
    with contextlib.closing(one):
        one.start(60)
        url = f"unix:{one.path}?patience=5s&timeout=60s"
        with contextlib.closing(Toy(kvtier.open(url, namespace=NAMESPACE))) as toy:
            assert toy.cache.health().status == "ok"
            flag.touch()
            seeds = iter(range(100))

            def saved() -> kvtier.Health:
                seed = next(seeds)
                toy.save(f"save-{seed}", prompt(CHUNK, seed))
                return toy.cache.health()

            until(lambda: saved().status == "degraded", 60)
            why = toy.cache.health().troubles["lmdb"]
            assert why.startswith(f"write: {tmp_path}/kv: a write failed: ")
            assert "Input/output error" in why
            until(lambda: Ails({"lmdb": why}) in heard)
            flag.unlink()
            until(lambda: saved().status == "ok", 60)
            until(lambda: heard[-1] == Ails({}))
            one.close()
            assert toy.cache.health().troubles == {"daemon": f"it does not answer at {one.path}"}


def test_a_server_starts_and_starts_again_without_what_is_away(tmp_path):
    heard, folder, tokens = [], tmp_path / "kv", prompt(2 * CHUNK, 1)
    urls = (
        dram(64),
        f"lmdb:{folder}?capacity=64MiB&durability=each",
        f"valkey://{tmp_path}/nobody?capacity=1MiB",
    )
    one = Supervisor(Settings(urls, os.geteuid()), tmp_path / "s", tell=heard.append)
    with contextlib.closing(one):
        one.start(60)
        url = f"unix:{one.path}?patience=5s&timeout=60s"
        with contextlib.closing(Toy(kvtier.open(url, namespace=NAMESPACE))) as toy:

            def away() -> list[str]:
                return sorted(toy.cache.health().troubles)

            assert away() == ["valkey"]
            toy.save("save", tokens)
            os.kill(one.server, signal.SIGKILL)
            until(lambda: toy.cache.match(tokens).tokens, 60)
            assert away() == ["valkey"]
            folder.rename(tmp_path / "away")
            folder.write_text("in its place")
            os.kill(one.server, signal.SIGKILL)
            until(lambda: away() == ["lmdb", "valkey"], 60)
            assert f"open: {folder}: EEXIST" in toy.cache.health().troubles["lmdb"]
            assert not toy.cache.match(tokens).tokens
            folder.unlink()
            (tmp_path / "away").rename(folder)
            until(lambda: away() == ["valkey"], 60)
            offered, loaded, exact = toy.load("load", tokens)
            assert offered == loaded.tokens > 0
            assert exact
    assert any(isinstance(each, Ails) and "lmdb" in each.troubles for each in heard)
    assert heard.count(Down("the server was ended by signal 9")) == 2


# ---- what is said of it


@pytest.mark.parametrize("listens", [True, False])
def test_a_change_is_told_once_and_again_to_who_did_not_listen(listens, caplog):
    troubles, told = {}, []
    watch = Watch(lambda: dict(troubles), lambda found: told.append(found) or listens)
    watch.turn()
    assert told == []
    troubles["s3"] = "no route to host"
    for _ in range(3):
        watch.turn()
    assert told == [{"s3": "no route to host"}] * (1 if listens else 3)
    assert caplog.text.count("degraded: s3 is left alone: no route to host") == listens


def test_serve_says_each_trouble_once_and_what_is_well(capsys, tmp_path):
    one = of_urls(["dram:8MiB"], tmp_path / "s")
    say = serve._news(one, serve._Teller(as_json=False))
    for news in (
        Started(1, 7, ("dram",)),
        Ails({"lmdb": "it hangs"}),
        Ails({"lmdb": "it hangs", "s3": "no route"}),
        Ails({"s3": "no route"}),
        Down("the server was ended by signal 9"),
        Down("the server ended with status 1; see what it wrote"),
        Started(2, 8, ("dram",)),
        Down("the server hangs, or was stopped; it is killed"),
    ):
        say(news)
    where = f"socket {tmp_path}/s, "
    assert capsys.readouterr().out.splitlines() == [
        f"degraded: {where}tier lmdb, why it hangs",
        f"degraded: {where}tier s3, why no route",
        f"well: {where}tier lmdb",
        f"down: {where}why the server was ended by signal 9",
        f"restarted: {where}server 8, generation 2",
        f"down: {where}why the server hangs, or was stopped; it is killed",
    ]
