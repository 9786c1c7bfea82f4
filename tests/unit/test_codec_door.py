"""Codecs by name: a stranger's comes through the door, is tried there, and does no harm."""

from __future__ import annotations

import sys

import pytest

import kvtier
from kvtier.codecs import door, known
from kvtier.codecs.door import check_codec, load_codec
from kvtier.codecs.known import KNOWN, LOSSLESS
from kvtier.config import Config, TierConfig
from kvtier.errors import ConfigError
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing import toy as module
from kvtier.testing.toy import CHUNK, NAMESPACE, Toy, prompt

STRANGER = """
import zlib


class Deflate:
    name, number, element_bytes = "deflate", 0x8001, 0
    luck = True

    def encode(self, raw, into):
        if not self.luck:
            raise RuntimeError("no luck today")
        data = zlib.compress(raw, 1)
        if len(data) > len(into):
            return 0
        into[:len(data)] = data
        return len(data)

    def decode(self, stored, into):
        data = zlib.decompress(bytes(stored))
        into[:len(data)] = data
        return len(data) == len(into)


class Low(Deflate):
    number = 0x0201


class Wide(Deflate):
    element_bytes = None


class Forgetful(Deflate):
    def decode(self, stored, into):
        return True


class Long(Deflate):
    def encode(self, raw, into):
        return len(raw) + 1


class Refuses(Deflate):
    def decode(self, stored, into):
        return False


class Half:
    name, number, element_bytes = "half", 0x8002, 0


class Second(Deflate):
    name = "second"


def broken():
    raise RuntimeError("no luck today")
"""
ABOUT = "Metadata-Version: 2.1\nName: stranger-codecs\nVersion: 1.0\n"
NAMES = ["Deflate", "Low", "Wide", "Forgetful", "Long", "Refuses", "Half", "Second", "broken"]
TOKENS = prompt(4 * CHUNK + 1)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a distribution that brings codecs, and forget it at the end."""
    (tmp_path / "stranger_codecs.py").write_text(STRANGER)
    about = tmp_path / "stranger_codecs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(ABOUT)
    entries = [f"{name.lower()} = stranger_codecs:{name}" for name in NAMES]
    entries.append("absent = no_such_codecs:Codec")
    (about / "entry_points.txt").write_text("\n".join(["[kvtier.codecs]", *entries]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(known, "_known", before := dict(KNOWN))
    for where in (known, door, sys.modules["kvtier.tiers.exact"]):
        monkeypatch.setattr(where, "KNOWN", before)
    load_codec.cache_clear()
    yield
    load_codec.cache_clear()
    sys.modules.pop("stranger_codecs", None)


@pytest.fixture
def host(monkeypatch):
    """Open hosts with a tier in a store that they share; their KV has something to save."""
    monkeypatch.setattr(
        module, "pattern", lambda tokens: module.np.full((2, 2, 16, 2, 8), len(tokens), "<u2")
    )
    toys: list[Toy] = []

    def opened(store: MemoryStore, codec: str) -> Toy:
        below = TierConfig("memory", "", 1 << 20, "through", store=store, codec=codec)
        toys.append(Toy(kvtier.open(Config(1 << 20, (below,)), namespace=NAMESPACE)))
        return toys[-1]

    yield opened
    for toy in toys:
        toy.close()


def test_the_built_in_ones_need_no_look_at_what_is_installed(monkeypatch):
    monkeypatch.setattr(door, "codec_types", lambda: pytest.fail("it looked"))
    for name in ("auto", "raw", "lossless"):
        check_codec(name)
    assert load_codec("auto") is load_codec("lossless") is LOSSLESS


@pytest.mark.parametrize(
    ("name", "said"),
    [("losless", "unknown codec 'losless'; did you mean 'lossless'?"), ("", "choose from: auto")],
)
def test_a_codec_that_there_is_not_is_an_error_that_names_the_nearest(name, said):
    with pytest.raises(ConfigError) as caught:
        Config.from_urls(["dram:1MiB", f"memory:x?capacity=1MiB&codec={name}"])
    assert said in str(caught.value)


def test_a_strangers_codec_writes_and_reads(installed, host):
    config = Config.from_urls(["dram:1MiB", "memory:x?capacity=1MiB&codec=deflate"])
    assert config.tiers[0].codec == "deflate"
    assert "stranger_codecs" not in sys.modules, "only a cache needs it"
    store = MemoryStore()
    toy = host(store, "deflate")
    toy.save("a", TOKENS)
    assert {header.codec for header in store.scan()} == {0x8001}
    toy.cache.clear("dram", timeout=20)
    assert toy.load("b", TOKENS)[::2] == (4 * CHUNK, True)
    assert toy.cache.metrics.get("decoded_bytes", tier="memory") > 0


def test_who_did_not_name_it_misses_with_the_cause(installed, host, caplog):
    store = MemoryStore()
    toy = host(store, "deflate")
    toy.save("a", TOKENS)
    toy.cache.clear("dram", timeout=20)
    del known._known[0x8001]
    assert toy.load("b", TOKENS)[1:] == (None, True)
    assert toy.cache.metrics.get("tier_faults", tier="memory", reason="unknown codec") >= 1
    assert "the codec plug-in 0x8001, which is not known here" in caplog.text


def test_twin_unguarded_it_would_fail_its_tier(installed, host, monkeypatch):
    monkeypatch.setattr(door, "_Guarded", lambda codec: codec)
    toy = host(MemoryStore(), "deflate")
    sys.modules["stranger_codecs"].Deflate.luck = False
    toy.save("a", TOKENS)
    assert toy.cache.metrics.get("tier_errors", tier="memory") > 0


@pytest.mark.parametrize("verb", ["encode", "decode"])
def test_what_a_codec_raises_is_told_and_costs_no_more_than_itself(installed, host, verb, caplog):
    store = MemoryStore()
    toy = host(store, "deflate")
    deflate = sys.modules["stranger_codecs"].Deflate
    if verb == "encode":
        deflate.luck = False
    toy.save("a", TOKENS)
    toy.cache.clear("dram", timeout=20)
    if verb == "decode":
        deflate.decode = sys.modules["stranger_codecs"].broken
    loaded = toy.load("b", TOKENS)[1]
    assert (loaded is None) == (verb == "decode")
    assert f"codec deflate: {verb}: " in caplog.text
    assert toy.cache.metrics.get("tier_errors", tier="memory") == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("low", "has the number 513, which is not from 0x8000 to 0xffff"),
        ("wide", "is for elements of None bytes"),
        ("forgetful", "does not give back what it was given"),
        ("long", "takes 65537 bytes for 65536, and does not decode them"),
        ("refuses", "and does not decode them"),
        ("half", "cannot be loaded: AttributeError"),
        ("broken", "cannot be loaded: RuntimeError: no luck today"),
        ("absent", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_plug_in_that_is_none_is_refused_at_opening(installed, host, name, said):
    with pytest.raises(ConfigError) as caught:
        host(MemoryStore(), name)
    assert said in str(caught.value)
    assert set(KNOWN) == {0, 0x0201}


def test_two_plug_ins_of_one_number_are_refused(installed):
    load_codec("deflate")
    with pytest.raises(ConfigError, match="has the number 0x8001 of 'deflate'"):
        load_codec("second")
