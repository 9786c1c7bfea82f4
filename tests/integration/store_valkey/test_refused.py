"""The Valkey store where it is refused at the door: who may not, and what is no such server."""

from __future__ import annotations

import socket

import pytest

from kvtier.errors import ConfigError
from kvtier.storage_backends.valkey import ValkeyStore
from kvtier.storage_backends.valkey_link import Credentials
from kvtier.testing.bounded import own_clock
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.tiers.store import Status

pytestmark = pytest.mark.server


def cause(location: str, **options) -> str:
    began = own_clock()
    with pytest.raises(ConfigError) as refused:
        ValkeyStore.open(location, None, {"timeout": 0.3, "connect_timeout": 0.3, **options})
    assert own_clock() - began < 3.0
    return str(refused.value)


def test_a_password_comes_from_the_environment_and_is_never_told(own, open_at, monkeypatch):
    server = own(requirepass="hunter2")
    assert "set KVTIER_VALKEY_PASSWORD" in cause(server.location)
    monkeypatch.setenv("KVTIER_VALKEY_PASSWORD", "hunter9")
    said = cause(server.location)
    assert "do not belong together" in said
    assert "hunter9" not in said
    monkeypatch.setenv("KVTIER_VALKEY_PASSWORD", "hunter2")
    record = make_record(1, 1000)
    store = open_at(server)
    assert store.write_many([record]) == [Status.OK]
    assert is_exact(*fetch(store, record.header.id, 1000))
    assert "hunter" not in repr(store.__dict__) + repr(Credentials("u", "hunter2"))


def test_a_user_of_an_acl_needs_the_rights(own, open_at, monkeypatch):
    server = own()
    server.ask(b"ACL", b"SETUSER", b"kv", b"on", b">hunter2", b"~kvtier:*", b"+@all", b"-scan")
    monkeypatch.setenv("KVTIER_VALKEY_USER", "kv")
    monkeypatch.setenv("KVTIER_VALKEY_PASSWORD", "hunter2")
    said = cause(server.location)
    assert "let this user GETRANGE" in said
    assert "hunter2" not in said
    server.ask(b"ACL", b"SETUSER", b"kv", b"+scan", b"-info")
    store = open_at(server)
    assert store.capabilities.self_evicting  # it does not say: so it may
    assert store.write_many([make_record(1, 10)]) == [Status.OK]


@pytest.mark.parametrize(
    "location",
    ["//user:hunter2@host/0", "//:hunter2@host", "//user:hunter2/and/more@host"],
)
def test_a_secret_in_the_url_is_refused_and_not_repeated(location):
    said = cause(location)
    assert "do not belong in a URL" in said
    assert "hunter2" not in said
    with pytest.raises(ConfigError, match="do not belong in a URL"):
        ValkeyStore.open("//host", None, {"password": "hunter2"})


@pytest.mark.parametrize(
    "location",
    [
        "",
        "//",
        "///",
        "host:6379",
        "//host:x",
        "//host:1/x",
        "//host:1/-1",
        "//host:1/99999999",
        "//host:1/0#x",
    ],
)
def test_a_malformed_location_is_refused(location):
    assert "write the tier like valkey://host:6379/0" in cause(location)


@pytest.mark.parametrize("text", ["maybe", "ca.pem"])
def test_malformed_options_are_refused(text):
    with pytest.raises(ConfigError, match="neither no nor yes"):
        ValkeyStore.OPTIONS["tls"].parse(text)
    for timeout in ("0s", "61m"):
        with pytest.raises(ConfigError, match="above zero and at most 1h"):
            ValkeyStore.OPTIONS["timeout"].parse(timeout)


def test_a_database_that_is_not_there(server):
    assert "out of range" in cause(f"{server.location}/99")


def test_nobody_there(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening
        assert "check host and port" in cause(f"//127.0.0.1:{unused.getsockname()[1]}")
    assert "check host and port" in cause(f"//{tmp_path}/no.sock")
    assert "check the name" in cause("//no-such-host.invalid:1")


def test_a_replica_and_a_cluster_are_refused(own):
    primary = own()
    replica = own(replicaof=f"127.0.0.1 {primary.port}")
    assert "name its primary" in cause(replica.location)
    assert "name a server that is alone" in cause(own(cluster_enabled="yes").location)


def test_tls_where_there_is_none(server, tmp_path):
    assert "leave tls= out" in cause(server.location, tls="yes")
    assert "certificates in PEM" in cause(server.location, tls=f"{tmp_path}/absent.pem")
    assert "leave tls= out" in cause(f"//{server.socket}", tls="yes")


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", id="http"),
        pytest.param(b"x" * 10_000, id="a long line"),
        pytest.param(b"$99999999\r\n", id="a large text"),
        pytest.param(b"*99999999\r\n", id="a long list"),
        pytest.param(b"$-5x\r\n", id="no number"),
        pytest.param(b":1\r\n", id="another kind"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_what_is_no_valkey_server_is_refused(scripted, said):
    assert "is it a Valkey or Redis server" in cause(scripted(said).location)


def test_tls_with_an_authority_that_is_named_and_one_that_is_not(tls_door, open_at, server):
    assert "name the authority that signed its certificate" in cause(tls_door.location, tls="yes")
    assert "does it want tls=yes" in cause(tls_door.location)
    store = open_at(server, tls_door.location, tls=str(tls_door.certificate), timeout=10.0)
    records = [make_record(number, size) for number, size in enumerate((1, 5000, 3_000_000))]
    assert store.write_many(records) == [Status.OK] * 3
    assert all(is_exact(*fetch(store, one.header.id, 3_000_000)) for one in records)
    assert store.delete_many([one.header.id for one in records]) == [Status.OK] * 3
