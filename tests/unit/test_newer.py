"""What a later kvtier wrote to a shared tier: a miss of its own kind, which nobody here spoils."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from msgspec import structs

from kvtier.clock import monotonic
from kvtier.errors import Corrupt, Newer
from kvtier.identity.record import CODEC_LOSSLESS, HEADER_BYTES, KEY_BYTES, Header, record_id
from kvtier.metrics import Metrics
from kvtier.seams import ThreadFlow
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.records import NAMESPACE, make_record, newer_record
from kvtier.testing.span_memory import SpanMemory
from kvtier.tiers import packer as module
from kvtier.tiers.mending import Mending
from kvtier.tiers.pack import CODEC_PACK, CODEC_SIZED_PACK, is_newer
from kvtier.tiers.store import Capabilities, Read, Status, Store, Write
from kvtier.tiers.tier import Tier, Wanted

SIZE = 9000
OK, ABSENT, NEWER = Status.OK, Status.ABSENT, Status.NEWER


def chain(stop: int, first: int = 0) -> list[Write]:
    records: list[Write] = []
    for depth in range(first, stop):
        header, data = make_record(depth, SIZE)
        above = record_id(make_record(depth - 1, 0).header.key, header.part) if depth else None
        records.append(Write(structs.replace(header, parent=above, depth=depth), data))
    return records


class Alone(MemoryStore):
    """A shared store that packs nothing, and reads headers off bytes."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(shared=True)

    def read_many(self, ids: Any, into: Any) -> list[Read]:
        return [self._checked(one) for one in super().read_many(ids, into)]

    @staticmethod
    def _checked(one: Read) -> Read:
        try:
            return one._replace(header=one.header and Header.unpack(one.header.pack()))
        except Newer:
            return Read(NEWER)


class Host:
    """A Tier, and what it is asked."""

    def __init__(self, store: Store) -> None:
        self.metrics, self._flow = Metrics(), ThreadFlow("newer")
        self.tier = Tier("mem", store, self._flow, self.metrics, monotonic)

    def read(self, records: Sequence[Write]) -> list[Status]:
        wanted = [
            Wanted(one.header.id, NAMESPACE, SIZE, memoryview(bytearray(SIZE))) for one in records
        ]
        return [one.status for one in self._flow.spawn(self.tier.read(wanted)).result()]

    def write(self, records: Sequence[Write]) -> list[Status]:
        return self._flow.spawn(self.tier.write(records)).result()

    def finds(self, records: Sequence[Write]) -> None:
        self.tier.learn([one.header.id for one in records], SIZE)

    def close(self) -> None:
        self.tier.close()
        self._flow.close()


@pytest.fixture
def store() -> SpanMemory:
    return SpanMemory()


@pytest.fixture
def new_host() -> Iterator[Callable[[Store], Host]]:
    made: list[Host] = []

    def make(store: Store) -> Host:
        made.append(Host(store))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def alone(new_host) -> Host:
    return new_host(Alone())


def written_anew(store: SpanMemory, codec: int, table: int) -> dict[bytes, Any]:
    """Let all packs be of another version, laid out as nobody here knows after so many bytes."""
    for name, (header, data) in list(store._records.items()):
        body = bytes(data[:table]) + bytes(reversed(data[table:]))
        store._records[name] = structs.replace(header, codec=codec), memoryview(body)
    return dict(store._records)


@pytest.mark.parametrize("table", [0, 8 * KEY_BYTES], ids=["all else", "with the same table"])
@pytest.mark.parametrize("sized", [False, True])
def test_a_pack_of_a_newer_version_is_a_miss_of_its_own_kind(store, new_host, caplog, table, sized):
    host, records = new_host(store), chain(8)
    new_host(store).write(records)
    there = written_anew(store, CODEC_SIZED_PACK + 1, table)
    host.tier._packer.places._sized = sized  # as one that looks first, too
    host.finds(records)
    assert host.read(records) == [NEWER] * 8
    assert host.metrics.get("newer_records", tier="mem") == 8
    assert host.metrics.get("corrupt_records") == 0
    assert "newer version" in caplog.text
    assert "upgrade it" in caplog.text
    assert host.write(records) == [NEWER] * 8
    assert host.write(chain(12, 8)) == [OK] * 4, "others are written"
    assert {name: store._records[name] for name in there} == there
    assert store.deleted == []


def spoils(store: SpanMemory, new_host: Callable[[Store], Host]) -> bool:
    """Say whether a host that finds a newer pack writes over it or deletes it."""
    host, records = new_host(store), chain(8)
    new_host(store).write(records)
    there = written_anew(store, CODEC_SIZED_PACK + 1, 8 * KEY_BYTES)
    host.finds(records)
    assert OK not in host.read(records)
    host.write(records)
    return store._records != there


def test_a_newer_pack_is_left_as_it_is(store, new_host):
    assert not spoils(store, new_host)


def test_twin_if_it_were_taken_for_a_spoilt_one_it_would_be_mended(store, new_host, monkeypatch):
    monkeypatch.setattr(module, "is_newer", lambda head: False)
    assert spoils(store, new_host)


def test_twin_if_nobody_remembered_it_would_be_written_over(store, new_host, monkeypatch):
    monkeypatch.setattr(Mending, "leaves", lambda self, records: False)
    assert spoils(store, new_host)


@pytest.mark.parametrize(
    ("codec", "newer"),
    [(CODEC_PACK, False), (CODEC_SIZED_PACK, False), (0x0103, True), (0x01FF, True)],
)
def test_the_version_of_a_pack_is_that_of_its_codec(codec, newer):
    header = structs.replace(make_record(1, SIZE).header, codec=codec)
    assert is_newer(memoryview(header.pack())) == newer


def test_other_codecs_and_damage_say_nothing_of_a_version():
    header = make_record(1, SIZE).header
    assert not is_newer(memoryview(structs.replace(header, codec=CODEC_LOSSLESS).pack()))
    assert not is_newer(memoryview(bytes(HEADER_BYTES)))
    assert is_newer(memoryview(newer_record(1, SIZE).header.pack()))


def test_a_record_of_a_newer_version_is_left_as_it_is(alone):
    later, mine = newer_record(1, SIZE), make_record(2, SIZE)
    assert alone.tier.store.write_many([later]) == [OK]
    assert alone.read([later, mine]) == [NEWER, ABSENT]
    assert alone.metrics.get("newer_records", tier="mem") == 1
    assert alone.metrics.get("corrupt_records") == 0
    assert alone.write([make_record(1, SIZE), mine]) == [NEWER, OK]
    assert alone.read([later, mine]) == [NEWER, OK]


def test_twin_unremembered_it_would_be_written_over(alone, monkeypatch):
    monkeypatch.setattr(Mending, "leaves", lambda self, records: False)
    assert alone.tier.store.write_many([newer_record(1, SIZE)]) == [OK]
    alone.read([make_record(1, SIZE)])
    alone.write([make_record(1, SIZE)])
    assert alone.read([make_record(1, SIZE)]) == [OK]


def test_what_a_look_up_says_is_newer_is_left_too(alone, monkeypatch):
    record = make_record(1, SIZE)
    monkeypatch.setattr(alone.tier.store, "contains_many", lambda ids: [NEWER] * len(ids))
    asked = alone._flow.spawn(alone.tier.contains([record.header.id])).result()
    assert asked == [NEWER]
    assert alone.write([record]) == [NEWER]
    monkeypatch.undo()
    assert alone._flow.spawn(alone.tier.contains([record.header.id])).result() == [ABSENT]
    assert alone.write([record]) == [OK], "it is gone"


@pytest.mark.parametrize("status", [NEWER, ABSENT])
def test_what_is_newer_changes_under_a_lock_only(status):
    """Look-ups are noted on the loop, reads on the tier's threads."""

    class Taken:
        def __enter__(self) -> None:
            raise BlockingIOError

        def __exit__(self, *_: object) -> None:
            """Never entered."""

    mending = Mending(Alone())
    mending._lock = Taken()
    with pytest.raises(BlockingIOError):
        mending.looked([make_record(1, SIZE).header.id], [status])


def test_only_a_later_version_is_newer_and_only_if_its_header_is_whole():
    older = bytearray(newer_record(1, SIZE).header.pack())
    assert older[8] == 3
    with pytest.raises(Newer, match="upgrade it"):
        Header.unpack(bytes(older))
    older[60] ^= 1
    with pytest.raises(Corrupt) as spoilt:
        Header.unpack(bytes(older))
    assert not isinstance(spoilt.value, Newer)


def sent_twice(host: Host, monkeypatch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Write parts twice to a store that says what is newer when it is written to, and not before.

    Returns how many records were sent each time.
    """
    sent = []

    def newer(records: Sequence[Write]) -> list[Status]:
        sent.append(len(records))
        return [NEWER] * len(records)

    monkeypatch.setattr(host.tier.store, "write_many", newer)
    told, records = [], chain(count)
    for _ in range(2):
        sent.clear()
        assert host.write(records) == [NEWER] * count
        told.append(sum(sent))
    return told


@pytest.mark.parametrize("store", [Alone, SpanMemory])
def test_what_is_met_by_a_write_is_left_from_then_on(new_host, monkeypatch, store):
    assert sent_twice(new_host(store()), monkeypatch, 4) == [4 if store is Alone else 1, 0]


@pytest.mark.parametrize("store", [Alone, SpanMemory])
def test_it_would_be_sent_again_and_again(new_host, monkeypatch, store):
    monkeypatch.setattr(Mending, "leave", lambda *_: None)
    first, again = sent_twice(new_host(store()), monkeypatch, 4)
    assert first == again
