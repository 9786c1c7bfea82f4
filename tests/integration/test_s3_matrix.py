"""Every fault of the proxy on every verb of the S3 store: a counted miss, in time, never a lie."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.errors import ConfigError, Unavailable
from kvtier.identity.record import checksum
from kvtier.storage_backends.s3 import S3Store
from kvtier.testing.bounded import own_clock
from kvtier.testing.proxy import CHAOS, DelayProxy, Fault
from kvtier.testing.records import make_record
from kvtier.testing.tls import self_signed
from kvtier.testing.toy import Toy, dram, opened, prompt
from kvtier.tiers import breaker
from kvtier.tiers.breaker import FAILURES
from kvtier.tiers.store import Span, Status, Write

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("s3_credentials")]

CONNECT, READ = 0.2, 0.25
ATTEMPTS, BACKOFF = 2, 1.0
BUSY = 4.0  # what a machine with other work may take besides
BOUND = ATTEMPTS * (CONNECT + READ) + BACKOFF + BUSY  # of one call
SIZE, LARGE = 50_000, (1 << 20) + 1
SPAN = 10_000
HEAL_SECONDS = 30.0
REST_SECONDS = 1.0  # of the breaker, and of what was found to be absent: in place of five
FAULTS = [fault for fault in Fault if fault is not Fault.NONE]
TOKENS = 400
SHORT = 80  # tokens of a prompt that is looked up by one request, which a busy machine answers


@pytest.fixture
def proxy(s3_server) -> Iterator[DelayProxy]:
    with DelayProxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def store(s3_hasty, proxy) -> S3Store:
    return s3_hasty(endpoint=proxy.endpoint, connect_timeout=CONNECT, read_timeout=READ)


def read(store: S3Store, records: list[Write]) -> list[Status]:
    """Read records and check that what is said to be one is that one."""
    buffers = [memoryview(bytearray(len(one.data))) for one in records]
    found = store.read_many([one.header.id for one in records], buffers)
    for one, record, buffer in zip(found, records, buffers, strict=True):
        if one.status is Status.OK and one.header == record.header:
            assert checksum(buffer) == record.header.stored_sum
        elif one.status is Status.OK:  # its Tier compares the namespace and the checksums
            assert one.header.stored_sum != checksum(buffer)
    return [one.status for one in found]


def in_time(call: Callable[[], list[Status]]) -> list[Status]:
    """Return what a call says, FAILED if it raises Unavailable; it must end in time."""
    began = own_clock()
    try:
        said = call()
    except Unavailable:
        said = [Status.FAILED]
    assert own_clock() - began < BOUND
    return said


class Verbs:
    """What is done to a store, and what is there before: each verb has records of its own."""

    def __init__(self, store: S3Store, direct: S3Store) -> None:
        self.store = store
        self.direct = direct  # the same records by a store that waits as long as it takes
        self.there = [make_record(number, SIZE) for number in range(3)]
        self.old = make_record(3, SIZE)
        self.new = [make_record(number, SIZE) for number in range(4, 6)]
        self.new.append(make_record(6, LARGE))  # which is looked for first
        assert direct.write_many([*self.there, self.old]) == [Status.OK] * 4
        self.calls = {
            "get": lambda: read(store, self.there),
            "span": self.spans,
            "head": lambda: store.contains_many([one.header.id for one in self.there]),
            "put": lambda: store.write_many(self.new),
            "delete": lambda: store.delete_many([self.old.header.id]),
            "list": self.scanned,
            "list to collect": self.collected,
        }

    def spans(self) -> list[Status]:
        """Read the end of a record; whoever asks for spans proves them by headers of their own."""
        buffer = memoryview(bytearray(SPAN))
        (status,) = self.store.read_spans([Span(self.there[0].header.id, SIZE - SPAN, [buffer])])
        return [status]

    def scanned(self) -> list[Status]:
        """List the headers; none may be of something else."""
        known = {one.header for one in (*self.there, self.old, *self.new)}
        found = list(self.store.scan())
        assert known.issuperset(found)
        return [Status.OK] * len(found)

    def collected(self) -> list[Status]:
        """List as whoever collects does: all that was there before, or nothing."""
        found = {one.id for one in self.store.medium().listed()}
        assert found.issuperset(one.header.id for one in self.there)
        return [Status.OK]

    def at_once(self) -> dict[str, list[Status]]:
        """Do all of it at the same time, and return what is said of each."""
        with ThreadPoolExecutor(len(self.calls)) as threads:
            return dict(zip(self.calls, threads.map(in_time, self.calls.values()), strict=True))

    def check(self, said: dict[str, list[Status]]) -> None:
        """See that what was said to be written is there, whole; and what was there still is."""
        after = read(self.direct, [*self.there, *self.new])
        for now, told in zip(after[3:], said["put"], strict=False):
            assert now is Status.OK or told is not Status.OK
        assert after[:3] == [Status.OK] * 3
        assert set(after) <= {Status.OK, Status.ABSENT}


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.value for fault in FAULTS])
def test_every_fault_on_every_verb(proxy, store, s3_open, fault):
    verbs = Verbs(store, s3_open())
    stranger = make_record(9, SIZE, namespace=b"x" * 32)
    proxy.inject(fault, other=stranger.header.pack() + bytes(stranger.data))
    said = verbs.at_once()
    assert proxy.broken[fault if fault is not Fault.HALF else Fault.UNAVAILABLE]
    proxy.inject(Fault.NONE)
    if fault in (Fault.LESS, Fault.WRONG):  # of what is read by ranges alone
        assert Status.OK not in said["get"]
    elif fault in (Fault.RESET, Fault.SHORT, Fault.TRICKLE):  # short answers get through these
        assert Status.OK not in (*said["get"], *said["span"])
    elif fault is not Fault.HALF:
        for statuses in said.values():
            assert Status.OK not in statuses
    verbs.check(said)
    healed(lambda: read(store, verbs.there))


def test_every_verb_of_a_slow_server(proxy, s3_open):
    verbs = Verbs(s3_open(endpoint=proxy.endpoint), s3_open())
    proxy.slow(0.1)
    proxy.hang_up()
    said = verbs.at_once()
    assert {status for statuses in said.values() for status in statuses} == {Status.OK}
    verbs.check(said)


def healed(call: Callable[[], list[Status]]) -> None:
    """Call until all is well again: a machine with other work is slow at times."""
    late = time.monotonic() + HEAL_SECONDS
    while set(in_time(call)) != {Status.OK}:
        assert time.monotonic() < late


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
    thread.join(20)


def cause(location: str, endpoint: str) -> str:
    began = own_clock()
    with pytest.raises(ConfigError) as refused:
        S3Store.open(location, None, {"endpoint": endpoint})
    assert own_clock() - began < BOUND
    return str(refused.value)


def test_tls_that_fails_is_said_at_the_door(s3_location, alert, s3_server):
    assert "ends the handshake" in cause(s3_location, f"https://127.0.0.1:{alert}")
    assert "write http://" in cause(s3_location, f"https://127.0.0.1:{s3_server.port}")


def test_a_name_that_is_not_known_is_said_at_the_door(s3_location):
    assert "check http://no-such-host.invalid" in cause(s3_location, "http://no-such-host.invalid")


def test_every_verb_where_the_name_is_known_no_more(proxy, s3_open, s3_hasty, monkeypatch):
    way = f"http://localhost:{proxy.port}"
    hasty = s3_hasty(endpoint=way, connect_timeout=CONNECT, read_timeout=READ)
    verbs = Verbs(hasty, s3_open())

    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    with monkeypatch.context() as away:
        away.setattr(socket, "getaddrinfo", unknown)
        proxy.hang_up()  # no connection is left, and new ones need the name
        said = verbs.at_once()
    assert {status for statuses in said.values() for status in statuses} == {Status.FAILED}
    assert set(verbs.store.causes.counts()) == {"EndpointConnection"}
    verbs.check(said)
    healed(lambda: read(verbs.store, verbs.there))


def test_every_verb_by_tls_and_where_its_certificate_is_another(
    s3_server, s3_open, tmp_path, monkeypatch
):
    folders = [tmp_path / "one", tmp_path / "other"]
    try:
        for folder in folders:
            folder.mkdir()
        (trusted, context), (_, _) = map(self_signed, folders)
    except ConfigError as absent:
        pytest.skip(str(absent))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(trusted))
    with DelayProxy(s3_server.port, tls=context) as proxy:
        assert proxy.endpoint.startswith("https:")
        verbs = Verbs(s3_open(endpoint=proxy.endpoint), s3_open())
        context.load_cert_chain(folders[1] / "certificate.pem", folders[1] / "key.pem")
        proxy.hang_up()
        said = verbs.at_once()
        assert {status for statuses in said.values() for status in statuses} == {Status.FAILED}
        assert set(verbs.store.causes.counts()) == {"SSL"}
        context.load_cert_chain(trusted, folders[0] / "key.pem")
        verbs.check(said)
        healed(lambda: read(verbs.store, verbs.there))
        assert verbs.at_once()["put"] == [Status.OK] * 3


# ------------------------------------------------------------------------------- as a tier


@pytest.fixture
def impatient(monkeypatch) -> None:
    """Ask again soon after a failure, and after an absence."""
    monkeypatch.setattr(breaker, "REST_SECONDS", REST_SECONDS)
    monkeypatch.setattr("kvtier.catalog.probe._TTL_SECONDS", REST_SECONDS)


@pytest.fixture
def toys(s3_location, proxy) -> Iterator[Callable[..., Toy]]:
    """Open toy engines on the bucket, behind the proxy, that do not wait long unless told to."""
    made: list[Toy] = []

    def one(timeouts: str = f"&connect_timeout={CONNECT}s&read_timeout={READ}s") -> Toy:
        made.append(
            opened(
                dram(64),
                f"s3:{s3_location}?capacity=unbounded&admission=through"
                f"&endpoint={proxy.endpoint}{timeouts}",
            )
        )
        late = time.monotonic() + HEAL_SECONDS
        while made[-1].cache.health().troubles:  # it did not answer in time at the door
            assert time.monotonic() < late
            time.sleep(0.05)
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


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", COUNTED, ids=[fault.value for fault in COUNTED])
def test_every_fault_is_a_counted_miss_of_a_cache(proxy, toys, fault):
    tokens = prompt(TOKENS)
    toys("").save("a", tokens)
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
    get, late, turn = toy.cache.metrics.get, time.monotonic() + HEAL_SECONDS, itertools.count()
    counted = 0.0
    while not counted:  # a busy machine is silent at times, which counts as another cause
        toy.cache.clear("dram")  # where all came in spite of it
        assert toy.load(f"bad-{next(turn)}", tokens)[2]
        counted = sum(get("tier_faults", tier="s3", reason=cause) for cause in COUNTED[fault])
        assert time.monotonic() < late
    proxy.inject(Fault.NONE)


def settled(proxy: DelayProxy) -> int:
    """Return how many requests came, once those that were under way are over.

    Each of a call's is silent for so long at most, and the next of it follows at once.
    """
    asked, since = proxy.requests, time.monotonic()
    while time.monotonic() < since + 2 * (CONNECT + READ):
        if proxy.requests != asked:
            asked, since = proxy.requests, time.monotonic()
        time.sleep(0.01)
    return asked


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.DENIED, Fault.HANG])
def test_five_failed_calls_open_the_breaker_and_it_closes_when_the_server_is_back(
    proxy, toys, fault
):
    tokens = prompt(SHORT)
    toys("").save("a", tokens)
    toy = toys()
    proxy.inject(fault)
    failed, began, number = 0, time.monotonic(), itertools.count(10)
    while failed < FAILURES:
        opened_at = time.monotonic()  # at the earliest
        toy.load(f"bad-{failed}", prompt(TOKENS, next(number)))
        failed = toy.cache.metrics.get("tier_errors", tier="s3")
        assert time.monotonic() < began + HEAL_SECONDS
    asked = settled(proxy)
    for turn in range(20):
        assert toy.load(f"open-{turn}", prompt(TOKENS, next(number)))[::2] == (0, True)
    tries = 1 + int((time.monotonic() - opened_at) / REST_SECONDS)
    assert toy.cache.metrics.get("tier_errors", tier="s3") <= FAILURES + tries - 1
    assert proxy.requests - asked <= (tries - 1) * 2 * 16
    assert set(toy.cache.health().troubles) == {"s3"}
    proxy.inject(Fault.NONE)
    late, turn = time.monotonic() + HEAL_SECONDS, itertools.count()
    while not toy.load(f"again-{next(turn)}", tokens)[0]:
        assert time.monotonic() < late
        time.sleep(0.05)
    assert not toy.cache.health().troubles


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
