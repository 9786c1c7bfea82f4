"""When a codec pays: by what the link and the codec took, both measured."""

from __future__ import annotations

import itertools

import pytest

from kvtier.codecs.lossless import Lossless
from kvtier.identity.record import CODEC_LOSSLESS
from kvtier.metrics import Metrics
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.records import NAMESPACE, aligned, make_record
from kvtier.tiers import coding
from kvtier.tiers.coding import Coding, send_each

SIZE = 40_000


class Weather:
    """A clock, a store and a codec that take as long as they are told, per raw byte."""

    def __init__(self) -> None:
        self.now = 0.0
        self.down = self.up = self.encode = self.decode = self.latency = 0.0
        weather = self

        class Slow(MemoryStore):
            def write_many(self, records):
                nbytes = sum(one.header.stored_bytes for one in records)
                weather.now += weather.latency + nbytes * weather.down
                return super().write_many(records)

            def read_many(self, ids, into):
                reads = super().read_many(ids, into)
                weather.now += sum(one.header.stored_bytes for one in reads) * weather.up
                return reads

        class Timed(Lossless):
            def encode(self, raw, into):
                weather.now += len(raw) * weather.encode
                return super().encode(raw, into)

            def decode(self, stored, into):
                weather.now += len(into) * weather.decode
                return super().decode(stored, into)

        self.metrics = Metrics()
        self.store = Slow()
        self.coding = Coding("mem", Timed(), lambda: self.now, self.metrics, always=False)
        self.coding.admit(NAMESPACE)
        self.number = 0

    def write(self, count: int = 1, *, like_kv: bool = True) -> list[bool]:
        """Write records of several sizes; say of each whether it was encoded."""
        out = []
        for _ in range(count):
            self.number += 1
            size = SIZE * (1 + self.number % 3)
            record = make_record(self.number, size, like_kv=like_kv)
            (one,) = send_each(self.store, [record], self.coding)
            out.append(one.header.codec == CODEC_LOSSLESS)
        return out

    def read(self) -> None:
        """Read two records."""
        for number in (self.number, self.number - 1):
            header, _ = self.store._records[make_record(number, 0).header.id]
            began = self.now
            reads = self.store.read_many([header.id], [aligned(header.raw_bytes)])
            self.coding.received(reads, self.now - began)


@pytest.fixture
def weather(monkeypatch):
    monkeypatch.setattr(coding, "_TELLING_BYTES", 1)  # a million bytes take too long to encode
    one = Weather()
    one.encode, one.decode = 2e-9, 1e-9
    return one


def test_before_the_link_is_known_nothing_is_encoded_and_then_what_pays(weather):
    weather.down = 100e-9
    assert weather.write(4) == [False, True, True, True]
    assert weather.metrics.get("unencoded_bytes", tier="mem", reason="link") == 2 * SIZE


def test_over_a_fast_link_nothing_is_encoded(weather):
    weather.down = 1e-9
    assert not any(weather.write(100))


def test_the_way_there_and_back_of_small_records_is_no_slow_link(weather, monkeypatch):
    monkeypatch.undo()
    weather.latency = 0.005
    assert not any(weather.write(20))


def test_twin_if_small_records_told_of_the_link_they_would_be_encoded(weather):
    weather.latency = 0.005
    assert any(weather.write(20))


def test_both_ways_of_the_link_count(weather):
    """About a quarter is saved: at 5 ns a byte down that is less than the 3 ns of the codec."""
    weather.down = 5e-9
    assert not any(weather.write(10))
    weather.up = 30e-9
    weather.read()
    assert all(weather.write(10))


def test_the_cost_of_decoding_counts(weather):
    weather.decode = 200e-9
    weather.down = 100e-9
    assert not any(weather.write(10))


def test_when_the_link_becomes_slow_it_is_encoded_and_when_fast_no_more(weather):
    weather.down = 1e-9
    assert not any(weather.write(20))
    weather.down = 200e-9
    weather.write(5)
    assert all(weather.write(20))
    weather.down = 0.1e-9
    weather.write(20)
    assert not any(weather.write(5))


def changes(weather) -> int:
    """Let the link waver by a tenth about where both ways take the same; count the changes."""
    out = []
    for number in range(100):
        weather.down = (11 if number % 10 < 5 else 9) * 1e-9
        weather.up = weather.down
        out += weather.write(2)
        weather.read()
    return sum(one != other for one, other in itertools.pairwise(out))


@pytest.fixture
def even(weather):
    """Return a codec that takes about as long as the link does for what it saves."""
    weather.encode, weather.decode = 4e-9, 2e-9
    return weather


def test_where_both_ways_take_about_the_same_there_is_no_to_and_fro(even):
    assert changes(even) <= 1


def test_twin_without_a_margin_there_would_be(even, monkeypatch):
    monkeypatch.setattr(coding, "_MARGIN", 1.0)
    assert changes(even) > 5


def test_noise_over_a_slow_link_is_tried_now_and_then_only(weather):
    weather.down = 200e-9
    weather.write(150, like_kv=False)
    encoded = weather.metrics.get("unencoded_bytes", tier="mem", reason="link")
    assert encoded == weather.metrics.get("unencoded_bytes")
    tried = sum(1 for at in range(150) if at % 64 == 0)
    assert weather.coding._passed == 150
    assert tried == 3
    assert weather.write(100)[-1], "what it becomes later is found out"


def test_gauges_say_what_the_codec_does(weather):
    weather.down = 100e-9
    weather.write(10)
    weather.coding.figures()
    get = weather.metrics.get
    assert get("codec_bytes_per_second", tier="mem", verb="encode") == pytest.approx(0.5e9)
    assert get("codec_bytes_per_second", tier="mem", verb="decode") == pytest.approx(1e9)
