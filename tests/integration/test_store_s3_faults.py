"""The S3 store behind a proxy that breaks answers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import pytest

from kvtier.clock import monotonic
from kvtier.deadline import Deadline, under
from kvtier.errors import Unavailable
from kvtier.storage_backends.s3 import S3Store
from kvtier.testing.proxy import DelayProxy, Fault
from kvtier.testing.records import make_record
from kvtier.tiers.store import Status, Write

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("s3_credentials")]

CONNECT, READ = 0.3, 0.5
FAR = {"connect_timeout": 100.0, "read_timeout": 100.0}
ATTEMPTS, BACKOFF = 2, 1.0
BUSY = 4.0  # what a machine with other work may take besides
DEADLINE = ATTEMPTS * (CONNECT + READ) + BACKOFF + BUSY  # of one request that nobody answers
MIB = 1 << 20
TWO_RANGES = 7 * MIB


def statuses(store: S3Store, *records: Write) -> list[Status]:
    buffers = [memoryview(bytearray(len(each.data))) for each in records]
    names = [each.header.id for each in records]
    return [each.status for each in store.read_many(names, buffers)]


def until_read(store: S3Store, each: Write) -> None:
    """Read a record again and again until it comes: a busy machine may be silent for a while."""
    late = time.monotonic() + 30.0
    found = Status.FAILED
    while found is not Status.OK:
        assert time.monotonic() < late
        with contextlib.suppress(Unavailable):
            (found,) = statuses(store, each)


@pytest.fixture
def proxy(s3_server):
    with DelayProxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def store_for(s3_open, s3_hasty, proxy):
    """Return a store behind the proxy; where that is to be silent, one that does not wait long."""

    def opened(fault: Fault) -> S3Store:
        if fault is not Fault.HANG:
            return s3_open(endpoint=proxy.endpoint)
        return s3_hasty(endpoint=proxy.endpoint, connect_timeout=CONNECT, read_timeout=READ)

    return opened


# ------------------------------------------------------------------------------------- weather

WHOLE = [Fault.HANG, Fault.UNAVAILABLE, Fault.DENIED]
ONE = [Fault.RESET, Fault.SHORT]


@pytest.mark.parametrize("size", [10_000, TWO_RANGES])
@pytest.mark.parametrize("fault", [*WHOLE, *ONE, Fault.XML_ERROR])
def test_a_failed_get_is_never_a_hit_and_returns_in_time(proxy, store_for, s3_open, fault, size):
    each, store = make_record(1, size), store_for(fault)
    assert s3_open().write_many([each]) == [Status.OK]
    proxy.inject(fault, "GET")
    asked, began = proxy.requests, time.monotonic()
    if fault in WHOLE:
        with pytest.raises(Unavailable):
            statuses(store, each)
    else:
        assert statuses(store, each) == [Status.FAILED]
    assert time.monotonic() - began < DEADLINE
    assert 1 <= proxy.requests - asked <= ATTEMPTS
    proxy.inject(Fault.NONE)
    until_read(store, each)


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.UNAVAILABLE, Fault.DENIED])
def test_a_failed_put_is_never_visible(proxy, store_for, s3_open, s3_objects, fault):
    each, store = make_record(1, 3 * MIB), store_for(fault)
    proxy.inject(fault, "PUT")
    late, puts = time.monotonic() + 30.0, 0
    while puts < 2:  # the look before it may fail, too, where a busy machine is silent
        asked, broken, began = proxy.requests, proxy.broken[fault], time.monotonic()
        with pytest.raises(Unavailable):
            store.write_many([each])
        assert time.monotonic() - began < DEADLINE
        assert 1 <= proxy.requests - asked <= 1 + ATTEMPTS, "a look, and the attempts"
        puts += proxy.broken[fault] > broken
        assert time.monotonic() < late
    proxy.inject(Fault.NONE)
    assert s3_objects.listed() == []
    direct = s3_open()
    assert direct.contains_many([each.header.id]) == [Status.ABSENT]
    assert list(direct.scan()) == []


def test_one_bad_record_does_not_spoil_the_others(proxy, s3_open):
    store = s3_open(endpoint=proxy.endpoint)
    records = [make_record(number, 50_000) for number in range(4)]
    store.write_many(records)
    proxy.inject(Fault.SHORT, records[2].header.key.hex())
    expected = [Status.OK, Status.OK, Status.FAILED, Status.OK]
    assert statuses(store, *records) == expected
    proxy.inject(Fault.UNAVAILABLE, records[2].header.key.hex())
    assert statuses(store, *records) == expected
    assert store.contains_many([each.header.id for each in records]) == expected
    assert store.delete_many([each.header.id for each in records]) == expected


def test_a_storm_of_503_is_not_answered_with_a_storm_of_retries(proxy, store_for):
    store = store_for(Fault.UNAVAILABLE)
    proxy.inject(Fault.UNAVAILABLE)
    before = proxy.requests
    for _ in range(3):
        with pytest.raises(Unavailable, match="SlowDown"):
            store.contains_many([make_record(1, 10).header.id])
    assert proxy.requests - before <= 3 * ATTEMPTS


def test_a_batch_waits_for_a_dead_server_once(proxy, store_for):
    store = store_for(Fault.HANG)
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
    patient = s3_open(endpoint=proxy.endpoint, **FAR)
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
    with DelayProxy(s3_server.port) as proxy:
        store = s3_open(endpoint=proxy.endpoint)
        store.write_many([each])
        proxy.slow(1.0)
        proxy.hang_up()
        began = time.monotonic()
        assert statuses(store, each) == [Status.OK]
        assert 1.0 <= time.monotonic() - began < 1.0 + BUSY  # each 256 KiB held up: ten seconds


def test_a_process_exits_while_a_call_hangs(proxy, s3_location, root):
    script = f"""
import threading
from kvtier.storage_backends.s3 import S3Store
store = S3Store.open({s3_location!r}, None, {{"endpoint": {proxy.endpoint!r}, **{FAR}}})
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
        child.communicate(b"\n", timeout=40)
        assert child.returncode == 0
