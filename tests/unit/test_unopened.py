"""A tier whose Store cannot be opened yet: it is there, says why, and is opened when that works."""

from __future__ import annotations

import contextlib
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

import kvtier
from kvtier import opening
from kvtier.catalog import spill
from kvtier.clock import monotonic
from kvtier.config import Config, TierConfig, load_store, store_types
from kvtier.depot import Depot
from kvtier.errors import ConfigError, Unavailable, Unreachable
from kvtier.identity.record import PartName, record_id
from kvtier.seams import ThreadFlow
from kvtier.storage_backends.memory import MemoryStore
from kvtier.storage_backends.s3_errors import unreached as s3_unreached
from kvtier.storage_backends.valkey_link import RefusedError
from kvtier.storage_backends.valkey_service import unreached as valkey_unreached
from kvtier.testing.small_daemon import SmallDaemon
from kvtier.testing.small_daemon import prompt as keys_of
from kvtier.testing.toy import CHUNK, NAMESPACE, Toy, prompt
from kvtier.testing.waiting import until
from kvtier.tiers.store import Capabilities
from kvtier.tiers.unopened import UnopenedStore

URL = "shy://there"


class Shy(MemoryStore):
    """A Store whose medium may be away when it is opened. What it holds, it forgets at closing."""

    PROMISES: ClassVar[Capabilities] = Capabilities(shared=True)
    error: ClassVar[Exception | None] = None
    opening: ClassVar[threading.Event] = threading.Event()
    may_open: ClassVar[threading.Event] = threading.Event()
    alive: ClassVar[list[Shy]] = []

    @classmethod
    def open(cls, location, capacity, options):
        cls.opening.set()
        assert cls.may_open.wait(30)
        if cls.error is not None:
            raise cls.error
        cls.alive.append(store := super().open(location, capacity, options))
        return store

    @property
    def capabilities(self):
        return self.PROMISES

    @staticmethod
    def footprint(stored_bytes):
        return stored_bytes + 100

    def close(self):
        super().close()
        if self in self.alive:
            self.alive.remove(self)


@pytest.fixture(autouse=True)
def shy(monkeypatch):
    """Let the scheme ``memory`` be a Shy, which is tried again without delay."""
    monkeypatch.setattr(opening, "load_store", lambda _: Shy)
    monkeypatch.setattr(opening, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(Shy, "error", Unreachable(f"cannot use {URL}: no route to host"))
    Shy.may_open.set()
    yield
    assert Shy.alive == []


def config(capacity: int | None = None, **options) -> Config:
    return Config(1 << 20, (TierConfig("memory", "there", capacity, "through", **options),))


@contextlib.contextmanager
def opened(config: Config):
    with contextlib.closing(Toy(kvtier.open(config, namespace=NAMESPACE))) as toy:
        yield toy


def hits_below(toy: Toy, tokens) -> int:
    """Return what the tier below DRAM has of a prompt."""
    toy.cache.clear("dram")
    return toy.cache.match(tokens).tokens


# ---- opening


def test_what_does_not_answer_is_a_tier_that_says_why_and_comes_back(caplog):
    with opened(config()) as toy:
        why = f"open: cannot use {URL}: no route to host"
        assert toy.cache.health().troubles == {"memory": why}
        toy.save("a", prompt(2 * CHUNK, 1))
        assert toy.cache.match(prompt(2 * CHUNK, 1)).tokens
        assert hits_below(toy, prompt(2 * CHUNK, 1)) == 0
        until(lambda: toy.cache.figures()['kvtier_tier_errors_total{tier="memory"}'] > 3)
        Shy.error = None
        until(lambda: toy.cache.health().status == "ok")
        toy.save("b", prompt(2 * CHUNK, 2))
        assert hits_below(toy, prompt(2 * CHUNK, 2))
        assert Shy.alive == [inside(toy).store]
    assert caplog.text.count(f"memory: cannot use {URL}: no route to host") == 1


def test_what_is_wrong_is_said_at_once():
    Shy.error = ConfigError("there is no such bucket; make one")
    with pytest.raises(ConfigError, match="no such bucket"):
        kvtier.open(config(), namespace=NAMESPACE)


def test_what_is_wrong_only_when_it_answers_stays_said():
    """The checks that opening makes are made then, and what they find may be mended, too."""
    with opened(config()) as toy:
        Shy.error = ConfigError("there is no such bucket; make one")
        until(lambda: toy.cache.health().troubles == {"memory": f"open: {Shy.error}"})
        Shy.error = SystemExit("whatever a plug-in raises")
        until(lambda: toy.cache.health().troubles == {"memory": f"open: {Shy.error}"})
        Shy.error = None
        until(lambda: toy.cache.health().status == "ok")


def test_a_store_of_which_nothing_is_known_beforehand_is_an_error(monkeypatch):
    monkeypatch.delattr(Shy, "PROMISES")
    with pytest.raises(Unreachable):
        kvtier.open(config(), namespace=NAMESPACE)


def test_it_needs_room_for_a_chunk_as_if_it_were_open():
    with pytest.raises(ConfigError, match="memory capacity 1 KiB is below one chunk"):
        kvtier.open(config(1024), namespace=NAMESPACE)


def test_a_purge_says_that_it_was_not_listed():
    with opened(config()) as toy:
        assert toy.cache.purge(timeout=10).unlisted == ("memory",)
        Shy.error = None
        until(lambda: toy.cache.health().status == "ok")
        assert toy.cache.purge(timeout=10).unlisted == ()


def test_its_codec_is_that_of_the_tier():
    with opened(config(codec="lossless")) as toy:
        coding = inside(toy).coding
        Shy.error = None
        until(lambda: toy.cache.health().status == "ok")
        assert inside(toy).coding is coding is not None


def test_what_opens_after_the_end_is_closed():
    with opened(config()):
        Shy.error = None
        Shy.may_open.clear()
        Shy.opening.clear()
        assert Shy.opening.wait(10)
        closing = threading.Timer(0.05, Shy.may_open.set)
        closing.start()
    closing.join()
    until(lambda: Shy.alive == [])


def test_it_fails_whatever_it_is_asked_and_closes_what_came_too_late():
    store = UnopenedStore(Shy, lambda: Shy("x", None), "no route to host")
    assert store.footprint(10) == 110
    with pytest.raises(Unavailable, match="no route"):
        store.scan()
    with pytest.raises(ConfigError):
        UnopenedStore.open("x", None, {})
    store.close()
    late, _ = store.again(lambda _: None)
    assert late not in Shy.alive


def inside(toy: Toy):
    """Return the tier below DRAM."""
    return toy.cache._desk.depot.tiers[1]


# ---- opened before, and not now


def lmdb(path: Path) -> Config:
    return Config(1 << 20, (TierConfig("lmdb", str(path), 4 << 20, "through"),))


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Return a tier's directory with three chunks of prompts "a" and "b", which is away."""
    monkeypatch.undo()
    monkeypatch.setattr(opening, "AGAIN_SECONDS", 0.01)
    path = tmp_path / "kv"
    daemon = SmallDaemon(16, f"lmdb:{path}?capacity=4MiB")
    client = daemon.client(1)
    client.join()
    for text in "ab":
        plan, _ = client.reserve(text, 3)
        client.settle(plan)
    assert daemon.depot.flush(20)
    daemon.close()
    path.rename(tmp_path / "away")
    path.write_text("in its place")
    return path


def back(path: Path) -> None:
    path.unlink()
    shutil.move(path.parent / "away", path)


@pytest.mark.parametrize("listed", [True, False])
def test_a_directory_that_was_there_is_indexed_when_it_is_back(directory, monkeypatch, listed):
    """What was withdrawn meanwhile stays so; the twin, in which nobody keeps that, has it again."""
    depots = reopened(monkeypatch)
    daemon = SmallDaemon(16, f"lmdb:{directory}?capacity=4MiB")
    try:
        assert depots[0].troubles()["lmdb"].startswith(f"open: {directory}: EEXIST")
        client = daemon.client(1)
        client.join()
        assert client.match("a", 3) == 0
        if not listed:
            depots[0].catalog.lists(1)
        gone = depots[0].catalog.withdraw([name for (name,) in names("b", 3)], "invalidated")
        assert gone == (0, 3 if listed else 0)
        back(directory)
        until(lambda: depots[0].troubles() == {})
        assert client.match("a", 3) == 3
        assert client.match("b", 3) == (0 if listed else 3)
        until(lambda: len(depots[0].moves.strays[1]) == 0)
    finally:
        daemon.close()


@pytest.mark.parametrize("guarded", [True, False])
def test_what_is_saved_again_meanwhile_is_kept_where_it_was(directory, monkeypatch, guarded):
    """The twin, in which it is spilled to what is not open, has the sound records deleted."""
    depots = reopened(monkeypatch)
    if not guarded:
        monkeypatch.setattr(spill, "UnopenedStore", type(None))
    daemon = SmallDaemon(16, f"lmdb:{directory}?capacity=4MiB")
    try:
        client = daemon.client(1)
        client.join()
        plan, _ = client.reserve("a", 3)
        client.settle(plan)
        (depot,) = depots
        assert depot.flush(20)
        assert depot.metrics.get("dropped_spills", tier="lmdb", reason="failed") == 3
        assert len(depot.moves.strays[1]) == (0 if guarded else 3)
        back(directory)
        until(lambda: depot.troubles() == {})
        assert depot.flush(20)
        assert len(depot.catalog._shelves[1].order) == (6 if guarded else 3)
        assert len(list(depot.tiers[1].store.scan())) == (6 if guarded else 3)
    finally:
        daemon.close()


def reopened(monkeypatch) -> list[Depot]:
    """Let Depots be opened as those of a daemon that starts again; return what is opened."""
    depots: list[Depot] = []

    def again(config, clock, flow, arena=None):
        depots.append(Depot(config, None, None, clock, flow, arena, again=True))
        return depots[-1]

    monkeypatch.setattr(Depot, "open", again)
    return depots


def names(text, count):
    """Return the names of the parts of a prompt's chunks."""
    keys = keys_of(text, count).keys
    return [(record_id(keys[at : at + 32], PartName()),) for at in range(0, 32 * count, 32)]


def test_the_first_time_it_is_an_error(directory):
    with pytest.raises(ConfigError, match="EEXIST"):
        Depot.open(lmdb(directory), monotonic, ThreadFlow())


@pytest.mark.parametrize("scheme", ["lmdb", "files", "s3", "valkey", "mooncake"])
def test_what_is_promised_beforehand_is_kept(scheme, tmp_path):
    kind = load_store(store_types()[scheme])
    assert kind.footprint(10_000) > 10_000
    assert kind.PROMISES.shared == (scheme != "lmdb")
    if scheme in ("lmdb", "files"):
        with contextlib.closing(kind.open(str(tmp_path / "kv"), 4 << 20, {})) as store:
            assert replace(store.capabilities, bounded=kind.PROMISES.bounded) == kind.PROMISES


# ---- which errors are nobody's answer


def test_which_errors_of_s3_are_nobodys_answer():
    from botocore import exceptions as boto

    def said(code: str, status: int) -> boto.ClientError:
        meta = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        return boto.ClientError(meta, "ListObjectsV2")  # type: ignore[arg-type]

    where = {"endpoint_url": "http://s3", "error": "gone"}
    for error in (
        boto.EndpointConnectionError(**where),
        boto.ConnectTimeoutError(**where),
        boto.ReadTimeoutError(**where),
        boto.ConnectionClosedError(**where),
        boto.ProxyConnectionError(proxy_url="http://p", error="gone"),
        said("InternalError", 500),
        said("", 502),
        said("SlowDown", 503),
        said("429", 429),
    ):
        assert s3_unreached(error), error
    for error in (
        said("NoSuchBucket", 404),
        said("AccessDenied", 403),
        said("RequestTimeTooSkewed", 403),
        said("PermanentRedirect", 301),
        boto.NoCredentialsError(),
        boto.SSLError(**where),
        ValueError("Invalid endpoint"),
    ):
        assert not s3_unreached(error), error


def test_which_errors_of_valkey_are_nobodys_answer():
    import socket
    import ssl

    for error in (
        ConnectionRefusedError(),
        TimeoutError(),
        socket.gaierror(),
        FileNotFoundError(),
        RefusedError("LOADING it reads its data"),
    ):
        assert valkey_unreached(error), error
    for error in (RefusedError("NOAUTH it asks"), ssl.SSLError(), PermissionError()):
        assert not valkey_unreached(error), error
