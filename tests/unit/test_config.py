"""Configuration: every mistake is one ConfigError that shows the way, before anything is opened."""

from __future__ import annotations

import dataclasses
import os
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kvtier import config as module
from kvtier.config import Config, TierConfig, load_store, parse_tier, store_types
from kvtier.errors import ConfigError
from kvtier.tiers.store import Option, Store

LMDB = "lmdb:/kv?capacity=1GiB"
BUILT_IN = {"files", "lmdb", "memory", "mooncake", "s3", "valkey"}


# ------------------------------------------------------------------------------------------ right


def test_tiers_keep_their_order_and_options_get_their_defaults():
    urls = ["dram:8GiB", LMDB, "s3://bucket/prefix?capacity=unbounded&admission=second-touch"]
    config = Config.from_urls(urls)
    assert config.dram == 8 << 30
    lmdb, s3 = config.tiers
    assert lmdb == TierConfig("lmdb", "/kv", 1 << 30, None, {"durability": "batch"})
    assert (s3.scheme, s3.location, s3.capacity) == ("s3", "//bucket/prefix", None)
    assert s3.admission == "second-touch"
    assert set(s3.options) == set(load_store(store_types()["s3"]).OPTIONS)


def test_options_are_read_by_the_store():
    assert parse_tier("lmdb:/kv?durability=each&capacity=1GiB").options == {"durability": "each"}
    s3 = parse_tier("s3://b/p?capacity=1TiB&read_timeout=250ms&endpoint=http%3A%2F%2Flocalhost%3A1")
    assert s3.options["read_timeout"] == 0.25
    assert s3.options["endpoint"] == "http://localhost:1"


def test_options_begin_after_the_last_question_mark():
    tier = parse_tier("lmdb:/kv of 50% & more?/now?capacity=1GiB")
    assert (tier.location, tier.capacity) == ("/kv of 50% & more?/now", 1 << 30)


def test_a_file_says_the_same_as_urls(tmp_path: Path):
    path = tmp_path / "kvtier.toml"
    path.write_text(f'# a cache\ntiers = ["dram:8GiB", "{LMDB}"]\n')
    assert Config.from_toml(str(path)) == Config.from_toml(path)
    assert Config.from_toml(path) == Config.from_urls(["dram:8GiB", LMDB])


def test_a_configuration_is_frozen():
    config = Config.from_urls(["dram:1GiB", LMDB])
    for frozen, name in ((config, "dram"), (config.tiers[0], "capacity")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, name, 5)


# ------------------------------------------------------------------------------------------ wrong

WRONG_URLS = {
    "unknown tier": ("lmbd:/kv?capacity=1GiB", "unknown tier 'lmbd'; did you mean 'lmdb'?"),
    "far tier": ("floppy:/kv", "choose from: dram, files, lmdb, memory"),
    "a daemon": ("unix:/run/kv.sock", "unix: is a daemon, and no tier of another cache; open it a"),
    "a daemon by another name": ("daemon:///run/kv.sock", "is 'unix:/run/kv.sock' meant?"),
    "a socket alone": ("/run/kv.sock?timeout=1s", "by its socket: is 'unix:/run/kv.sock' meant?"),
    "no scheme": ("/var/lib/kv?capacity=1GiB", "unknown tier"),
    "no colon": ("lmdb", "needs a colon: lmdb:"),
    "nothing": ("", "unknown tier ''"),
    "no place": ("lmdb:?capacity=1GiB", "needs a place"),
    "unknown option": (LMDB + "&durabilty=each", "'durabilty'; did you mean 'durability'?"),
    "another tier's option": (LMDB + "&region=x", "unknown option of lmdb 'region'"),
    "option of its own misspelt": ("lmdb:/kv?capcity=1GiB", "did you mean 'capacity'?"),
    "option in capitals": ("lmdb:/kv?Capacity=1GiB", "did you mean 'capacity'?"),
    "wrong value": (LMDB + "&durability=always", "durability"),
    "no capacity": ("lmdb:/kv", "has no capacity; add ?capacity=200GiB"),
    "no capacity but options": ("lmdb:/kv?durability=each", "add ?capacity=200GiB, say"),
    "empty capacity": ("lmdb:/kv?capacity=", "'' is not a size"),
    "capacity without unit": ("lmdb:/kv?capacity=100", "no known unit"),
    "negative capacity": ("lmdb:/kv?capacity=-1GiB", "is not a size"),
    "infinite capacity": ("lmdb:/kv?capacity=infGiB", "is not a size"),
    "duration without unit": ("s3://b?capacity=1TiB&read_timeout=5", "5"),
    "unknown admission": (LMDB + "&admission=second_touch", "did you mean 'second-touch'?"),
    "empty admission": (LMDB + "&admission=", "choose from: auto, on-evict, second-touch, through"),
    "empty option": (LMDB + "&durability=", "durability"),
    "option twice": (LMDB + "&capacity=2GiB", "given twice"),
    "empty option twice": (LMDB + "&durability=&durability=", "given twice"),
    "malformed query": ("lmdb:/kv?capacity", "must look like ?capacity=8GiB&a=b"),
    "stray ampersand": (LMDB + "&", "must look like"),
    "two question marks": (LMDB + "?durability=each", "1GiB?durability=each' has no capacity"),
    "secret of s3": ("s3://b?capacity=1TiB&secret_key=x", "in a URL; set AWS_ACCESS_KEY_ID and A"),
    "key of s3": ("s3://b?capacity=1TiB&aws_access_key_id=x", "a profile by AWS_PROFILE, or an i"),
    "password of valkey": ("valkey://h?password=x", "set KVTIER_VALKEY_PASSWORD, and KVTIER_VALK"),
    "no secret at all": ("s3://b?capacity=1TiB&key_prefix=x", "unknown option of s3 'key_prefix'"),
    "secret of what has none": (LMDB + "&secret=x", "unknown option of lmdb 'secret'"),
    "endpoint that is none": ("s3://b?capacity=1TiB&endpoint=localhost:9000", "endpoint"),
}


@pytest.mark.parametrize(("url", "message"), WRONG_URLS.values(), ids=WRONG_URLS)
def test_a_wrong_tier_is_one_error_that_shows_the_way(url: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.from_urls(["dram:1GiB", url])


WRONG_LISTS: dict[str, tuple[list[str], str]] = {
    "no tiers": ([], "begins with one dram tier"),
    "no dram": ([LMDB], "begins with one dram tier, such as dram:8GiB"),
    "dram not first": ([LMDB, "dram:1GiB"], "begins with one dram tier"),
    "dram twice": (["dram:1GiB", "dram:1GiB"], "begins with one dram tier"),
    "same place twice": (["dram:1GiB", LMDB, "lmdb:/kv?capacity=2GiB"], "the same place"),
    "dram without size": (["dram:"], "is not a size"),
    "dram without unit": (["dram:8"], "no known unit"),
    "dram unbounded": (["dram:unbounded"], "is not a size"),
    "dram with options": (["dram:8GiB?capacity=8GiB"], "unknown option of dram 'capacity'"),
}


@pytest.mark.parametrize(("urls", "message"), WRONG_LISTS.values(), ids=WRONG_LISTS)
def test_a_wrong_list_of_tiers_is_one_error(urls: list[str], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.from_urls(urls)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"capacity": -5}, "whole number from 1 on"),
        ({"capacity": 0}, "whole number from 1 on"),
        ({"admission": "second_touch"}, "did you mean 'second-touch'?"),
    ],
)
def test_a_tier_made_by_hand_is_checked_too(wrong: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        TierConfig("memory", "x", **{"capacity": 1 << 20, **wrong})


WRONG_FILES = {
    "bad TOML": (b"tiers = [", "is not TOML"),
    "not UTF-8": (b'tiers = ["dram:\xff"]', "is not TOML"),
    "unknown key": (b'tier = ["dram:8GiB"]', "unknown option 'tier'; did you mean 'tiers'?"),
    "one key too many": (b'tiers = ["dram:8GiB"]\ncolour = 1', "unknown option 'colour'"),
    "empty": (b"", "needs tiers ="),
    "too deep": (b"tiers = " + b"[" * 9999, "is not TOML: too long a number, or too deep"),
    "a number too long": (b"tiers = " + b"9" * 9999, "is not TOML: too long a number, or"),
    "a string": (b'tiers = "dram:8GiB"', "needs tiers ="),
    "numbers": (b"tiers = [8]", "needs tiers ="),
    "no dram": (b"tiers = []", "begins with one dram tier"),
}


@pytest.mark.parametrize(("text", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_wrong_file_is_one_error(tmp_path: Path, text: bytes, message: str):
    path = tmp_path / "kvtier.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.from_toml(path)


def test_a_file_that_cannot_be_read_is_named_with_the_cause(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read .*absent.toml: No such file"):
        Config.from_toml(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        Config.from_toml(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read /dev/zero: it is larger than 16 MiB"):
        Config.from_toml("/dev/zero")


def test_a_pipe_has_settings_as_well_as_a_file():
    reading, writing = os.pipe()
    os.write(writing, b'tiers = ["dram:8MiB"]')
    os.close(writing)
    assert Config.from_toml(f"/dev/fd/{reading}").dram == 8 << 20
    os.close(reading)


def test_dropped_by_the_parser_an_empty_value_would_go_unseen(monkeypatch):
    """The twin: parse_qsl without blank values forgets what has none."""
    real = module.parse_qsl
    monkeypatch.setattr(module, "parse_qsl", lambda query, **_: real(query, strict_parsing=True))
    assert parse_tier(LMDB + "&durability=").options == {"durability": "batch"}


def test_a_store_that_cannot_be_imported_is_named():
    entry = EntryPoint("broken", "kvtier.no_such_module:Store", module._GROUP)
    with pytest.raises(ConfigError, match="'broken' cannot be loaded"):
        load_store(entry)


# ----------------------------------------------------------------------------------------- limits


def built_in() -> dict[str, type[Store]]:
    return {name: load_store(store_types()[name]) for name in sorted(BUILT_IN)}


def count_options(stores: dict[str, type[Store]]) -> int:
    own = [*dataclasses.fields(Config), *dataclasses.fields(TierConfig)]
    return len(own) + sum(len(store.OPTIONS) for store in stores.values())


def test_there_are_at_most_forty_options():
    assert set(store_types()) >= BUILT_IN
    assert 0 < count_options(built_in()) <= 40


def test_too_many_options_would_show():
    class Many:
        OPTIONS: dict[str, Any] = dict.fromkeys(map(str, range(40)))

    assert count_options({"many": Many}) > 40


SECRETS = re.compile(r"secret|passw|token|credential|access_?key|api_?key|session")


def test_no_option_asks_for_a_secret():
    names = [name for store in built_in().values() for name in store.OPTIONS]
    assert names
    assert not [name for name in names if SECRETS.search(name)]
    assert SECRETS.search("secret_access_key")


@pytest.mark.parametrize(
    "url",
    [
        "s3://b?capacity=1TiB&secret_access_key=hunter2",
        "s3://b?secret_access_key=hunter2&a",
        "s3://b?SecretKey=hunter2&a=1&a=2",
        "s3://me:hunter2@b/p",
        "s3://me:hunter2@b/p?a",
        "s3://me:hunter2@b/p?capacity=1TiB&capacity=1TiB",
    ],
)
def test_no_error_repeats_a_secret(url: str):
    with pytest.raises(ConfigError) as caught:
        parse_tier(url)
    assert "hunter2" not in str(caught.value)


def test_every_option_has_a_plain_name_and_a_help():
    for store in built_in().values():
        for name, option in store.OPTIONS.items():
            assert isinstance(option, Option)
            assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
            assert option.help
