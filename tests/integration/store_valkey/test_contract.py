"""The Valkey store on a real server: the contract, what is stored, and a server that is full."""

from __future__ import annotations

import logging

import pytest

from kvtier.identity.record import HEADER_BYTES
from kvtier.storage_backends.valkey import ValkeyStore
from kvtier.testing.records import fetch, is_exact, make_record
from kvtier.testing.store_suite import StoreSuite
from kvtier.testing.toy import dram, opened, prompt
from kvtier.testing.valkey_server import ValkeyServer
from kvtier.tiers.store import Read, Status, Write

pytestmark = pytest.mark.server

MIB = 1 << 20


def key(record: Write) -> bytes:
    name = record.header.id.hex()
    return f"kvtier:{name[:64]}-{name[64:]}".encode()


class TestContract(StoreSuite):
    location = ""

    @pytest.fixture(autouse=True)
    def _at(self, server: ValkeyServer) -> None:
        self.server = server
        server.ask(b"FLUSHALL")

    def open_store(self) -> ValkeyStore:
        return ValkeyStore.open(self.location or self.server.location, self.capacity, {})

    def raw_corrupt(self, record: Write, how: str) -> bool:
        if how == "truncate":
            head = record.header.pack() + bytes(record.data[:1000])
            return self.server.ask(b"SET", key(record), head) == b"+OK\r\n"
        at = 20 if how == "header" else HEADER_BYTES + 777
        byte = (record.header.pack() + record.data)[at]
        length = b":%d\r\n" % (HEADER_BYTES + record.header.stored_bytes)
        return self.server.ask(b"SETRANGE", key(record), b"%d" % at, bytes([byte ^ 1])) == length


class TestContractOnASocket(TestContract):
    @pytest.fixture(autouse=True)
    def _path(self, server: ValkeyServer) -> None:
        self.location = f"//{server.socket}"


def test_another_client_sees_what_is_stored_and_a_new_store_finds_it(server, open_at):
    record = make_record(1, 70_000)
    assert open_at(server).write_many([record]) == [Status.OK]
    assert server.ask(b"STRLEN", key(record)) == b":%d\r\n" % (HEADER_BYTES + 70_000)
    assert is_exact(*fetch(open_at(server), record.header.id, 70_000))


def test_databases_do_not_meet(server, open_at):
    record = make_record(1, 100)
    open_at(server, f"{server.location}/3").write_many([record])
    assert open_at(server, f"{server.location}/4").contains_many([record.header.id]) == [
        Status.ABSENT
    ]


def test_the_same_record_is_not_sent_twice(server, open_at):
    store, record = open_at(server), make_record(1, MIB)
    store.write_many([record])

    def received() -> int:
        said = server.ask(b"INFO", b"stats").decode()
        return int(said.partition("total_net_input_bytes:")[2].split()[0])

    before = received()
    assert store.write_many([record]) == [Status.OK]
    assert received() - before < 10_000


def test_strangers_keys_are_neither_listed_nor_touched(server, open_at):
    server.ask(b"FLUSHALL")
    record, listed = make_record(1, 100), make_record(2, 100)
    strange = [b"notes", b"kvtier:notes", b"kvtier:" + b"z" * 85]
    for name in strange:
        server.ask(b"SET", name, b"x")
    server.ask(b"LPUSH", key(listed), b"x")
    store = open_at(server)
    assert store.write_many([record]) == [Status.OK]
    assert fetch(store, listed.header.id, 100)[0] == Read(Status.CORRUPT)
    assert store.contains_many([listed.header.id]) == [Status.ABSENT]
    assert list(store.scan()) == [record.header]
    assert [server.ask(b"GET", name) for name in strange] == [b"$1\r\nx\r\n"] * 3


# ------------------------------------------------------------------------------ full, and evicting


def test_a_full_server_answers_full_and_goes_on_reading(own, open_at):
    server = own(maxmemory="16mb", maxmemory_policy="noeviction")
    store = open_at(server)
    assert not store.capabilities.self_evicting
    records = [make_record(number, MIB) for number in range(20)]
    found = store.write_many(records)
    assert found[0] is Status.OK
    assert found[-1] is Status.FULL
    assert is_exact(*fetch(store, records[0].header.id, MIB))
    kept = [one.header.id for one, told in zip(records, found, strict=True) if told is Status.OK]
    assert store.delete_many(kept[:4]) == [Status.OK] * 4
    assert store.write_many(records[-1:]) == [Status.OK]


def test_what_the_server_evicts_is_absent(own, open_at):
    store = open_at(own(maxmemory="16mb", maxmemory_policy="allkeys-lru"))
    assert store.capabilities.self_evicting
    records = [make_record(number, MIB) for number in range(24)]
    assert store.write_many(records) == [Status.OK] * 24
    found = [fetch(store, one.header.id, MIB) for one in records]
    there = [read.status is Status.OK for read, _ in found]
    assert 4 < sum(there) < 20
    assert all(is_exact(*one) for one in found if one[0].status is not Status.ABSENT)


def test_evicted_parts_are_a_counted_miss_of_a_cache(own):
    server = own(maxmemory="64mb", maxmemory_policy="allkeys-lru")
    url = f"valkey:{server.location}?capacity=64MiB&admission=through"
    toy = opened(dram(32), url)
    tokens = prompt(400)
    try:
        toy.save("a", tokens)
        toy.cache.clear("dram")
        assert toy.load("b", tokens)[0] == 384
        toy.cache.clear("dram")
        server.ask(b"FLUSHALL")
        assert toy.load("c", tokens) == (0, None, True)
        assert toy.cache.figures()['kvtier_vanished_records_total{tier="valkey"}'] >= 1
        toy.save("d", tokens)
        toy.cache.clear("dram")
        got, loaded, exact = toy.load("e", tokens)
        assert (got, loaded.tokens, exact) == (384, 384, True)
    finally:
        toy.close()


def test_a_server_without_a_limit_and_one_below_the_capacity_are_told_of(own, caplog):
    caplog.set_level(logging.WARNING)
    for options, said in (({}, "give it one"), ({"maxmemory": "4mb"}, "4 MiB, is below")):
        ValkeyStore.open(own(**options).location, 64 * MIB, {}).close()
        assert said in caplog.text
