"""The S3 store on a real server: the contract, what is stored, and objects that are wrong."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from kvtier.identity.record import HEADER_BYTES, checksum
from kvtier.storage_backends.s3 import S3Store
from kvtier.storage_backends.s3_service import Place, Settings, connect
from kvtier.testing.records import make_record, newer_record
from kvtier.testing.store_suite import StoreSuite
from kvtier.testing.waiting import lives, until
from kvtier.tiers.store import Read, Status, Write

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("s3_credentials")]

MIB = 1 << 20
TWO_RANGES = 7 * MIB


def read(store: S3Store, *records: Write) -> tuple[list[Read], list[memoryview]]:
    buffers = [memoryview(bytearray(len(each.data))) for each in records]
    return store.read_many([each.header.id for each in records], buffers), buffers


def statuses(store: S3Store, *records: Write) -> list[Status]:
    return [each.status for each in read(store, *records)[0]]


@pytest.fixture
def store(s3_open) -> S3Store:
    return s3_open()


@pytest.fixture
def objects(s3_objects):
    return s3_objects


class TestContract(StoreSuite):
    """The contract that all stores keep."""

    numbers = itertools.count()

    @pytest.fixture(autouse=True)
    def _at(self, s3_server, s3_bucket, s3_objects_at):
        self.server, self.objects_at = s3_server, s3_objects_at
        self.location = f"//{s3_bucket}/contract-{next(self.numbers)}"

    def open_store(self) -> S3Store:
        return S3Store.open(self.location, self.capacity, {"endpoint": self.server.endpoint})

    reopen = open_store

    def raw_corrupt(self, record: Write, how: str) -> bool:
        objects = self.objects_at(self.location)
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


def test_a_prefix_does_not_see_its_neighbour(s3_open, s3_location):
    one, other = s3_open(s3_location), s3_open(s3_location + "-neighbour")
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
    try:
        until(lambda: not lives(int(pid)))
    finally:
        shutil.rmtree(folder)


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


@pytest.mark.parametrize(("size", "kept"), [(2 * MIB, True), (1000, False)])
def test_what_a_later_version_has_put_there_is_kept_where_it_is_looked_for(
    store, objects, size, kept
):
    """As where a PUT is worth a look before, by a host that has not met it."""
    newer, mine = newer_record(1, size), make_record(1, size)
    there = newer.header.pack() + bytes(newer.data)
    objects.put(newer, there)
    assert store.write_many([mine]) == [Status.NEWER if kept else Status.OK]
    assert (objects.get(mine) == there) is kept


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


# ------------------------------------------------------------------------------------- the service


def test_requests_are_counted_by_kind_as_the_server_counts_them(store, s3_server):
    records = [make_record(1, 1000), make_record(2, 9 * MIB)]
    before, already = s3_server.traffic().requests, store.requests.counts()
    store.write_many(records)
    statuses(store, *records)
    store.delete_many([each.header.id for each in records])
    list(store.scan())
    sent = {k: n - already.get(k, 0) for k, n in store.requests.counts().items()}
    assert sum(sent.values()) == s3_server.traffic().requests - before
    assert sent == {"LIST": 1, "GET": 4, "PUT": 2, "HEAD": 2, "DELETE": 2}


@pytest.mark.parametrize(
    ("endpoint", "style", "url"),
    [
        ("https://s3.example:9", "", "https://s3.example:9/bucket/p/x/"),
        ("https://s3.example:9", "virtual", "https://bucket.s3.example:9/p/x/"),
        ("", "", "https://bucket.s3.eu-central-1.amazonaws.com/p/x/"),
        ("", "path", "https://s3.eu-central-1.amazonaws.com/bucket/p/x/"),
    ],
)
def test_buckets_are_addressed_by_path_or_by_host(endpoint, style, url):
    settings = Settings("eu-central-1", endpoint, style, 1.0, 1.0)
    client = connect(settings)
    store = S3Store(client, Place("bucket", "p/x/"), settings)
    assert store._getter._url == url
    store.close()


def test_a_getter_signs_like_boto3(store, objects):
    """By a prefix of all that may be in one: the server refuses a wrong signature."""
    odd = S3Store.open(
        f"//{objects.bucket}/a!_.*'()=-/{objects.prefix}",
        None,
        {"endpoint": store._client.meta.endpoint_url},
    )
    each = make_record(1, 100)
    assert odd.write_many([each]) == [Status.OK]
    assert statuses(odd, each) == [Status.OK]
    odd.close()
