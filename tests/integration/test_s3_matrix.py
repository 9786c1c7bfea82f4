"""Every fault of the proxy on every verb of the S3 store: a counted miss, in time, never a lie."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.errors import ConfigError, Unavailable
from kvtier.identity.record import checksum
from kvtier.storage_backends.s3 import S3Store
from kvtier.testing.proxy import CHAOS, DelayProxy, Fault
from kvtier.testing.records import make_record
from kvtier.testing.toy import Toy, dram, opened, prompt
from kvtier.tiers.store import Status, Write

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("s3_credentials")]

CONNECT, READ = 0.2, 0.25
ATTEMPTS, BACKOFF = 2, 1.0
BUSY = 4.0  # what a machine with other work may take besides
BOUND = ATTEMPTS * (CONNECT + READ) + BACKOFF + BUSY  # of one call
SIZE = 50_000
FAULTS = [fault for fault in Fault if fault is not Fault.NONE]
TOKENS = 400


@pytest.fixture
def proxy(s3_server) -> Iterator[DelayProxy]:
    with DelayProxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def store(s3_open, proxy) -> S3Store:
    return s3_open(endpoint=proxy.endpoint, connect_timeout=CONNECT, read_timeout=READ)


def read(store: S3Store, records: list[Write]) -> list[Status]:
    """Read records and check that what is said to be one is that one."""
    buffers = [memoryview(bytearray(SIZE)) for _ in records]
    found = store.read_many([one.header.id for one in records], buffers)
    for one, record, buffer in zip(found, records, buffers, strict=True):
        if one.status is Status.OK and one.header == record.header:
            assert checksum(buffer) == record.header.stored_sum
        elif one.status is Status.OK:  # its Tier compares the namespace and the checksums
            assert one.header.stored_sum != checksum(buffer)
    return [one.status for one in found]


def in_time(call: Callable[[], list[Status]]) -> list[Status]:
    """Return what a call says, all FAILED if it raises Unavailable; it must end in time."""
    began = time.monotonic()
    try:
        said = call()
    except Unavailable:
        said = [Status.FAILED] * 3
    assert time.monotonic() - began < BOUND
    return said


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.value for fault in FAULTS])
def test_every_fault_on_every_verb(proxy, store, s3_open, fault):
    there = [make_record(number, SIZE) for number in range(4)]
    new = [make_record(number, SIZE) for number in range(4, 7)]
    names = [one.header.id for one in there]
    assert store.write_many(there) == [Status.OK] * 4
    there, old = there[:3], names[3:]
    stranger = make_record(9, SIZE, namespace=b"x" * 32)
    proxy.inject(fault, other=stranger.header.pack() + bytes(stranger.data))
    calls = (
        lambda: read(store, there),
        lambda: store.contains_many(names[:3]),
        lambda: store.write_many(new),
        lambda: store.delete_many(old),
    )
    with ThreadPoolExecutor(len(calls)) as threads:
        got, seen, sent, gone = threads.map(in_time, calls)
    assert proxy.broken[fault if fault is not Fault.HALF else Fault.UNAVAILABLE]
    proxy.inject(Fault.NONE)
    if fault not in (Fault.HALF, Fault.LESS, Fault.WRONG):
        passes = (Fault.RESET, Fault.SHORT, Fault.TRICKLE)  # short answers get through these
        assert Status.OK not in (*got, *seen, *sent, *gone) or fault in passes
    assert Status.OK not in got or fault is Fault.HALF
    # What was said to be written is there, whole; and what was there still is.
    direct = s3_open()
    after = read(direct, [*there, *new])
    assert all(
        now is Status.OK for now, told in zip(after[3:], sent, strict=True) if told is Status.OK
    )
    assert after[:3] == [Status.OK] * 3
    assert set(after) <= {Status.OK, Status.ABSENT}
    assert read(store, there) == [Status.OK] * 3


# ------------------------------------------------------------------- names and TLS that fail


@pytest.fixture
def alert() -> Iterator[int]:
    """Return the port of a server that ends every handshake with an alert."""
    door = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                link, _ = door.accept()
            except OSError:
                return
            with link:
                link.recv(4096)
                link.sendall(b"\x15\x03\x03\x00\x02\x02\x28")  # fatal: handshake failure

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield door.getsockname()[1]
    door.shutdown(socket.SHUT_RDWR)
    door.close()
    thread.join(5)


def cause(location: str, endpoint: str) -> str:
    given = {"endpoint": endpoint, "connect_timeout": CONNECT, "read_timeout": READ}
    began = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        S3Store.open(location, None, given)
    assert time.monotonic() - began < BOUND
    return str(refused.value)


def test_tls_that_fails_is_said_at_the_door(s3_location, alert, s3_server):
    assert "ends the handshake" in cause(s3_location, f"https://127.0.0.1:{alert}")
    assert "write http://" in cause(s3_location, f"https://127.0.0.1:{s3_server.port}")


def test_a_name_that_is_not_known_is_said_at_the_door(s3_location):
    assert "check http://no-such-host.invalid" in cause(s3_location, "http://no-such-host.invalid")


def test_a_name_that_is_known_no_more_is_weather(s3_server, s3_open, monkeypatch):
    record = make_record(1, SIZE)
    with DelayProxy(s3_server.port) as proxy:
        store = s3_open(endpoint=f"http://localhost:{proxy.port}", connect_timeout=CONNECT)
        store.write_many([record])

        def unknown(*_, **__):
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

        monkeypatch.setattr(socket, "getaddrinfo", unknown)
        proxy.inject(Fault.RESET)  # no connection is left, and new ones need the name
        in_time(lambda: read(store, [record]))
        proxy.inject(Fault.NONE)
        with pytest.raises(Unavailable, match=r"name|connect"):
            read(store, [record])
        monkeypatch.undo()
        assert read(store, [record]) == [Status.OK]


# ------------------------------------------------------------------------------- as a tier


@pytest.fixture
def toys(s3_location, proxy) -> Iterator[Callable[[], Toy]]:
    """Open toy engines on the bucket, behind the proxy."""
    made: list[Toy] = []

    def one() -> Toy:
        timeouts = f"connect_timeout={CONNECT}s&read_timeout={READ}s"
        made.append(
            opened(
                dram(64),
                f"s3:{s3_location}?capacity=unbounded&admission=through"
                f"&endpoint={proxy.endpoint}&{timeouts}",
            )
        )
        return made[-1]

    yield one
    for each in made:
        each.close()


COUNTED = {
    Fault.HANG: ("ReadTimeout",),
    Fault.DRIP: ("broken answer", "late"),
    Fault.TRICKLE: ("broken answer", "late"),
    Fault.HALF: ("SlowDown",),
    Fault.RESET: ("broken answer",),
    Fault.WRONG: ("corrupt",),
    Fault.LESS: ("broken answer",),
}


@pytest.mark.parametrize("fault", COUNTED, ids=[fault.value for fault in COUNTED])
def test_every_fault_is_a_counted_miss_of_a_cache(proxy, toys, fault):
    tokens = prompt(TOKENS)
    toys().save("a", tokens)
    toy = toys()
    stranger = make_record(9, SIZE, namespace=b"x" * 32)
    proxy.inject(fault, "GET", other=stranger.header.pack() + bytes(stranger.data))
    began = time.monotonic()
    fetch = toy.cache.fetch(toy.cache.match(tokens), timeout=0.3, deadline=30)
    lease = fetch.result(20)
    assert time.monotonic() - began < 0.3 + BUSY, "it outlived its deadline"
    if lease is not None:
        lease.release()
    if fault is not Fault.HALF:
        assert lease is None
    for turn in range(2):
        _, _, exact = toy.load(f"bad-{turn}", tokens)
        assert exact
    get = toy.cache.metrics.get
    counted = sum(get("tier_faults", tier="s3", reason=cause) for cause in COUNTED[fault])
    assert counted >= 1 or fault is Fault.HALF
    proxy.inject(Fault.NONE)


def test_in_bad_weather_answers_are_exact(proxy, toys):
    prompts = [prompt(TOKENS, number) for number in range(3)]
    stranger = make_record(9, SIZE, namespace=b"x" * 32)
    one, other = toys(), toys()
    proxy.storm(CHAOS, 1, other=stranger.header.pack() + bytes(stranger.data))
    for number, tokens in enumerate(prompts):
        one.save(f"save-{number}", tokens)
        for toy in (one, other):
            toy.cache.clear("dram")
            assert toy.load(f"load-{number}", tokens)[2]
    assert sum(count for fault, count in proxy.broken.items() if fault is not Fault.NONE)
    proxy.inject(Fault.NONE)
