"""``unix:PATH?option=value``, and what cannot be a daemon's address."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvtier
from kvtier import ConfigError
from kvtier.daemon.address import Address, parse_address
from kvtier.testing.toy import NAMESPACE


def test_options_are_read():
    place = parse_address("unix:/run/a?b/kv.sock?engine=one&patience=20ms&timeout=2s")
    assert place == Address("/run/a?b/kv.sock", "one", 0.02, 2.0)
    assert parse_address("unix:/run/kv.sock") == Address("/run/kv.sock", "", 0.02, 10.0)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("unix:", "is no path of a socket"),
        ("unix:?patience=1s", "is no path of a socket"),
        ("unix:/kv.sock?patince=1s", "did you mean 'patience'"),
        ("unix:/kv.sock?patience=1", "no known unit"),
        ("unix:/kv.sock?patience", "must look like"),
        ("unix:/kv.sock?patience=1s&patience=2s", "given twice"),
        ("unix:/kv.sock?engine=" + "e" * 300, "256 bytes at most"),
        ("unix:/" + "x" * 107, "has 108 bytes, and the system takes 107"),
        ("unix:/" + "ü" * 60, "has 121 bytes, and the system takes 107"),
    ],
)
def test_what_is_no_address_is_refused_with_the_remedy(url, says):
    with pytest.raises(ConfigError, match=says):
        kvtier.open(url, namespace=NAMESPACE)


def test_a_path_of_the_longest_kind_is_tried(tmp_path):
    path = "/" + "x" * 106
    with pytest.raises(ConfigError, match="no daemon answers at"):
        kvtier.open(f"unix:{path}?timeout=0ms", namespace=NAMESPACE)


def test_a_daemon_has_its_own_tiers():
    with pytest.raises(ConfigError, match="its own tiers: name unix:PATH"):
        kvtier.open("unix:/kv.sock", "dram:8MiB", namespace=NAMESPACE)


def test_who_opens_no_daemon_imports_nothing_of_it():
    look = (
        "import sys, kvtier; from kvtier.testing.toy import opened, dram; opened(dram(4)).close();"
        "print([name for name in sys.modules if name.startswith('kvtier.daemon')])"
    )
    said = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
