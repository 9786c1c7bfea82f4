"""The S3 store on a real server, and on one that a proxy makes misbehave."""

from __future__ import annotations

import itertools
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, Unavailable
from kvtier.identity.record import HEADER_BYTES, checksum
from kvtier.storage_backends.s3 import S3Store
from kvtier.testing.proxy import DelayProxy, Fault
from kvtier.testing.records import make_record
from kvtier.testing.store_suite import StoreSuite
from kvtier.tiers.store import Read, Status, Write

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("s3_credentials")]

CONNECT, READ = 0.3, 0.5
ATTEMPTS, BACKOFF = 2, 1.0
DEADLINE = ATTEMPTS * (CONNECT + READ) + BACKOFF + 0.5  # of one request that nobody answers
MIB = 1 << 20
TWO_RANGES = 7 * MIB


def read(store: S3Store, *records: Write) -> tuple[list[Read], list[memoryview]]:
    buffers = [memoryview(bytearray(len(each.data))) for each in records]
    return store.read_many([each.header.id for each in records], buffers), buffers


def statuses(store: S3Store, *records: Write) -> list[Status]:
    return [each.status for each in read(store, *records)[0]]


@pytest.fixture
def opened(s3_location):
    """Open stores that are closed at the end."""
    stores = []

    def open_at(endpoint: str, location: str = s3_location, **options) -> S3Store:
        timeouts = {"connect_timeout": CONNECT, "read_timeout": READ}
        stores.append(S3Store.open(location, None, {"endpoint": endpoint, **timeouts, **options}))
        return stores[-1]

    yield open_at
    for store in stores:
        store.close()


@pytest.fixture
def store(s3_server, opened):
    return opened(s3_server.endpoint, read_timeout=5.0)


@pytest.fixture
def proxy(s3_server):
    with DelayProxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def objects(s3_server, s3_location):
    """Look at and change the objects themselves, past the store."""
    return Objects(s3_server.client(), s3_location)


class Objects:
    def __init__(self, client, location) -> None:
        self.client = client
        self.bucket, _, self.prefix = location.removeprefix("//").partition("/")

    def name(self, each: Write) -> dict[str, str]:
        part = each.header.id[32:].hex()
        return {"Bucket": self.bucket, "Key": f"{self.prefix}/{each.header.key.hex()}-{part}"}

    def get(self, each: Write) -> bytes:
        return self.client.get_object(**self.name(each))["Body"].read()

    def put(self, each: Write, body: bytes) -> None:
        self.client.put_object(**self.name(each), Body=body)

    def listed(self) -> list[str]:
        answer = self.client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix)
        return [each["Key"] for each in answer.get("Contents", ())]


class TestContract(StoreSuite):
    """The contract that all stores keep."""

    numbers = itertools.count()

    @pytest.fixture(autouse=True)
    def _at(self, s3_server, s3_bucket, s3_credentials):
        self.server = s3_server
        self.location = f"//{s3_bucket}/contract-{next(self.numbers)}"

    def open_store(self) -> S3Store:
        return S3Store.open(self.location, self.capacity, {"endpoint": self.server.endpoint})

    reopen = open_store

    def raw_corrupt(self, record: Write, how: str) -> bool:
        objects = Objects(self.server.client(), self.location)
        body = bytearray(objects.get(record))
        if how == "truncate":
            del body[-1000:]
        else:
            body[{"header": 60, "payload": HEADER_BYTES + 60}[how]] ^= 1
        objects.put(record, bytes(body))
        return True


# ------------------------------------------------------------------------------- what is stored


@pytest.mark.parametrize("size", [0, 1, 4 * MIB, 6 * MIB - 1, 6 * MIB, 13 * MIB + 7])
def test_any_size_comes_back_the_same(store, objects, size):
    each = make_record(1, size)
    assert store.write_many([each]) == [Status.OK]
    assert objects.get(each) == each.header.pack() + each.data
    ((status, header),), (buffer,) = read(store, each)
    assert (status, header, buffer) == (Status.OK, each.header, each.data)


def test_a_larger_buffer_is_filled_from_its_start(store):
    each = make_record(1, 5 * MIB)
    store.write_many([each])
    buffer = memoryview(bytearray(b"x" * (9 * MIB)))
    assert store.read_many([each.header.id], [buffer]) == [Read(Status.OK, each.header)]
    assert buffer[: 5 * MIB] == each.data


def test_a_smaller_buffer_fails(store):
    each = make_record(1, 1000)
    store.write_many([each])
    assert (
        store.read_many([each.header.id], [memoryview(bytearray(999))])[0].status is Status.FAILED
    )


def test_padding_is_not_stored(store, objects):
    each = make_record(1, 1000)
    assert store.write_many([Write(each.header, memoryview(bytes(each.data) + b"pad"))])
    assert objects.get(each) == each.header.pack() + each.data


def test_scan_is_oldest_first_and_passes_over_what_is_no_record(store, objects):
    first, second = make_record(1, 10), make_record(0, 10)
    store.write_many([first])
    time.sleep(1.1)  # the server dates objects by the second
    store.write_many([second])
    objects.put(make_record(5, 10), b"short")
    objects.client.put_object(Bucket=objects.bucket, Key=f"{objects.prefix}/notes.txt", Body=b"x")
    assert list(store.scan()) == [first.header, second.header]


def test_a_prefix_does_not_see_its_neighbour(s3_server, opened, s3_location):
    one, other = (opened(s3_server.endpoint, s3_location + tail) for tail in ("", "-neighbour"))
    other.write_many([make_record(1, 10)])
    assert list(one.scan()) == []


def test_the_same_record_is_not_sent_twice(store, s3_server):
    large = make_record(1, 2 * MIB)
    changed = Write(large.header, large.data)
    store.write_many([large])
    before = s3_server.traffic()
    assert store.write_many([changed]) == [Status.OK]
    after = s3_server.traffic()
    assert (after.requests - before.requests, after.bytes_sent - before.bytes_sent) == (
        1,
        HEADER_BYTES,
    )


def test_the_server_counts_what_the_client_reads(store, s3_server):
    records = [make_record(number, size) for number, size in enumerate((100, 5 * MIB, 13 * MIB))]
    store.write_many(records)
    before = s3_server.traffic()
    assert statuses(store, *records) == [Status.OK] * 3
    after = s3_server.traffic()
    assert after.bytes_sent - before.bytes_sent == sum(
        store.footprint(each.header.stored_bytes) for each in records
    )
    assert after.requests - before.requests == 1 + 1 + 3


def test_a_killed_parent_takes_the_server_with_it(root):
    script = (
        "from kvtier.testing.seaweed import SeaweedServer\n"
        "import os, signal\n"
        "server = SeaweedServer().__enter__()\n"
        "print(server.pid, server._folder.name, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, cwd=root)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    pid, folder = ran.stdout.split()
    give_up = time.monotonic() + 5.0
    while _runs(int(pid)) and time.monotonic() < give_up:
        time.sleep(0.02)
    shutil.rmtree(folder)
    assert not _runs(int(pid))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# -------------------------------------------------------------------------------- wrong objects


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda good, other: good[:-1], id="truncated"),
        pytest.param(lambda good, other: good[:5000], id="truncated in the first range"),
        pytest.param(lambda good, other: good[:100], id="truncated in the header"),
        pytest.param(lambda good, other: b"", id="empty"),
        pytest.param(lambda good, other: good + b"x", id="too long"),
        pytest.param(lambda good, other: good[:50] + b"\xff" + good[51:], id="header flipped"),
        pytest.param(lambda good, other: other, id="another record"),
        pytest.param(lambda good, other: b"<Error>" * 100, id="no record at all"),
    ],
)
@pytest.mark.parametrize("size", [10_000, TWO_RANGES])
def test_a_wrong_object_is_corrupt_and_nowhere_listed(store, objects, damage, size):
    each, other, sound = make_record(1, size), make_record(2, size), make_record(3, 10)
    store.write_many([each, sound])
    foreign = other.header.pack() + other.data
    objects.put(each, damage(objects.get(each), foreign))
    assert statuses(store, each, sound) == [Status.CORRUPT, Status.OK]
    assert store.contains_many([each.header.id, sound.header.id]) == [Status.ABSENT, Status.OK]
    # Written again it is sound, and until then it can be deleted.
    assert store.write_many([each]) == [Status.OK]
    assert statuses(store, each) == [Status.OK]
    assert store.delete_many([each.header.id]) == [Status.OK]
    assert store.delete_many([each.header.id]) == [Status.ABSENT]


def test_scan_leaves_out_what_lies_under_a_wrong_name(store, objects):
    each, other = make_record(1, 100), make_record(2, 100)
    objects.put(each, other.header.pack() + other.data)
    assert list(store.scan()) == []


def test_a_record_replaced_while_it_is_read_never_mixes(store, objects):
    old = make_record(1, 12 * MIB)
    fresh = make_record(1, 12 * MIB, version=1)
    store.write_many([old])
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            objects.put(old, fresh.header.pack() + fresh.data)
            objects.put(old, old.header.pack() + old.data)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        for _ in range(10):
            ((status, header),), (buffer,) = read(store, old)
            if status is Status.OK:
                assert checksum(buffer) == header.stored_sum
    finally:
        stop.set()
        writer.join()


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


@pytest.mark.parametrize("location", ["bucket/prefix", "//", "///prefix", "//B/x", "//bucket/a?b"])
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
        Settings("", f"{endpoint}://localhost:9", 1.0, 1.0),
        Settings("", "", 1.0, 1.0),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"{endpoint}://localhost:9")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        client = connect(settings, connections=1)
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
def test_a_failed_get_is_never_a_hit_and_returns_in_time(proxy, opened, fault, size):
    store, each = opened(proxy.endpoint), make_record(1, size)
    assert store.write_many([each]) == [Status.OK]
    proxy.inject(fault, "GET")
    began = time.monotonic()
    if fault in WHOLE:
        with pytest.raises(Unavailable):
            read(store, each)
    else:
        assert statuses(store, each) == [Status.FAILED]
    assert time.monotonic() - began < DEADLINE
    proxy.inject(Fault.NONE)
    assert statuses(store, each) == [Status.OK]


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.UNAVAILABLE, Fault.DENIED])
def test_a_failed_put_is_never_visible(proxy, opened, objects, fault):
    store, each = opened(proxy.endpoint), make_record(1, 3 * MIB)
    proxy.inject(fault, "PUT")
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(Unavailable):
            store.write_many([each])
        assert time.monotonic() - began < DEADLINE
    proxy.inject(Fault.NONE)
    assert objects.listed() == []
    assert store.contains_many([each.header.id]) == [Status.ABSENT]
    assert list(store.scan()) == []


def test_one_bad_record_does_not_spoil_the_others(proxy, opened):
    store = opened(proxy.endpoint)
    records = [make_record(number, 50_000) for number in range(4)]
    store.write_many(records)
    proxy.inject(Fault.SHORT, records[2].header.key.hex())
    expected = [Status.OK, Status.OK, Status.FAILED, Status.OK]
    assert statuses(store, *records) == expected
    proxy.inject(Fault.UNAVAILABLE, records[2].header.key.hex())
    assert statuses(store, *records) == expected
    assert store.contains_many([each.header.id for each in records]) == expected
    assert store.delete_many([each.header.id for each in records]) == expected


def test_a_storm_of_503_is_not_answered_with_a_storm_of_retries(proxy, opened):
    store = opened(proxy.endpoint)
    proxy.inject(Fault.UNAVAILABLE)
    before = proxy.requests
    for _ in range(3):
        with pytest.raises(Unavailable, match="SlowDown"):
            store.contains_many([make_record(1, 10).header.id])
    assert proxy.requests - before <= 3 * ATTEMPTS


def test_a_batch_waits_for_a_dead_server_once(proxy, opened):
    store = opened(proxy.endpoint)
    proxy.inject(Fault.HANG)
    began = time.monotonic()
    with pytest.raises(Unavailable):
        store.contains_many([make_record(number, 10).header.id for number in range(200)])
    with pytest.raises(Unavailable):
        store.write_many([make_record(number, 10) for number in range(20)])
    with pytest.raises(Unavailable):
        list(store.scan())
    assert time.monotonic() - began < 3 * DEADLINE


def test_a_server_that_is_gone_is_unavailable(s3_server, s3_location, opened):
    with DelayProxy(s3_server.port) as proxy:
        store = opened(proxy.endpoint)
    with pytest.raises(Unavailable):
        read(store, make_record(1, 10))


def test_delay_is_latency_and_not_bandwidth(s3_server, opened):
    with DelayProxy(s3_server.port, delay_s=0.1) as proxy:
        store, each = opened(proxy.endpoint, read_timeout=5.0), make_record(1, 5 * MIB)
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
