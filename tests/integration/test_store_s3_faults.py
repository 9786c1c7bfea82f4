"""The S3 store where it is refused at the door, and behind a proxy that breaks answers."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from kvtier.clock import monotonic
from kvtier.deadline import Deadline, under
from kvtier.errors import ConfigError, Unavailable
from kvtier.storage_backends.s3 import S3Store
from kvtier.testing.proxy import DelayProxy, Fault
from kvtier.testing.records import make_record
from kvtier.tiers.store import Status, Write

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("s3_credentials")]

CONNECT, READ = 0.3, 0.5
ATTEMPTS, BACKOFF = 2, 1.0
DEADLINE = ATTEMPTS * (CONNECT + READ) + BACKOFF + 0.5  # of one request that nobody answers
MIB = 1 << 20
TWO_RANGES = 7 * MIB


def statuses(store: S3Store, *records: Write) -> list[Status]:
    buffers = [memoryview(bytearray(len(each.data))) for each in records]
    names = [each.header.id for each in records]
    return [each.status for each in store.read_many(names, buffers)]


@pytest.fixture
def proxy(s3_server):
    with DelayProxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def store(s3_open, proxy) -> S3Store:
    """Return a store behind the proxy that does not wait long."""
    return s3_open(endpoint=proxy.endpoint, connect_timeout=CONNECT, read_timeout=READ)


# ----------------------------------------------------------------------------- what is refused


def cause(endpoint: str | None, location: str, **options) -> str:
    where = {} if endpoint is None else {"endpoint": endpoint}
    timeouts = {"connect_timeout": CONNECT, "read_timeout": READ}
    began = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        S3Store.open(location, None, {**where, **timeouts, **options})
    assert time.monotonic() - began < DEADLINE
    return str(refused.value)


def test_a_missing_bucket(s3_server):
    assert "create the bucket" in cause(s3_server.endpoint, "//no-such-bucket/x")


def test_a_wrong_secret(s3_server, s3_location, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-secret")
    said = cause(s3_server.endpoint, s3_location)
    assert "the secret key does not belong to the access key" in said
    assert "wrong-and-secret" not in said


def test_an_unknown_access_key(s3_server, s3_location, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    assert "the access key is not known" in cause(s3_server.endpoint, s3_location)


def test_no_credentials(s3_server, s3_location, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "set AWS_ACCESS_KEY_ID" in cause(s3_server.endpoint, s3_location)


def test_an_unreachable_endpoint(s3_location):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert f"check {endpoint}" in cause(endpoint, s3_location)


def test_an_endpoint_that_never_answers(proxy, s3_location):
    proxy.inject(Fault.HANG)
    assert "can reach it" in cause(proxy.endpoint, s3_location)


def test_a_malformed_region(s3_location):
    assert "name a region" in cause(None, s3_location, region="not a region")


@pytest.mark.parametrize(
    ("location", "options"),
    [
        ("//user:hunter2@bucket/prefix", {}),
        ("//user:hunter2/and/more@bucket/prefix", {}),
        ("//bucket/prefix", {"secret_key": "hunter2"}),
        ("//bucket/prefix", {"aws_access_key_id": "hunter2"}),
    ],
)
def test_a_secret_in_the_url_is_refused_and_not_repeated(location, options):
    with pytest.raises(ConfigError, match="do not belong in a URL") as refused:
        S3Store.open(location, None, options)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "location",
    ["bucket/prefix", "//", "///prefix", "//B/x", "//b/x", "//bucket/a?b", "//b--usw2-az1--x-s3/a"],
)
def test_a_malformed_location_is_refused(location):
    with pytest.raises(ConfigError):
        S3Store.open(location, None, {})


@pytest.mark.parametrize("text", ["https://u:hunter2@host", "u:hunter2@host"])
def test_a_secret_in_the_endpoint_is_refused_and_not_repeated(text):
    with pytest.raises(ConfigError, match="do not belong in a URL") as refused:
        S3Store.OPTIONS["endpoint"].parse(text)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["host:80", "ftp://host", "https://", "https://h:x", "http://[::1", "https://host/path"]
)
def test_a_malformed_endpoint_is_refused(text):
    with pytest.raises(ConfigError, match="write it like"):
        S3Store.OPTIONS["endpoint"].parse(text)


@pytest.mark.parametrize(("endpoint", "signed"), [("https", False), ("http", True)])
def test_the_payload_is_unsigned_over_tls_only(monkeypatch, endpoint, signed):
    from kvtier.storage_backends.s3_service import Settings, connect

    for settings in (
        Settings("", f"{endpoint}://localhost:9", "", 1.0, 1.0),
        Settings("", "", "", 1.0, 1.0),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"{endpoint}://localhost:9")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        client = connect(settings)
        assert client.meta.config.s3["payload_signing_enabled"] is signed
        client.close()


def test_importing_kvtier_does_not_import_boto3(root):
    script = "import sys, kvtier.storage_backends.s3; sys.exit('boto3' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root)


# ------------------------------------------------------------------------------------- weather

WHOLE = [Fault.HANG, Fault.UNAVAILABLE, Fault.DENIED]
ONE = [Fault.RESET, Fault.SHORT]


@pytest.mark.parametrize("size", [10_000, TWO_RANGES])
@pytest.mark.parametrize("fault", [*WHOLE, *ONE, Fault.XML_ERROR])
def test_a_failed_get_is_never_a_hit_and_returns_in_time(proxy, store, fault, size):
    each = make_record(1, size)
    assert store.write_many([each]) == [Status.OK]
    proxy.inject(fault, "GET")
    began = time.monotonic()
    if fault in WHOLE:
        with pytest.raises(Unavailable):
            statuses(store, each)
    else:
        assert statuses(store, each) == [Status.FAILED]
    assert time.monotonic() - began < DEADLINE
    proxy.inject(Fault.NONE)
    assert statuses(store, each) == [Status.OK]


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.UNAVAILABLE, Fault.DENIED])
def test_a_failed_put_is_never_visible(proxy, store, s3_objects, fault):
    each = make_record(1, 3 * MIB)
    proxy.inject(fault, "PUT")
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(Unavailable):
            store.write_many([each])
        assert time.monotonic() - began < DEADLINE
    proxy.inject(Fault.NONE)
    assert s3_objects.listed() == []
    assert store.contains_many([each.header.id]) == [Status.ABSENT]
    assert list(store.scan()) == []


def test_one_bad_record_does_not_spoil_the_others(proxy, store):
    records = [make_record(number, 50_000) for number in range(4)]
    store.write_many(records)
    proxy.inject(Fault.SHORT, records[2].header.key.hex())
    expected = [Status.OK, Status.OK, Status.FAILED, Status.OK]
    assert statuses(store, *records) == expected
    proxy.inject(Fault.UNAVAILABLE, records[2].header.key.hex())
    assert statuses(store, *records) == expected
    assert store.contains_many([each.header.id for each in records]) == expected
    assert store.delete_many([each.header.id for each in records]) == expected


def test_a_storm_of_503_is_not_answered_with_a_storm_of_retries(proxy, store):
    proxy.inject(Fault.UNAVAILABLE)
    before = proxy.requests
    for _ in range(3):
        with pytest.raises(Unavailable, match="SlowDown"):
            store.contains_many([make_record(1, 10).header.id])
    assert proxy.requests - before <= 3 * ATTEMPTS


def test_a_batch_waits_for_a_dead_server_once(proxy, store):
    proxy.inject(Fault.HANG)
    began = time.monotonic()
    with pytest.raises(Unavailable):
        store.contains_many([make_record(number, 10).header.id for number in range(200)])
    with pytest.raises(Unavailable):
        store.write_many([make_record(number, 10) for number in range(20)])
    with pytest.raises(Unavailable):
        list(store.scan())
    assert time.monotonic() - began < 3 * DEADLINE


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.DRIP, Fault.TRICKLE])
def test_a_batch_is_over_at_its_deadline_whatever_the_server_does(s3_open, proxy, fault):
    """The timeouts of this store are far beyond those of a test."""
    patient = s3_open(endpoint=proxy.endpoint, connect_timeout=100.0, read_timeout=100.0)
    records = [make_record(number, 50_000) for number in range(40)]
    assert patient.write_many(records) == [Status.OK] * len(records)
    proxy.inject(fault, "GET")
    before = proxy.requests
    for verb in (lambda: statuses(patient, *records), lambda: statuses(patient, records[0])):
        with under(Deadline(monotonic() + 0.3)):
            try:
                said = verb()
            except Unavailable:
                said = [Status.FAILED]
        assert set(said) == {Status.FAILED}
    assert proxy.requests - before <= 16 + 1, "nothing is asked once it is over"
    proxy.inject(Fault.NONE)
    assert statuses(patient, *records) == [Status.OK] * len(records)


def test_a_server_that_is_gone_is_unavailable(s3_server, s3_open):
    with DelayProxy(s3_server.port) as proxy:
        store = s3_open(endpoint=proxy.endpoint)
    with pytest.raises(Unavailable):
        statuses(store, make_record(1, 10))


def test_delay_is_latency_and_not_bandwidth(s3_server, s3_open):
    each = make_record(1, 5 * MIB)
    with DelayProxy(s3_server.port, delay_s=0.1) as proxy:
        store = s3_open(endpoint=proxy.endpoint)
        store.write_many([each])
        began = time.monotonic()
        assert statuses(store, each) == [Status.OK]
        assert 0.1 <= time.monotonic() - began < 0.6


def test_a_process_exits_while_a_call_hangs(proxy, s3_location, root):
    script = f"""
import threading
from kvtier.storage_backends.s3 import S3Store
store = S3Store.open({s3_location!r}, None, {{"endpoint": {proxy.endpoint!r}}})
print("open", flush=True)
input()
threading.Thread(target=store.contains_many, args=([b"x" * 38],), daemon=True).start()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=root,
    )
    with child:
        assert child.stdout.readline() == b"open\n"
        proxy.inject(Fault.HANG)
        began = time.monotonic()
        child.communicate(b"\n", timeout=20)
        assert child.returncode == 0
        assert time.monotonic() - began < 2.0
