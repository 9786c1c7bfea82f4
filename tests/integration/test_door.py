"""What opening a cache refuses: one ConfigError that says what is wrong and what would do."""

from __future__ import annotations

import re

import pytest

import kvtier
from kvtier.config import Config, TierConfig
from kvtier.testing.toy import CHUNK, CHUNK_BYTES, GEOMETRY, NAMESPACE, Toy, prompt

pytestmark = pytest.mark.everywhere

DRAM = "dram:4MiB"


def refused(*tiers, **given):
    with pytest.raises(kvtier.ConfigError) as why:
        kvtier.open(*tiers, **{"namespace": NAMESPACE, **given})
    return str(why.value)


@pytest.mark.parametrize("place", ["memory:x", "lmdb:kv"])
@pytest.mark.inside("names a place from this process's folder on")
def test_a_tier_below_one_chunk_is_refused_and_what_it_asks_for_holds_one(
    tmp_path, monkeypatch, place
):
    monkeypatch.chdir(tmp_path)
    least = CHUNK_BYTES if place == "memory:x" else 2_424_832  # what its index takes
    said = refused(DRAM, f"{place}?capacity={least}B")
    assert "is below one chunk" in said
    [enough] = re.findall(r"which takes (.+) there", said)
    with kvtier.open(DRAM, f"{place}?capacity={enough}", namespace=NAMESPACE) as cache:
        toy = Toy(cache)
        toy.save("a", prompt(CHUNK))
        cache.clear("dram")
        got, _, exact = toy.load("b", prompt(CHUNK + 1))
        toy.connector.close()
        toy.device.close()
    assert (got, exact) == (CHUNK, True)


def test_a_directory_is_let_go_when_it_is_refused(tmp_path):
    assert "below one chunk" in refused(DRAM, f"lmdb:{tmp_path}?capacity=2424832B")
    kvtier.open(DRAM, f"lmdb:{tmp_path}?capacity=64MiB", namespace=NAMESPACE).close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"namespace": None}, "namespace must be a Namespace, not None"),
        ({"namespace": "model"}, "namespace must be a Namespace, not 'model'"),
        ({"shards": 0}, "shards must be a whole number from 1 to 65535, not 0"),
        ({"shards": "2"}, "not '2'"),
        ({"shards": 1.0}, "not 1.0"),
    ],
)
def test_what_is_no_namespace_and_no_number_of_shards_is_named(given, said):
    assert said in refused(DRAM, **given)


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        (TierConfig("lmbd", "/kv", 1 << 30), "unknown tier 'lmbd'; did you mean 'lmdb'?"),
        (
            TierConfig("lmdb", "/kv", 1 << 30, options={"durabilty": "each"}),
            "did you mean 'durability'?",
        ),
    ],
)
@pytest.mark.inside("a daemon takes URLs")
def test_a_configuration_made_by_hand_is_checked_too(tier, said):
    assert said in refused(Config(4 << 20, (tier,)))


@pytest.mark.parametrize("name", ["a\0b", "a\udcffb", "~nobody-of-that-name/kv"])
def test_a_name_that_no_directory_can_have_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert "names no directory" in refused(DRAM, f"lmdb:{name}?capacity=64MiB")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_directory_is_named(tmp_path):
    (tmp_path / "kv").write_text("mine")
    for place in ("kv", "kv/below"):
        said = refused(DRAM, f"lmdb:{tmp_path / place}?capacity=64MiB")
        assert "not a directory" in said
    assert (tmp_path / "kv").read_text() == "mine"


@pytest.mark.inside("changes this process's HOME")
def test_a_home_and_a_question_mark_are_places_like_others(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    kvtier.open(DRAM, "lmdb:~/what? é/kv?capacity=64MiB", namespace=NAMESPACE).close()
    assert (tmp_path / "what? é" / "kv" / "format").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"components": GEOMETRY.components[0]}, "is a tuple"),
        ({"components": ()}, "at least one component"),
        ({"block_tokens": 16}, r"write \(16,\)"),
        ({"block_tokens": (48,)}, "the nearest that fits is 240"),
        ({"block_tokens": (16384,)}, "no chunk of at most 8192 tokens fits"),
    ],
)
def test_a_geometry_that_fits_nothing_is_refused(given, said):
    with pytest.raises(kvtier.ConfigError, match=said):
        kvtier.Geometry(**{"components": GEOMETRY.components, **given})


def test_a_namespace_needs_a_geometry():
    with pytest.raises(kvtier.ConfigError, match="must be a Geometry, not None"):
        kvtier.Namespace("model", None)
