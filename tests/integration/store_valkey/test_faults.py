"""The Valkey store on servers that hang, start again, and break off in the middle of a reply."""

from __future__ import annotations

import pytest

from kvtier.errors import StoreError, Unavailable
from kvtier.identity.record import HEADER_BYTES
from kvtier.storage_backends.valkey import ValkeyStore
from kvtier.storage_backends.valkey_link import Link
from kvtier.storage_backends.valkey_service import Settings, connector, parse_location
from kvtier.testing.bounded import own_clock
from kvtier.testing.records import make_record
from kvtier.testing.toy import dram, opened, prompt
from kvtier.tiers.store import Status, Write

pytestmark = pytest.mark.server

TIMEOUT = 0.4  # of the stores that tests open
SLACK = 0.5  # what a busy machine may take besides


def statuses(store: ValkeyStore, *records: Write) -> list[Status]:
    buffers = [memoryview(bytearray(len(one.data))) for one in records]
    return [one.status for one in store.read_many([one.header.id for one in records], buffers)]


def test_a_server_that_hangs_costs_a_batch_one_timeout_and_is_met_again(own, open_at):
    server = own()
    store = open_at(server)
    records = [make_record(number, 100_000) for number in range(20)]
    absent = make_record(99, 1).header.id
    store.write_many(records)
    server.pause()
    for call in (
        lambda: statuses(store, *records),
        lambda: store.contains_many([one.header.id for one in records]),
        lambda: store.write_many(records),
        lambda: store.delete_many([absent]),
        lambda: list(store.scan()),
    ):
        began = own_clock()
        with pytest.raises(Unavailable, match=r"no whole reply within|timed out"):
            call()
        assert own_clock() - began < TIMEOUT + SLACK
    server.resume()
    assert statuses(store, *records) == [Status.OK] * 20


def test_a_server_that_starts_again_is_met_at_once(own, open_at):
    server = own()
    store = open_at(server)
    record = make_record(1, 100_000)
    store.write_many([record])
    server.kill()
    with pytest.raises(Unavailable, match="check host and port"):
        statuses(store, record)
    server.start()
    assert statuses(store, record) == [Status.ABSENT]
    assert store.write_many([record]) == [Status.OK]
    assert statuses(store, record) == [Status.OK]


@pytest.mark.parametrize("cut", [0, 5, 100, HEADER_BYTES + 3, 5000])
def test_a_reply_that_ends_early_is_no_record(server, open_at, scripted, monkeypatch, cut):
    """The connection of the reply is let go; the rest of the batch comes over another one."""
    store = open_at(server)
    records = [make_record(number, 10_000) for number in range(3)]
    assert store.write_many(records) == [Status.OK] * 3
    whole = records[1].header.pack() + bytes(records[1].data)
    other = scripted((b"$%d\r\n" % len(whole) + whole)[:cut])
    links = store._links
    real = links._connect
    broken = [connector(parse_location(other.location), Settings(TIMEOUT, TIMEOUT, "no"))]

    def connect() -> Link:
        return broken.pop()() if broken else real()

    monkeypatch.setattr(links, "_connect", connect)
    links._forget()
    found = statuses(store, records[1], records[0], records[2])
    assert found == [Status.FAILED, Status.OK, Status.OK]


def test_a_closed_store_says_so(server, open_at):
    store = open_at(server)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.contains_many([make_record(1, 1).header.id])


def test_two_caches_share_what_one_of_them_saved(server):
    server.ask(b"FLUSHALL")
    url = f"valkey:{server.location}?capacity=64MiB&admission=through"
    one, other = opened(dram(32), url), opened(dram(32), url)
    tokens = prompt(400)
    try:
        one.save("a", tokens)
        got, loaded, exact = other.load("b", tokens)
    finally:
        one.close()
        other.close()
    assert (got, loaded.tokens, exact) == (384, 384, True)
