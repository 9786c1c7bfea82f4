"""Policies by name: the built-in ones and a stranger's come through the same door."""

from __future__ import annotations

import sys

import pytest

import kvtier
from kvtier.cli.main import run
from kvtier.config import Config, TierConfig
from kvtier.errors import ConfigError
from kvtier.policies.arc import Arc
from kvtier.policies.base import Policy
from kvtier.policies.door import load_policy, policy_types
from kvtier.policies.lru import Lru
from kvtier.policies.s3fifo import S3Fifo
from kvtier.storage_backends.memory import MemoryStore
from kvtier.testing.inside import inside
from kvtier.testing.toy import CHUNK, CHUNK_BYTES, NAMESPACE, Toy, prompt

BUILT_IN = {"arc", "lfu", "lru", "s3fifo"}
STRANGER = """
from kvtier.policies.lru import Lru


class Last(Lru):
    made = 0

    def __init__(self):
        Last.made += 1
        super().__init__()

    @classmethod
    def together(cls):
        return cls

    def victims(self):
        return iter(list(super().victims())[::-1])


class Half:
    def insert(self, row, key, parent=-1): ...


def broken():
    raise RuntimeError("no luck today")
"""
ABOUT = "Metadata-Version: 2.1\nName: stranger-policies\nVersion: 1.0\n"
ENTRIES = """[kvtier.policies]
last-first = stranger_policies:Last
half = stranger_policies:Half
broken = stranger_policies:broken
absent = no_such_policies:Policy
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a distribution that brings policies."""
    (tmp_path / "stranger_policies.py").write_text(STRANGER)
    about = tmp_path / "stranger_policies-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(ABOUT)
    (about / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("stranger_policies", None)


def test_each_tier_has_the_policy_that_it_names():
    below = TierConfig("memory", "", 1 << 20, "through", store=MemoryStore(), policy="s3fifo")
    with kvtier.open(Config(1 << 20, (below,), policy="arc"), namespace=NAMESPACE) as cache:
        dram, memory = inside(cache).depot._shelves
        assert isinstance(dram.policy(), Arc)
        assert isinstance(memory.policy(), S3Fifo)


def test_urls_and_files_name_policies(tmp_path):
    urls = ["dram:1MiB?policy=arc", "memory:x?capacity=1MiB&policy=lfu", "memory:y?capacity=1MiB"]
    config = Config.from_urls(urls)
    assert [config.policy, *(tier.policy for tier in config.tiers)] == ["arc", "lfu", "lru"]
    file = tmp_path / "kvtier.toml"
    file.write_text(f"tiers = {urls}\n")
    assert Config.from_toml(file) == config


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        (["dram:1MiB?policy=acr"], "unknown policy 'acr'; did you mean 'arc'?"),
        (["dram:1MiB", "memory:x?capacity=1MiB&policy=lur"], "did you mean 'lru'?"),
        (["dram:1MiB?policy="], "unknown policy ''; choose from: arc, lfu, lru, s3fifo"),
        (["dram:1MiB?polcy=arc"], "unknown option of dram 'polcy'; did you mean 'policy'?"),
    ],
)
def test_a_wrong_name_is_an_error_that_names_the_nearest(urls, said):
    with pytest.raises(ConfigError) as caught:
        Config.from_urls(urls)
    assert said in str(caught.value)


def test_the_built_in_ones_are_installed_like_any_other():
    assert set(policy_types()) >= BUILT_IN
    for name in BUILT_IN:
        assert isinstance(load_policy(name)(), Policy)
    assert isinstance(load_policy("lru")(), Lru)


def test_the_default_needs_no_look_at_what_is_installed(monkeypatch):
    """That takes tens of milliseconds of a start; any other policy takes them."""
    monkeypatch.setattr("kvtier.policies.door.policy_types", dict)
    assert isinstance(load_policy("lru")(), Lru)
    with pytest.raises(ConfigError, match="arc"):
        load_policy("arc")


def test_a_strangers_policy_is_loaded_when_a_cache_needs_it(installed):
    config = Config.from_urls([f"dram:{4 * CHUNK_BYTES}B?policy=last-first"])
    assert "stranger_policies" not in sys.modules
    toy = Toy(kvtier.open(config, namespace=NAMESPACE))
    try:
        assert sys.modules["stranger_policies"].Last.made
        prompts = [prompt(CHUNK + 1, seed) for seed in range(5)]
        for number, tokens in enumerate(prompts):
            toy.save(str(number), tokens)
        there = [bool(toy.cache.match(tokens).tokens) for tokens in prompts]
        assert there == [True, True, True, False, True]  # the newest left, and not the oldest
    finally:
        toy.close()


def test_a_trace_is_replayed_under_a_strangers_policy(installed, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 8, "output_length": 0, "hash_ids": [1, 2]}\n' * 3
    )
    found = ["replay", str(trace), "--block-size", "4", "--capacity-blocks", "2"]
    assert run([*found, "--policy", "last-first"]) == 0
    assert "last-first" in capsys.readouterr().out
    assert run([*found, "--policy", "last-fist"]) == 2
    assert "did you mean 'last-first'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("half", "makes a Half, which lacks some of a Policy"),
        ("broken", "cannot be loaded: RuntimeError: no luck today"),
        ("absent", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_plug_in_that_is_none_is_refused_at_opening(installed, name, said):
    config = Config.from_urls([f"dram:1MiB?policy={name}"])
    with pytest.raises(ConfigError) as caught:
        kvtier.open(config, namespace=NAMESPACE)
    assert said in str(caught.value)
