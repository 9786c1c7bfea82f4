"""Quotas as they are written down: in TOML and in Python, and what is said when they are wrong."""

from __future__ import annotations

import pytest

from kvtier import Config, ConfigError, Namespace, Quota
from kvtier import open as open_cache
from kvtier.testing.toy import CHUNK_BYTES, GEOMETRY
from kvtier.units import parse_fraction

TIERS = 'tiers = ["dram:8GiB"]\n'


def read(tmp_path, text: str) -> Config:
    path = tmp_path / "kvtier.toml"
    path.write_text(TIERS + text)
    return Config.from_toml(path)


def test_each_tenant_has_a_table(tmp_path):
    text = '[tenants.acme]\nfloor = "10%"\nceiling = 0.5\n[tenants."b c"]\nceiling = "0.25"\n'
    assert read(tmp_path, text).quotas == {
        "acme": Quota(0.1, 0.5),
        "b c": Quota(0.0, 0.25),
    }
    assert read(tmp_path, "").quotas == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[tenants.acme]\nflor = "10%"', "option of tenant 'acme'.*'flor'.*floor"),
        ('[tenants.acme]\nfloor = "ten"', "tenant 'acme': 'ten' is not a fraction.*10%"),
        ("[tenants.acme]\nfloor = true", "tenant 'acme': True is not a fraction"),
        ("[tenants.acme]\nfloor = -0.1", "tenant 'acme': -0.1 is not a fraction"),
        ("[tenants.acme]\nfloor = nan", "tenant 'acme': nan is not a fraction"),
        ('[tenants.acme]\nfloor = "60%"\nceiling = "50%"', "tenant 'acme'.*floor <= ceiling"),
        ('[tenants.acme]\nceiling = "101%"', "tenant 'acme'.*ceiling <= 1"),
        ("[tenants]\nacme = 5", "tenant 'acme' needs a table"),
        ("[[tenants]]\nacme = 5", r"\[tenants.NAME\]"),
        ('[tenants.a]\nfloor = "60%"\n[tenants.b]\nfloor = 0.6', "'a', 'b' add up to 120%.*lower"),
        ("[tenant.acme]", "option 'tenant'.*tenants"),
    ],
)
def test_what_is_wrong_is_said_with_the_tenant_and_a_remedy(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        read(tmp_path, text)


def test_a_config_made_by_hand_is_checked_too():
    with pytest.raises(ConfigError, match="add up"):
        Config(1 << 20, quotas={"a": Quota(0.6), "b": Quota(0.6)})


@pytest.mark.parametrize(
    ("value", "fraction"), [("10%", 0.1), ("0.1", 0.1), (0.1, 0.1), (1, 1.0), ("12.5%", 0.125)]
)
def test_fractions_are_written_in_two_ways(value, fraction):
    assert parse_fraction(value) == pytest.approx(fraction)


@pytest.mark.parametrize("tier", ["dram", "memory"])
def test_a_ceiling_below_one_chunk_is_refused_with_the_tenant_and_a_remedy(tier):
    chunks = 4 if tier == "dram" else 40
    config = Config(chunks * CHUNK_BYTES, Config.from_urls(
        ["dram:1MiB", f"memory:x?capacity={6 * CHUNK_BYTES}B"]
    ).tiers, {"acme": Quota(ceiling=0.15)})  # fmt: skip
    mine = Namespace("tiny", GEOMETRY, tenant="acme")
    with pytest.raises(ConfigError, match=rf"tenant 'acme' may have .* of {tier}, 15.0%.*raise"):
        open_cache(config, namespace=mine)
    with open_cache(config, namespace=Namespace("tiny", GEOMETRY)) as other:
        with pytest.raises(ConfigError, match="tenant 'acme'"):
            other.share(mine)
        assert other._desk.depot._caches == 1
